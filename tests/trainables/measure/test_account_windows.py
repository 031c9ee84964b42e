"""The windows that explain a step, on real gloo ranks: buckets, with and without communication, sweep, trace."""

import contextlib
import gzip
import json
import time
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import on_ranks
from trainables.measure.allreduce_sweep import REPETITIONS, sweep_sizes
from trainables.measure.communication import Account, averaging_hook, bucket_bytes, with_account
from trainables.measure.run import PROFILE_STEPS, run
from trainables.step.context import RankOutput, RankSetup
from trainables.step.parallel import ddp
from trainables.step.timing import CpuClock, no_mark
from trainables.trial import Trial

CPU = torch.device("cpu")
PAIR = Trial(
    model="resnet18",
    world_size=2,
    batch_per_gpu=2,
    image_size=8,
    warmup_steps=2,
    steps=2,
    account_steps=4,
    sweep_bytes=4096,
    profile_ranks="1",
)
GRADIENT_BYTES = 4 * 11_175_370
"""parameters of a ResNet-18 with ten classes and one input channel, its first filters 7 x 7, in fp32"""


def measured(rank: int, trial: Trial) -> RankOutput:
    def observe(devices: Any = None) -> dict[str, Any]:
        return {"rank": rank, "devices": devices, "at_s": time.perf_counter()}

    return run(trial, RankSetup(rank=rank, device=CPU, observe=observe, read_energy=observe))


@pytest.fixture(scope="module")
def pair() -> list[RankOutput]:
    return on_ranks(2, measured, PAIR)


def steps_of(measurement: RankOutput, window: str) -> list[dict[str, Any]]:
    return [row for row in measurement.tables["steps"] if row["window"] == window]


# ------------------------------------------------------------------------------------------------------- averaging


def gradients(rank: int, dtype: torch.dtype) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Gradients of three steps by DDP itself and by the hook, and what dividing the sum of the first would give."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
        account = Account(CpuClock(), None)
        if hooked:
            with_account(wrapped, account)
        generator = torch.Generator().manual_seed(rank)
        kept = []
        for _ in range(3):
            with account.step():
                inputs = torch.randn(5, 8, generator=generator).to(dtype)
                wrapped(inputs).square().mean().backward()
            kept.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            model.zero_grad()
        found.append(kept)
        if hooked:
            assert [marks.size_bytes for marks in account.steps[-1]] == bucket_bytes(wrapped)
            assert len(account.steps[-1]) > 1
    local = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    multiplied, divided = local * (1.0 / dist.get_world_size()), local / dist.get_world_size()
    return [found[0][-1], found[1][-1]], [multiplied, divided]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_hook_averages_bit_for_bit_as_ddp_does(ranks: int, dtype: torch.dtype) -> None:
    for (own, hooked), (multiplied, divided) in on_ranks(ranks, gradients, dtype):
        assert len(own) == len(hooked) == 6
        for expected, found in zip(own, hooked, strict=True):
            assert expected.abs().max() > 0
            assert torch.equal(expected, found)
        if ranks == 3 and dtype == torch.float32:
            assert not torch.equal(multiplied, divided), "a hook that divides would be found"


def test_only_ddp_has_buckets_to_account_for() -> None:
    with pytest.raises(TypeError, match="the account needs DistributedDataParallel, not Linear"):
        with_account(nn.Linear(1, 1), Account(CpuClock(), None))


# --------------------------------------------------------------------------------------------------------- windows


def test_every_bucket_of_every_step_is_there(pair: list[RankOutput]) -> None:
    for rank, measurement in enumerate(pair):
        for window in ("communication", "profile"):
            numbers = [row["step"] for row in steps_of(measurement, window)]
            rows = [row for row in measurement.tables["buckets"] if row["window"] == window]
            assert sorted({row["step"] for row in rows}) == numbers
            for number in numbers:
                buckets = [row for row in rows if row["step"] == number]
                assert [row["bucket"] for row in buckets] == list(range(len(buckets)))
                assert sum(row["bytes"] for row in buckets) == GRADIENT_BYTES
                assert len(buckets) > 1
        assert {row["rank"] for row in measurement.tables["buckets"]} == {rank}


def test_a_bucket_is_ready_in_the_step_and_ends_in_it(pair: list[RankOutput]) -> None:
    for measurement in pair:
        length = {row["step"]: row["step_s"] for row in measurement.tables["steps"] if "step_s" in row}
        last = {
            row["step"]: row["last_gradient_s"] for row in measurement.tables["steps"] if row.get("last_gradient_s")
        }
        for row in measurement.tables["buckets"]:
            assert 0 < row["ready_s"] < row["end_s"] < length[row["step"]]
        for number, last_s in last.items():
            ready = [row["ready_s"] for row in measurement.tables["buckets"] if row["step"] == number]
            assert not ready or max(ready[:-1]) < last_s == ready[-1], "the last gradient makes the last bucket ready"


def test_steps_with_and_without_communication_alternate(pair: list[RankOutput]) -> None:
    order = [row["window"] for row in pair[0].tables["steps"] if row["window"] in ("synchronised", "no_sync")]
    assert order == ["synchronised", "no_sync", "no_sync", "synchronised"] * 2
    assert all(row["step_s"] > 0 for row in pair[0].tables["steps"] if row["window"] in ("synchronised", "no_sync"))


def drift(rank: int) -> list[bool]:
    """Whether a parameter is the same on both ranks: after steps under no_sync, and under the second wrapper."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    first = ddp.wrapped(model, Trial(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def same() -> bool:
        everyone = [torch.zeros_like(model.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, model.weight.detach())
        return torch.equal(*everyone)

    with first.no_sync():  # type: ignore[operator]
        first(torch.full((2, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    found = [same()]
    del first
    ddp.wrapped(model, Trial(), None)
    return [*found, same()]


def test_the_second_wrapper_mends_the_drift_of_steps_without_communication() -> None:
    assert on_ranks(2, drift) == [[False, True]] * 2


def test_observations_come_before_the_warm_up_and_after_the_phases_and_energies_around_the_plain_window(
    pair: list[RankOutput],
) -> None:
    for rank, measurement in enumerate(pair):
        first, last = measurement.evidence["before"], measurement.evidence["after"]
        before, after = measurement.evidence["plain_window"]["before"], measurement.evidence["plain_window"]["after"]
        assert {found["rank"] for found in (first, last, before, after)} == {rank}
        assert [found["devices"] for found in (before, after)] == [[CPU]] * 2
        assert before["at_s"] - first["at_s"] > sum(row["step_s"] for row in steps_of(measurement, "warmup"))
        assert after["at_s"] - before["at_s"] > steps_of(measurement, "plain")[0]["window_s"]
        assert last["at_s"] - after["at_s"] > steps_of(measurement, "phases")[0]["window_s"]


# ----------------------------------------------------------------------------------------------------------- sweep


def test_sweep_sizes_are_powers_of_four_the_largest_and_the_buckets() -> None:
    assert sweep_sizes(1024, [40, 8000]) == [4, 16, 40, 64, 256, 1024, 8000]
    assert sweep_sizes(1000, []) == [4, 16, 64, 256, 1000]
    assert sweep_sizes(2**30, [])[-2:] == [2**28, 2**30]
    assert all(size % 4 == 0 for size in sweep_sizes(1001, [1002, 7]))


def test_the_sweep_holds_every_size_on_every_rank(pair: list[RankOutput]) -> None:
    for rank, measurement in enumerate(pair):
        buckets = {row["bytes"] for row in measurement.tables["buckets"]}
        sizes = [row["bytes"] for row in measurement.tables["sweep"]]
        assert set(sizes) == set(sweep_sizes(PAIR.sweep_bytes, buckets)) > buckets
        assert sizes == sorted(sizes)
        assert {row["repetition"] for row in measurement.tables["sweep"]} == set(range(REPETITIONS))
        assert all(row["seconds"] > 0 and row["rank"] == rank for row in measurement.tables["sweep"])


def test_without_account_steps_there_is_neither_account_nor_sweep() -> None:
    trial = Trial(model="mlp", world_size=2, batch_per_gpu=4, warmup_steps=2, steps=2, account_steps=0)
    for measurement in on_ranks(2, measured, trial):
        assert (measurement.tables["buckets"], measurement.tables["sweep"], measurement.trace) == ([], [], None)
        assert {row["window"] for row in measurement.tables["steps"]} == {"warmup", "plain", "phases"}


# ----------------------------------------------------------------------------------------------------------- trace


def test_only_chosen_ranks_keep_a_trace_and_it_names_the_parts_of_each_step(pair: list[RankOutput]) -> None:
    assert pair[0].trace is None
    assert pair[1].trace is not None
    events = json.loads(gzip.decompress(pair[1].trace))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    steps = len(steps_of(pair[1], "profile"))
    assert steps == len(steps_of(pair[0], "profile"))
    for name in ("step", "load_wait", "forward", "loss", "backward", "optimizer"):
        assert names.count(name) == steps
    assert list(islice((event["name"] for event in events if "gloo:all_reduce" in event["name"]), 1))


def test_a_single_rank_may_keep_a_trace_too() -> None:
    trial = Trial(model="mlp", parallel="none", batch_per_gpu=4, warmup_steps=2, steps=2, profile_ranks="all")
    measurement = run(trial, RankSetup(rank=0, device=CPU))
    assert measurement.trace is not None
    assert measurement.tables["buckets"] == []
    assert [row["window"] for row in measurement.tables["steps"]][-3:] == ["profile"] * 3


def test_averaging_hook_is_the_one_that_ddp_calls() -> None:
    assert averaging_hook.__annotations__["bucket"] is dist.GradBucket, "DDP checks the annotation"


# ---------------------------------------------------------------------------------------------------------- graphs


def traced_graph(rank: int) -> RankOutput:
    """A trial whose step is a graph, with a stand-in for CUDA's: it remembers a step of the capture and makes none again."""

    def captured(step: Any, example: Any, device: Any, resident: Any, non_blocking: Any, context: Any = None) -> Any:
        with (context or contextlib.nullcontext)():
            given = step(example, no_mark)

        def replay(batch: Any, begin: Any) -> Any:
            begin("graph")
            return given

        return replay

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainables.step.context.capture", captured)
        patch.setattr("trainables.measure.run.GraphClock", lambda device: CpuClock())
        patch.setattr("trainables.step.context.stream_for", lambda trial, device: contextlib.nullcontext())
        return measured(rank, PAIR.but(model="mlp", execution="graph", image_size=28, profile_ranks="0"))


def test_a_graph_that_communicates_is_traced_a_step_at_a_time() -> None:
    first, second = on_ranks(2, traced_graph)
    assert first.trace is not None and second.trace is None
    for found in (first, second):
        assert len(steps_of(found, "profile")) == PROFILE_STEPS
        assert len(steps_of(found, "communication")) == PAIR.account_steps
