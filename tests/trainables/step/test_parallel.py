"""Every parallel strategy on real gloo ranks: what it claims to compute, it computes."""

from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.gloo import on_ranks
from trainables.data.loader import endless_batches
from trainables.measure.communication import Account, with_account
from trainables.registry import PARALLEL, load
from trainables.step.context import RankSetup, build_context, rank_context
from trainables.step.parallel import ddp_bf16, ddp_fp16
from trainables.step.step import training_step
from trainables.step.timing import CpuClock, no_mark
from trainables.trial import Trial

CPU = torch.device("cpu")
PAIR = Trial(model="mlp", world_size=2, batch_per_gpu=8, warmup_steps=2, steps=3, account_steps=4, sweep_bytes=64)
ALONE = PAIR.but(world_size=1, batch_per_gpu=16, parallel="none")

EXACT = ("ddp", "ddp_delayed", "zero1", "fsdp2")
COMPRESSED = {"ddp_fp16": 2e-3, "ddp_bf16": 2e-2}
"""relative error of a gradient that is sent in so many bits"""


def trained(trial: Trial, rank: int, group: Any, steps: int = 3) -> dict[str, list[torch.Tensor]]:
    """Gradients of the first step, weights after all of them: whole, in fp32."""
    gradients: list[torch.Tensor] = []
    with rank_context(trial, RankSetup(rank, CPU, group)) as context:
        workload = context.workload
        model = context.strategy.wrapped(workload.model, trial, group)
        held = list(model.parameters())

        step = training_step(context, model)
        update = torch.optim.Optimizer.zero_grad

        def noted(optimizer: Any, set_to_none: bool = True) -> None:
            if not gradients:
                gradients.extend(whole(parameter.grad) for parameter in held)
            update(optimizer, set_to_none)

        torch.optim.Optimizer.zero_grad = noted  # type: ignore[method-assign, assignment]
        try:
            for batch in islice(endless_batches(trial, workload, rank), steps):
                step(batch, no_mark)
        finally:
            torch.optim.Optimizer.zero_grad = update  # type: ignore[method-assign]
        return {"gradients": gradients, "weights": [whole(parameter.detach()) for parameter in held]}


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone().float()


def train_all(rank: int) -> dict[str, dict[str, list[torch.Tensor]]]:
    alone: Any = dist.new_group([0])
    found = {name: trained(PAIR.but(parallel=name), rank, None) for name in (*EXACT, *COMPRESSED)}
    found["small buckets"] = trained(PAIR.but(parallel="ddp_delayed", bucket_mb=0.001), rank, None)
    found["accumulated"] = trained(PAIR.but(batch_per_gpu=2, accumulation_steps=4), rank, None)
    found["accumulated and delayed"] = trained(
        PAIR.but(batch_per_gpu=2, accumulation_steps=4, parallel="ddp_delayed"), rank, None
    )
    found["accumulated and sharded"] = trained(
        PAIR.but(batch_per_gpu=2, accumulation_steps=4, parallel="fsdp2"), rank, None
    )
    for name in ("ddp", "fsdp2"):
        found[f"blocks, {name}"] = trained(PAIR.but(model="resnet18_small", parallel=name), rank, None)
    if rank == 0:
        found["alone"] = trained(ALONE, 0, alone)
        found["alone, accumulated"] = trained(ALONE.but(batch_per_gpu=4, accumulation_steps=4), 0, alone)
    return found


@pytest.fixture(scope="module")
def visit() -> list[dict[str, dict[str, list[torch.Tensor]]]]:
    return on_ranks(2, train_all)


@pytest.mark.parametrize("what", ["gradients", "weights"])
@pytest.mark.parametrize("name", [*EXACT, "small buckets"])
def test_two_ranks_train_as_one_with_both_their_batches(visit: list[dict[str, Any]], name: str, what: str) -> None:
    expected = visit[0]["alone"][what]
    for mine, other, value in zip(visit[0][name][what], visit[1][name][what], expected, strict=True):
        assert torch.equal(mine, other)
        assert value.abs().max() > 0
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-6)


def test_blocks_that_hold_blocks_are_sharded_and_train_as_under_ddp(visit: list[dict[str, Any]]) -> None:
    for found in visit:
        for mine, value in zip(found["blocks, fsdp2"]["weights"], found["blocks, ddp"]["weights"], strict=True):
            torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_are_rounded_and_not_more(visit: list[dict[str, Any]], name: str) -> None:
    for mine, value in zip(visit[0][name]["gradients"], visit[0]["alone"]["gradients"], strict=True):
        error = (mine - value).norm() / value.norm()
        assert 0 < error < COMPRESSED[name], "an error of zero would mean that nothing was compressed"


@pytest.mark.parametrize(
    "name", ["alone, accumulated", "accumulated", "accumulated and delayed", "accumulated and sharded"]
)
def test_accumulated_batches_make_the_gradient_of_the_big_batch(visit: list[dict[str, Any]], name: str) -> None:
    """Only the sum over ranks and parts is compared: which samples meet in a part does not matter."""
    big = visit[0]["alone"]["gradients"]
    for mine, value in zip(visit[0][name]["gradients"], big, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-6)


def test_accumulation_communicates_once_a_step() -> None:
    for counts in on_ranks(2, reductions, PAIR.but(batch_per_gpu=2, accumulation_steps=4)):
        assert counts == [1, 1]


def reductions(rank: int, trial: Trial) -> list[int]:
    """All-reduces of each of two steps."""
    account = Account(CpuClock(), None)
    context = build_context(trial, RankSetup(rank, CPU))
    model = with_account(context.strategy.wrapped(context.workload.model, trial, None, bare=True), account)
    step = training_step(context, model)
    for batch in islice(endless_batches(trial, context.workload, rank), 2):
        with account.step():
            step(batch, no_mark)
    return [len(buckets) for buckets in account.steps]


def hooked(rank: int) -> list[list[torch.Tensor]]:
    """Gradients under PyTorch's own compressing hooks, and under the account's."""
    found = []
    for strategy in (ddp_fp16, ddp_bf16):
        for bare in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
            wrapped = strategy.wrapped(model, PAIR.but(bucket_mb=0.001), None, bare=bare)
            account = Account(CpuClock(), None, strategy.gradient_type)
            if bare:
                with_account(wrapped, account)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(3):
                model.zero_grad()
                with account.step():
                    wrapped(torch.randn(5, 8, generator=generator)).square().mean().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            if bare:
                sent = sum(marks.size_bytes for marks in account.steps[-1])
                assert sent == 2 * sum(parameter.numel() for parameter in model.parameters())
    return found


def test_the_account_compresses_bit_for_bit_as_pytorchs_hooks_do() -> None:
    for fp16, fp16_noted, bf16, bf16_noted in on_ranks(2, hooked):
        for own, noted in ((fp16, fp16_noted), (bf16, bf16_noted)):
            for expected, found in zip(own, noted, strict=True):
                assert expected.abs().max() > 0
                assert torch.equal(expected, found)
        assert not torch.equal(fp16[0], bf16[0])


# ----------------------------------------------------------------------------------------------------------- buffers


def test_buffers_of_ranks_meet_before_each_forward_pass_only_where_they_are_broadcast() -> None:
    first, second = on_ranks(2, one_step_means)
    for name in ("ddp", "ddp_delayed"):
        assert first[f"{name} True"] == second[f"{name} True"]
        assert first[f"{name} False"] != second[f"{name} False"]


def one_step_means(rank: int) -> dict[str, list[float]]:
    """What the third forward pass began with: running means that two passes over unlike samples left behind."""
    found = {}
    for name in ("ddp", "ddp_delayed"):
        for broadcast in (True, False):
            trial = PAIR.but(parallel=name, broadcast_buffers=broadcast)
            norm = nn.BatchNorm1d(2)
            seen: list[list[float]] = []
            norm.register_forward_pre_hook(lambda module, given, kept=seen: kept.append(module.running_mean.tolist()))
            model = load(PARALLEL[name]).wrapped(nn.Sequential(norm, nn.Linear(2, 1)), trial, None)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(3):
                model(torch.randn(4, 2, generator=generator) + rank).sum().backward()
            found[f"{name} {broadcast}"] = seen[-1]
    return found
