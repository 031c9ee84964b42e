"""Models of the registry: logits, gradients and sizes."""

import copy
import math
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.support.gloo import on_ranks
from tests.support.trials import text_trial
from trainables.build import build_workload
from trainables.data.loader import endless_batches
from trainables.measure.run import run
from trainables.models.mlstm import COMPILED_STEPS, MultiplicativeLSTM, State
from trainables.registry import IMAGE_MODELS, MODELS, TEXT_MODELS, load
from trainables.step.context import RankSetup, build_context
from trainables.step.step import training_step
from trainables.step.timing import no_mark
from trainables.trial import Trial

CPU = torch.device("cpu")
META = torch.device("meta")
STEPPED = ("mlp", "resnet18", "resnet50_small", "inception_v3", "mlstm64", "transformer_tiny")
"""One model per architecture runs a step. For the others, larger or with another stem, only shapes are checked on the
meta device."""


def on_meta(name: str, **fields: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return load(TEXT_MODELS[name])(256, text_trial(model=name, **fields))


def weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------------ all models


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models_accept_the_smallest_allowed_image(name: str, channels: int) -> None:
    size = MODELS[name].smallest_image or 8
    assert Trial(model=name, image_size=size).image_size == size
    with torch.device("meta"):
        model = load(IMAGE_MODELS[name])(10, channels, size)
        assert model(torch.empty(2, channels, size, size)).shape == (2, 10)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_models_predict_the_next_byte(name: str) -> None:
    tokens = torch.empty(4, 16, dtype=torch.uint8, device="meta")
    assert on_meta(name)(tokens).shape == (4, 16, 256)


@pytest.mark.parametrize("name", STEPPED)
def test_a_step_in_bf16_gives_every_weight_a_gradient(name: str) -> None:
    # with one pixel left, batch normalisation would divide by the spread of two values, and gradients exceed 1e22
    size = max(64, MODELS[name].smallest_image)
    trial = Trial(model=name, dataset="synthetic", image_size=size, sequence_length=8, batch_per_gpu=2)
    torch.manual_seed(0)
    workload = build_workload(trial, CPU)
    inputs, targets = next(endless_batches(trial, workload, rank=0))
    assert workload.loss is not None
    with torch.autocast("cpu", torch.bfloat16):
        outputs = workload.model(workload.prepare(inputs))
        loss = workload.loss(outputs, targets)
    assert outputs.dtype == torch.bfloat16
    loss.backward()
    for parameter_name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(STEPPED)))
def test_every_weight_of_the_other_models_gets_a_gradient(name: str) -> None:
    size = MODELS[name].smallest_image or 8
    workload = build_workload(Trial(model=name, dataset="synthetic", image_size=size, batch_per_gpu=2), META)
    assert isinstance(workload.dataset, TensorDataset) and workload.loss is not None
    inputs, targets = (tensor.to(META) for tensor in workload.dataset.tensors)
    workload.loss(workload.model(workload.prepare(inputs)), targets).backward()
    for parameter_name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, parameter_name


def test_most_weights_of_vgg19_are_in_its_first_linear_layer() -> None:
    with torch.device("meta"):
        model = load(MODELS["vgg19"])(1000, 3, 224)
    sizes = sorted(parameter.numel() for parameter in model.parameters())
    assert sum(sizes) == 143_667_240  # table 2 of the paper: 144 million
    assert sizes[-1] == 7 * 7 * 512 * 4096


def test_inception_has_no_auxiliary_classifier() -> None:
    with torch.device("meta"):
        model = load(MODELS["inception_v3"])(1000, 3, 299)
    auxiliary = 128 * 768 + 2 * 128 + 768 * 128 * 5 * 5 + 2 * 768 + 768 * 1000 + 1000
    assert weights(model) == 27_161_264 - auxiliary  # torchvision's documented num_params has it


def test_inception_v4_has_the_published_number_of_weights() -> None:
    with torch.device("meta"):
        model = load(MODELS["inception_v4"])(1000, 3, 299)
    assert weights(model) == 42_679_816  # timm's documentation: 42.68 million


def test_small_images_keep_their_size_up_to_the_first_block() -> None:
    with torch.device("meta"):
        model = load(MODELS["resnet50_small"])(10, 3, 32)
        stem = model.maxpool(model.relu(model.bn1(model.conv1(torch.empty(2, 3, 32, 32)))))
    assert stem.shape == (2, 64, 32, 32)


def test_an_mlstm_of_4096_units_has_86_million_weights() -> None:
    assert round(weights(on_meta("mlstm4096")), -6) == 86_000_000
    units = 8192
    embedding, inputs = 256 * 64, 64 * 5 * units
    recurrent = 5 * units * units + 4 * units
    assert weights(on_meta("mlstm8192")) == embedding + inputs + recurrent + 256 * units + 256


# ------------------------------------------------------------------------------------------------------- the mLSTM


def reference(model: MultiplicativeLSTM, row: torch.Tensor, state: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the logits after each byte of one row, by the equations, one gate at a time, and the last h and c."""
    layer = model.layer
    w_mx, w_ix, w_fx, w_ox, w_gx = layer.inputs.split(layer.units)
    w_im, w_fm, w_om, w_gm = layer.gates.split(layer.units)
    b_i, b_f, b_o, b_g = layer.bias.split(layer.units)
    hidden, cell = state
    logits = []
    for byte in row.tolist():
        x = model.embedding.weight[byte]
        m = (w_mx @ x) * (layer.factor @ hidden)
        i = 1 / (1 + torch.exp(-(w_ix @ x + w_im @ m + b_i)))
        f = 1 / (1 + torch.exp(-(w_fx @ x + w_fm @ m + b_f)))
        o = 1 / (1 + torch.exp(-(w_ox @ x + w_om @ m + b_o)))
        g = torch.tanh(w_gx @ x + w_gm @ m + b_g)
        cell = f * cell + i * g
        hidden = o * torch.tanh(cell)
        logits.append(model.head.weight @ hidden + model.head.bias)
    return logits, (hidden, cell)


def carried_state(model: MultiplicativeLSTM) -> State:
    (state,) = model.layer.states.values()
    return state


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))


def test_the_mlstm_follows_the_equations_of_the_paper() -> None:
    torch.manual_seed(0)
    model = MultiplicativeLSTM(256, units=7, batch=3).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)  # far from zero, so that no part of the state fades away
    states: list[Any] = [(torch.zeros(7, dtype=torch.double), torch.zeros(7, dtype=torch.double))] * 3
    untruncated = states
    for number in range(3):
        tokens = torch.randint(256, (3, 5), dtype=torch.uint8)
        weighting = torch.randn(3, 5, 256, dtype=torch.double)
        logits = model(tokens)
        rows = [reference(model, row, state) for row, state in zip(tokens, states, strict=True)]
        expected = torch.stack([torch.stack(row_logits) for row_logits, _ in rows])
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(carried_state(model).hidden, torch.stack([hidden for _, (hidden, _) in rows]))
        torch.testing.assert_close(carried_state(model).cell, torch.stack([cell for _, (_, cell) in rows]))
        of_model = gradients(model, (logits * weighting).sum())
        for ours, theirs in zip(of_model, gradients(model, (expected * weighting).sum()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        states = [(hidden.detach(), cell.detach()) for _, (hidden, cell) in rows]

        rows = [reference(model, row, state) for row, state in zip(tokens, untruncated, strict=True)]
        through = gradients(model, (torch.stack([torch.stack(each) for each, _ in rows]) * weighting).sum())
        same = [torch.allclose(ours, theirs, rtol=1e-6) for ours, theirs in zip(of_model, through, strict=True)]
        assert all(same) == (number == 0), "no gradient flows into the batch before"
        untruncated = [state for _, state in rows]


def test_consecutive_batches_continue_the_text() -> None:
    torch.manual_seed(0)
    model = MultiplicativeLSTM(256, units=16, batch=2)
    tokens = torch.randint(256, (2, 24), dtype=torch.uint8)
    parts = torch.cat([model(part) for part in tokens.split(8, dim=1)], dim=1)
    state = carried_state(model)
    carried = state.hidden.clone()
    state.hidden.zero_()
    state.cell.zero_()
    torch.testing.assert_close(parts, model(tokens))
    torch.testing.assert_close(carried, state.hidden)


def test_the_carried_state_is_fp32_and_overwritten_in_place() -> None:
    model = MultiplicativeLSTM(256, units=16, batch=2)
    state = carried_state(model)
    places = state.hidden.data_ptr(), state.cell.data_ptr()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(256, (2, 8), dtype=torch.uint8))
    state = carried_state(model)
    assert (state.hidden.data_ptr(), state.cell.data_ptr()) == places, "a CUDA graph writes to fixed places"
    assert state.hidden.dtype == state.cell.dtype == torch.float32
    assert state.hidden.any() and not state.hidden.requires_grad
    assert not list(model.buffers()), "a data-parallel wrapper would broadcast them"


def test_the_replicas_of_every_step_continue_the_state_of_their_device() -> None:
    """DataParallel makes them anew at each step. Here the second device is the meta device."""
    layer = MultiplicativeLSTM(256, units=8, batch=2).layer

    def replica_step(device: str) -> State:
        replica = layer._replicate_for_data_parallel()
        for name, parameter in layer.named_parameters():
            setattr(replica, name, parameter.to(device))
        replica(torch.ones(4, 2, 64, device=device))
        return layer.states[torch.device(device)]

    first, elsewhere = replica_step("cpu"), replica_step("meta")
    after_one = first.hidden.clone()
    assert after_one.any() and elsewhere.hidden.shape == (2, 8)
    assert replica_step("cpu").hidden is first.hidden and replica_step("meta").hidden is elsewhere.hidden
    assert not torch.equal(first.hidden, after_one), "the second step continues the first one"


def test_a_compiled_mlstm_uses_the_state_before_its_batch() -> None:
    torch.manual_seed(0)
    eager = MultiplicativeLSTM(256, units=8, batch=2)
    batches = torch.randint(256, (3, 2, 4), dtype=torch.uint8)
    eager(batches[0])
    compiled = copy.deepcopy(eager)
    forward = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for tokens in batches[1:]:
        expected = gradients(eager, eager(tokens).square().sum())
        for ours, theirs in zip(gradients(compiled, forward(tokens).square().sum()), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_compiled_mlstm_compiles_a_few_steps_for_all_others() -> None:
    torch.manual_seed(0)
    eager = MultiplicativeLSTM(256, units=8, batch=2)
    compiled = copy.deepcopy(eager)
    compiled.compile(backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.autocast("cpu", torch.bfloat16):
        for tokens in torch.randint(256, (3, 2, 3 * COMPILED_STEPS), dtype=torch.uint8):
            expected = gradients(eager, eager(tokens).square().sum())
            for ours, theirs in zip(gradients(compiled, compiled(tokens).square().sum()), expected, strict=True):
                assert torch.equal(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for each direction"


def test_evaluation_starts_from_zeros_and_keeps_the_training_state() -> None:
    torch.manual_seed(0)
    model = MultiplicativeLSTM(256, units=16, batch=2)
    tokens = torch.randint(256, (2, 8), dtype=torch.uint8)
    first = model(tokens)
    carried = carried_state(model).hidden.clone()
    model.eval()
    torch.testing.assert_close(model(tokens), first)
    assert model(tokens[:1]).shape == (1, 8, 256)
    assert torch.equal(carried_state(model).hidden, carried)


def test_a_batch_of_another_size_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"state of 2 rows.* 3$"):
        MultiplicativeLSTM(256, units=16, batch=2)(torch.zeros(3, 8, dtype=torch.uint8))


def three_steps(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    trial = text_trial(world_size=2, learning_rate=1.0)
    torch.manual_seed(rank)  # DDP broadcasts the weights of rank 0
    context = build_context(trial, RankSetup(rank, CPU))
    workload = context.workload
    model: Any = workload.model
    step = training_step(context, context.strategy.wrap_model(model, trial, None))
    alone = copy.deepcopy(model)  # reads the same rows with the same weights, without a wrapper
    for inputs, targets in islice(endless_batches(trial, workload, rank), 3):
        alone.load_state_dict(model.state_dict())
        alone(inputs)
        step((inputs, targets), no_mark)
        torch.testing.assert_close(carried_state(model).hidden, carried_state(alone).hidden)
        torch.testing.assert_close(carried_state(model).cell, carried_state(alone).cell)
    return carried_state(model).hidden, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_ddp_ranks_have_equal_weights_and_separate_states() -> None:
    (first_state, first_weights), (second_state, second_weights) = on_ranks(2, three_steps)
    assert torch.equal(first_weights, second_weights)
    assert (first_state - second_state).abs().amax(dim=1).min() > 1e-3, "the rows read different bytes"


# -------------------------------------------------------------------------------------------------- the transformer


def test_the_transformer_is_causal() -> None:
    torch.manual_seed(0)
    model = load(MODELS["transformer_tiny"])(256, text_trial())
    tokens = torch.randint(256, (1, 16), dtype=torch.uint8)
    other = tokens.clone()
    other[0, 9] += 1
    differs = (model(tokens) != model(other)).any(dim=-1)[0]
    assert differs.tolist() == [False] * 9 + [True] * 7


def test_the_transformer_has_a_position_per_token_of_the_sequence() -> None:
    model: Any = on_meta("transformer", sequence_length=300)
    assert model.positions.weight.shape == (300, 512)
    assert len(model.blocks) == 8
    assert weights(model) - weights(model.positions) == 8 * (12 * 512**2 + 4 * 512) + 2 * 512 + 2 * 256 * 512


def test_the_transformers_attention_matches_the_textbook() -> None:
    torch.manual_seed(0)
    model = load(MODELS["transformer_tiny"])(256, text_trial())
    block = model.blocks[0]
    hidden = torch.randn(2, 6, 32)
    query, key, value = block.attention_in(block.attention_norm(hidden)).chunk(3, dim=-1)
    heads = []
    for head in range(2):
        q, k, v = (part[..., 16 * head : 16 * (head + 1)] for part in (query, key, value))
        scores = (q @ k.transpose(1, 2) / math.sqrt(16)).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(dim=-1) @ v)
    after = hidden + block.attention_out(torch.cat(heads, dim=-1))
    inner = functional.gelu(block.perceptron_in(block.perceptron_norm(after)))
    torch.testing.assert_close(block(hidden), after + block.perceptron_out(inner))


# ------------------------------------------------------------------------------------------------ complete trials


def learn(rank: int, model: str, learning_rate: float) -> list[float]:
    fields = {"steps": 20, "communication_steps": 4, "sweep_bytes": 4096}
    trial = text_trial(model=model, world_size=2, batch_per_gpu=8, learning_rate=learning_rate, **fields)
    return [row["loss"] for row in run(trial, RankSetup(rank=rank, device=CPU)).tables["steps"]]


@pytest.mark.parametrize(("model", "learning_rate"), [("mlstm64", 1.0), ("transformer_tiny", 0.1)])
def test_text_models_learn_on_two_ranks(model: str, learning_rate: float) -> None:
    for losses in on_ranks(2, learn, model, learning_rate):
        assert losses[0] == pytest.approx(math.log(256), abs=0.2), "at first all bytes are equally likely"
        assert sum(losses[-8:]) < 0.8 * 8 * losses[0]
