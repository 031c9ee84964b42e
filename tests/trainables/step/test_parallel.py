"""Every parallel strategy on real gloo ranks computes the expected gradients and weights."""

from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.gloo import on_ranks
from tests.support.trials import quick_pair
from trainables.data.loader import endless_batches
from trainables.measure.communication import BucketRecorder, record_buckets
from trainables.registry import PARALLEL, load
from trainables.rules import has_cpp_compiler
from trainables.step.context import RankSetup, build_context, rank_context
from trainables.step.parallel import ddp_bf16, ddp_fp16
from trainables.step.step import training_step
from trainables.step.timing import CpuClock, no_mark
from trainables.trial import Trial

CPU = torch.device("cpu")
PAIR = quick_pair(communication_steps=4, sweep_bytes=64)
ALONE = PAIR.but(world_size=1, batch_per_gpu=16, parallel="none")

TEXT = PAIR.but(dataset="token_sample", model="gpt2_tiny", sequence_length=16, batch_per_gpu=4, learning_rate=0.1)
TIED = ("gpt2_tiny", "llama_tiny")
"""models with one weight for the token embedding and the output"""

EXACT = ("ddp", "ddp_delayed", "zero1", "fsdp2", "hsdp")
COMPRESSED = {"ddp_fp16": 2e-3, "ddp_bf16": 2e-2}
"""largest relative error of a gradient sent in this type"""


def trained(trial: Trial, rank: int, group: Any, steps: int = 3) -> dict[str, list[torch.Tensor]]:
    """Return the unsharded gradients of the first step and the weights after all steps, in fp32."""
    gradients: list[torch.Tensor] = []
    with rank_context(trial, RankSetup(rank, CPU, group)) as context:
        workload = context.workload
        model = context.strategy.wrap_model(workload.model, trial, group)
        parameters = list(model.parameters())

        step = training_step(context, model)
        zero_grad = torch.optim.Optimizer.zero_grad

        def recording(optimizer: Any, set_to_none: bool = True) -> None:
            if not gradients:
                gradients.extend(unsharded(parameter.grad) for parameter in parameters)
            zero_grad(optimizer, set_to_none)

        torch.optim.Optimizer.zero_grad = recording  # type: ignore[method-assign, assignment]
        try:
            for batch in islice(endless_batches(trial, workload, rank), steps):
                step(batch, no_mark)
        finally:
            torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        return {"gradients": gradients, "weights": [unsharded(parameter.detach()) for parameter in parameters]}


def unsharded(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone().float()


def train_all(rank: int) -> dict[str, dict[str, list[torch.Tensor]]]:
    alone: Any = dist.new_group([0])
    found = {name: trained(PAIR.but(parallel=name), rank, None) for name in (*EXACT, *COMPRESSED)}
    found["small buckets"] = trained(PAIR.but(parallel="ddp_delayed", bucket_mb=0.001), rank, None)
    found["small first bucket"] = trained(PAIR.but(first_bucket_mb=0.001), rank, None)
    found["accumulated"] = trained(PAIR.but(batch_per_gpu=2, accumulation_steps=4), rank, None)
    found["accumulated and delayed"] = trained(
        PAIR.but(batch_per_gpu=2, accumulation_steps=4, parallel="ddp_delayed"), rank, None
    )
    found["accumulated and sharded"] = trained(
        PAIR.but(batch_per_gpu=2, accumulation_steps=4, parallel="fsdp2"), rank, None
    )
    for name in ("ddp", "fsdp2"):
        found[f"blocks, {name}"] = trained(PAIR.but(model="resnet18_small", parallel=name), rank, None)
    for model in TIED:
        for name in EXACT:
            found[f"{model}, {name}"] = trained(TEXT.but(model=model, parallel=name), rank, None)
            if model == "gpt2_tiny":
                less = TEXT.but(model=model, parallel=name, fused_loss=True, activation_checkpointing="selective")
                found[f"{model}, {name}, less memory"] = trained(less, rank, None)
        if rank == 0:
            one = TEXT.but(model=model, world_size=1, batch_per_gpu=8, parallel="none")
            found[f"{model}, alone"] = trained(one, 0, alone)
    if rank == 0:
        found["alone"] = trained(ALONE, 0, alone)
        found["alone, accumulated"] = trained(ALONE.but(batch_per_gpu=4, accumulation_steps=4), 0, alone)
    return found


@pytest.fixture(scope="module")
def visit() -> list[dict[str, dict[str, list[torch.Tensor]]]]:
    return on_ranks(2, train_all)


@pytest.mark.parametrize("what", ["gradients", "weights"])
@pytest.mark.parametrize("name", [*EXACT, "small buckets", "small first bucket"])
def test_two_ranks_train_like_one_with_both_batches(visit: list[dict[str, Any]], name: str, what: str) -> None:
    expected = visit[0]["alone"][what]
    for mine, other, value in zip(visit[0][name][what], visit[1][name][what], expected, strict=True):
        assert torch.equal(mine, other)
        assert value.abs().max() > 0
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("model", "memory"), [*((model, "") for model in TIED), ("gpt2_tiny", ", less memory")])
def test_tied_weights_train_on_two_ranks_like_on_one(
    visit: list[dict[str, Any]], model: str, memory: str, name: str
) -> None:
    for what in ("gradients", "weights"):
        expected = visit[0][f"{model}, alone"][what]
        for mine, value in zip(visit[1][f"{model}, {name}{memory}"][what], expected, strict=True):
            torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-6)


def hybrid(rank: int) -> dict[str, dict[str, list[torch.Tensor]]]:
    """Train on four ranks: two copies of the weights, each on two ranks. Rank 0 also trains on all samples alone."""
    tokens = TEXT.but(world_size=4, batch_per_gpu=2, parallel="hsdp")
    images = PAIR.but(world_size=4, batch_per_gpu=2, accumulation_steps=2, parallel="hsdp")
    alone: Any = dist.new_group([0])
    found = {"tokens": trained(tokens, rank, None), "images, accumulated": trained(images, rank, None)}
    if rank == 0:
        found["tokens, alone"] = trained(tokens.but(world_size=1, batch_per_gpu=8, parallel="none"), 0, alone)
        found["images, accumulated, alone"] = trained(ALONE, 0, alone)
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, dict[str, list[torch.Tensor]]]]:
    return on_ranks(4, hybrid)


@pytest.mark.parametrize("name", ["tokens", "images, accumulated"])
def test_two_copies_on_two_ranks_each_train_like_one_rank(four: list[dict[str, Any]], name: str) -> None:
    expected = four[0][f"{name}, alone"]
    for found in four:
        for what in ("gradients", "weights"):
            for mine, value in zip(found[name][what], expected[what], strict=True):
                assert value.abs().max() > 0
                torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-6)


def placements(rank: int, shard_ranks: int | None) -> tuple[list[int], list[int]]:
    """Return the ranks that share this rank's copy, and those that hold the same part of another copy."""
    trial = TEXT.but(world_size=4, batch_per_gpu=2, parallel="hsdp", shard_ranks=shard_ranks)
    context = build_context(trial, RankSetup(rank, CPU))
    model = context.strategy.wrap_model(context.workload.model, trial, None)
    [mesh] = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    return mesh["shard"].mesh.tolist(), mesh["replicate"].mesh.tolist()


@pytest.mark.parametrize(
    ("shard_ranks", "copy", "others"), [(None, [2, 3], [0, 2]), (4, [0, 1, 2, 3], [2]), (1, [2], [0, 1, 2, 3])]
)
def test_consecutive_ranks_share_a_copy(shard_ranks: int | None, copy: list[int], others: list[int]) -> None:
    assert on_ranks(4, placements, shard_ranks)[2] == (copy, others)


COMPILED = [("gpt2_tiny", "ddp"), ("llama_tiny", "fsdp2")]


def compiled_blocks(rank: int) -> dict[str, Any]:
    """Train with compiled blocks on both ranks, and eagerly on rank 0 alone."""
    alone: Any = dist.new_group([0])
    found: dict[str, Any] = {}
    for model, name in COMPILED:
        less = {"activation_checkpointing": "full" if name == "fsdp2" else "selective"}
        trial = TEXT.but(model=model, parallel=name, execution="compile_blocks", **less)
        found[name] = trained(trial, rank, None)
        if rank == 0:
            one = TEXT.but(model=model, world_size=1, batch_per_gpu=8, parallel="none")
            found[f"{name}, alone"] = trained(one, 0, alone)
    return found


@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
def test_compiled_blocks_train_on_two_ranks_like_eager_ones_on_one() -> None:
    first, second = on_ranks(2, compiled_blocks, timeout_s=800)
    for _, name in COMPILED:
        for found in (first, second):
            for what in ("gradients", "weights"):
                for mine, value in zip(found[name][what], first[f"{name}, alone"][what], strict=True):
                    torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-6)


def one_rank_first(rank: int) -> dict[str, list[torch.Tensor]]:
    """Train on rank 0 alone, then on both ranks."""
    groups: list[Any] = [dist.new_group([0]), dist.new_group([0, 1])]
    if rank == 0:
        trained(TEXT.but(world_size=1, parallel="hsdp"), 0, groups[0], steps=1)
    return trained(TEXT.but(parallel="hsdp"), rank, groups[1], steps=1)


def test_a_rank_that_took_part_in_more_trials_still_meets_the_others() -> None:
    first, second = on_ranks(2, one_rank_first, timeout_s=60)
    for mine, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(mine, other)


def test_nested_blocks_are_sharded_and_train_like_ddp(visit: list[dict[str, Any]]) -> None:
    for found in visit:
        for mine, value in zip(found["blocks, fsdp2"]["weights"], found["blocks, ddp"]["weights"], strict=True):
            torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_have_only_rounding_errors(visit: list[dict[str, Any]], name: str) -> None:
    for mine, value in zip(visit[0][name]["gradients"], visit[0]["alone"]["gradients"], strict=True):
        error = (mine - value).norm() / value.norm()
        assert 0 < error < COMPRESSED[name], "an error of zero would mean that nothing was compressed"


@pytest.mark.parametrize(
    "name", ["alone, accumulated", "accumulated", "accumulated and delayed", "accumulated and sharded"]
)
def test_accumulated_batches_give_the_gradient_of_the_large_batch(visit: list[dict[str, Any]], name: str) -> None:
    """Compares the sum over ranks and parts, which does not depend on how samples are divided into parts."""
    big = visit[0]["alone"]["gradients"]
    for mine, value in zip(visit[0][name]["gradients"], big, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-6)


def test_accumulation_communicates_once_per_step() -> None:
    for counts in on_ranks(2, reductions, PAIR.but(batch_per_gpu=2, accumulation_steps=4)):
        assert counts == [1, 1]


@pytest.mark.parametrize("changes", [{}, {"static_graph": True}])
def test_the_first_bucket_has_a_size_of_its_own(changes: dict[str, Any]) -> None:
    """The gradients of a step are ready from the last layer to the first."""
    model = PAIR.but(model="resnet18_small", bucket_mb=1.0, **changes)
    usual, small = on_ranks(2, buckets_of_both, model, model.but(first_bucket_mb=0.01))[1]
    assert sum(usual) == sum(small)
    assert usual[0] > 2**20 > small[0] > 0.01 * 2**20
    assert all(size > 2**20 for size in small[1:-1])


def buckets_of_both(rank: int, *trials: Trial) -> list[list[int]]:
    """Return the bytes of the buckets of a second step, in the order in which they are reduced, per trial."""
    return [[int(marks.size_bytes) for marks in recorded_steps(rank, trial)[1]] for trial in trials]


def reductions(rank: int, trial: Trial) -> list[int]:
    """Return the number of all-reduces in each of two steps."""
    return [len(buckets) for buckets in recorded_steps(rank, trial)]


def recorded_steps(rank: int, trial: Trial) -> list[list[Any]]:
    """Return the buckets of each of two steps."""
    recorder = BucketRecorder(CpuClock(), None)
    context = build_context(trial, RankSetup(rank, CPU))
    model = context.strategy.wrap_model(context.workload.model, trial, None, compression=False)
    record_buckets(model, recorder)
    step = training_step(context, model)
    for batch in islice(endless_batches(trial, context.workload, rank), 2):
        with recorder.step():
            step(batch, no_mark)
    return recorder.steps


def compressed_gradients(rank: int) -> list[list[torch.Tensor]]:
    """Return gradients under PyTorch's compression hooks and under the recorder's hook, for fp16 and bf16."""
    results = []
    for strategy in (ddp_fp16, ddp_bf16):
        for recorded in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
            wrapped = strategy.wrap_model(model, PAIR.but(bucket_mb=0.001), None, compression=not recorded)
            recorder = BucketRecorder(CpuClock(), None, strategy.gradient_type)
            if recorded:
                record_buckets(wrapped, recorder)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(3):
                model.zero_grad()
                with recorder.step():
                    wrapped(torch.randn(5, 8, generator=generator)).square().mean().backward()
            results.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            if recorded:
                sent_bytes = sum(marks.size_bytes for marks in recorder.steps[-1])
                assert sent_bytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    return results


def test_the_recorder_compresses_bit_for_bit_like_pytorchs_hooks() -> None:
    for fp16, fp16_recorded, bf16, bf16_recorded in on_ranks(2, compressed_gradients):
        for plain, recorded in ((fp16, fp16_recorded), (bf16, bf16_recorded)):
            for expected, actual in zip(plain, recorded, strict=True):
                assert expected.abs().max() > 0
                assert torch.equal(expected, actual)
        assert not torch.equal(fp16[0], bf16[0])


# ----------------------------------------------------------------------------------------------------------- buffers


def test_buffers_are_equal_across_ranks_only_if_broadcast() -> None:
    first, second = on_ranks(2, one_step_means)
    for name in ("ddp", "ddp_delayed"):
        assert first[f"{name} True"] == second[f"{name} True"]
        assert first[f"{name} False"] != second[f"{name} False"]


def one_step_means(rank: int) -> dict[str, list[float]]:
    """Return the running means before the third forward pass, after two passes over samples that differ by rank."""
    found = {}
    for name in ("ddp", "ddp_delayed"):
        for broadcast in (True, False):
            trial = PAIR.but(parallel=name, broadcast_buffers=broadcast)
            norm = nn.BatchNorm1d(2)
            means: list[list[float]] = []
            norm.register_forward_pre_hook(lambda module, args, means=means: means.append(module.running_mean.tolist()))
            model = load(PARALLEL[name]).wrap_model(nn.Sequential(norm, nn.Linear(2, 1)), trial, None)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(3):
                model(torch.randn(4, 2, generator=generator) + rank).sum().backward()
            found[f"{name} {broadcast}"] = means[-1]
    return found
