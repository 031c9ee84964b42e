"""GPT-2 and Llama against other people's implementations, their published sizes and their operations."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from trainables.build import build_workload
from trainables.data.text import next_token_loss
from trainables.models import fused_loss
from trainables.models.blocks import checkpoint_blocks, compile_blocks
from trainables.models.gpt2 import GPT2
from trainables.models.llama import Llama
from trainables.registry import MODELS, TOKEN_MODELS, load
from trainables.step.flops import causal_attention_flops, counted_flops, recomputed_flops
from trainables.trial import Trial

CPU = torch.device("cpu")
TOKENS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))


def token_trial(**fields: Any) -> Trial:
    return Trial(
        **{"model": "gpt2_tiny", "dataset": "token_sample", "batch_per_gpu": 4, "sequence_length": 16} | fields
    )


def randomise(model: nn.Module) -> None:
    """Give every weight a value of its own, so that a swapped one shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))


def test_gpt2_has_the_logits_of_hugging_faces_model_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    ours = GPT2(256, 16, width=32, heads=4, blocks=3)
    randomise(ours)
    config = transformers.GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=3, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    names = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
    parts = {
        "attention_norm": "ln_1", "attention_in": "attn.c_attn", "attention_out": "attn.c_proj",
        "perceptron_norm": "ln_2", "perceptron_in": "mlp.c_fc", "perceptron_out": "mlp.c_proj",
    }  # fmt: skip
    names |= {f"blocks.{i}.{part}": f"h.{i}.{name}" for i in range(3) for part, name in parts.items()}
    weights = {}
    for name, value in ours.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module != "head":
            is_transposed = "attn" in names[module] or "mlp" in names[module]  # their linear layers are [in, out]
            weights[f"transformer.{names[module]}.{kind}"] = value.T if is_transposed and value.dim() == 2 else value
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    theirs.load_state_dict(weights)
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_llama_has_the_logits_of_hugging_faces_model_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    ours = Llama(256, 16, 32, heads=4, groups=2, inner=48, blocks=3, tied=False)
    randomise(ours)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    parts = {
        "attention_norm": "input_layernorm", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
        "value": "self_attn.v_proj", "attention_out": "self_attn.o_proj",
        "perceptron_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }  # fmt: skip
    names |= {f"blocks.{i}.{part}": f"model.layers.{i}.{name}" for i in range(3) for part, name in parts.items()}
    theirs.load_state_dict(
        {f"{names[name.removesuffix('.weight')]}.weight": value for name, value in ours.state_dict().items()}
    )
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # published sizes; GPT-2's vocabulary is padded by 47 ids
        ("gpt2", 124_439_808 + 47 * 768),
        ("gpt2_medium", 354_823_168 + 47 * 1024),
        ("llama_1b", 1_235_814_400),
        ("llama_8b", 8_030_261_248),
    ],
)
def test_models_have_the_published_number_of_weights(name: str, weights: int) -> None:
    facts = MODELS[name]
    with torch.device("meta"):
        model = load(facts)(facts.vocabulary, token_trial(model=name))
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert facts.million_weights == pytest.approx(weights / 1e6, rel=0.005)


@pytest.mark.parametrize("name", ["gpt2", "llama_1b"])
def test_counted_operations_are_those_of_palms_formula(name: str) -> None:
    """Appendix B of Chowdhery et al. 2022: 6 N + 12 L H Q T per token. N: weights of matrix products."""
    layers, width, length = {"gpt2": (12, 768, 1024), "llama_1b": (16, 2048, 1024)}[name]
    facts = MODELS[name]
    with torch.device("meta"):
        model = load(facts)(facts.vocabulary, token_trial(model=name, sequence_length=length))
        tokens = torch.empty(1, length, dtype=torch.int32)
        counted = counted_flops(lambda: model(tokens).sum())
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    weights -= model.positions.weight.numel() if name == "gpt2" else 0
    attention = length * 12 * layers * width * length
    assert counted == pytest.approx(length * 6 * weights + attention, rel=0.001)
    assert causal_attention_flops(lambda: model, tokens) == attention


@pytest.mark.parametrize("name", [name for name, facts in TOKEN_MODELS.items() if facts.fits_cpu])
def test_small_models_learn_the_sample(name: str) -> None:
    torch.manual_seed(0)
    workload = build_workload(token_trial(model=name), CPU)
    assert workload.loss is not None and workload.tokens_per_sample == 16
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=3e-3)
    inputs, targets = workload.dataset.__getitems__(list(range(0, 128, 16)))  # type: ignore[union-attr]
    losses = []
    for _ in range(40):
        loss = workload.loss(workload.model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.log(torch.tensor(8192.0)).item(), abs=0.3)
    assert losses[-1] < 0.6 * losses[0]


def loss_and_gradients(
    model: nn.Module, loss: Callable[[], torch.Tensor], autocast: torch.dtype | None = None
) -> tuple[float, torch.Tensor]:
    """Return the loss and all gradients, flattened."""
    model.zero_grad()
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        value = loss()
    value.backward()
    return value.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_the_fused_loss_has_the_gradients_of_the_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "CHUNK_TOKENS", 10)  # of 24 tokens, so that the last chunk is smaller
    model = load(MODELS[name])(256, token_trial(model=name))
    randomise(model)
    targets = TOKENS.flip(1)
    plain = lambda: next_token_loss(model(TOKENS), targets)  # noqa: E731
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    value, gradients = loss_and_gradients(model, plain)
    for fused in (lambda: model(TOKENS, targets), lambda: compiled(TOKENS, targets)):
        fused_value, fused_gradients = loss_and_gradients(model, fused)
        assert fused_value == pytest.approx(value, rel=1e-5)
        torch.testing.assert_close(fused_gradients, gradients, rtol=1e-3, atol=1e-5)
        _, half = loss_and_gradients(model, plain, torch.bfloat16)
        _, fused_half = loss_and_gradients(model, fused, torch.bfloat16)
        assert (fused_half - gradients).norm() < 1.1 * (half - gradients).norm()


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_activation_checkpointing_repeats_the_forward_pass_of_blocks_with_equal_gradients(name: str) -> None:
    blueprint = partial(load(MODELS[name]), 256, token_trial(model=name))
    model = blueprint()
    randomise(model)
    expected = loss_and_gradients(model, lambda: model(TOKENS).square().mean())
    weights = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.dim() == 2)
    # the result of a block's last product is an input of the next block, which is stored
    weights -= sum(
        (block.perceptron_out if name == "gpt2_tiny" else block.down).weight.numel() for block in model.blocks
    )
    forward = TOKENS.numel() * 2 * weights + causal_attention_flops(blueprint, TOKENS) / 3
    assert recomputed_flops(blueprint, TOKENS, selective=False) == forward
    assert recomputed_flops(blueprint, TOKENS, selective=True) == 0
    for selective in (True, False):
        model = checkpoint_blocks(blueprint(), selective=selective)
        randomise(model)
        value, gradients = loss_and_gradients(model, lambda: model(TOKENS).square().mean())  # noqa: B023
        assert value == pytest.approx(expected[0])
        torch.testing.assert_close(gradients, expected[1])


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_the_code_of_the_first_block_is_that_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled, fullgraph=True))
    model = load(MODELS[name])(256, token_trial(model=name))
    eager = model(TOKENS)
    torch._dynamo.reset()
    compile_blocks(model)
    torch.testing.assert_close(model(TOKENS), eager)
    assert compiled.frame_count == 1


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_a_token_sees_only_those_before_it(name: str) -> None:
    torch.manual_seed(0)
    model = load(MODELS[name])(256, token_trial(model=name))
    changed = TOKENS.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 256
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert (before[:, 8:] - after[:, 8:]).abs().amax(dim=(0, 2)).min() > 0
