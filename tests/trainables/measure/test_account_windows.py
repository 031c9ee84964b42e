"""Communication windows on real gloo ranks: buckets, steps with and without communication, sweep, trace."""

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
from tests.support.trials import quick_pair
from trainables.measure.allreduce_sweep import REPETITIONS, sweep_sizes
from trainables.measure.communication import BucketRecorder, averaging_hook, bucket_bytes, record_buckets
from trainables.measure.communication_windows import PROFILE_STEPS
from trainables.measure.run import run
from trainables.measure.windows import interleaved_blocks
from trainables.step.context import RankOutput, RankSetup
from trainables.step.parallel import ddp
from trainables.step.timing import CpuClock, no_mark
from trainables.trial import Trial

CPU = torch.device("cpu")
PAIR = quick_pair(model="resnet18", batch_per_gpu=2, image_size=8, steps=2, communication_steps=4, profile_ranks="1")
GRADIENT_BYTES = 4 * 11_175_370
"""parameters of a ResNet-18 with ten classes, one input channel and 7 x 7 first filters, in fp32"""


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
    """Return the gradients of the third step without and with the hook, and local values scaled in two ways."""
    results = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
        recorder = BucketRecorder(CpuClock(), None)
        if hooked:
            record_buckets(wrapped, recorder)
        generator = torch.Generator().manual_seed(rank)
        steps = []
        for _ in range(3):
            with recorder.step():
                inputs = torch.randn(5, 8, generator=generator).to(dtype)
                wrapped(inputs).square().mean().backward()
            steps.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            model.zero_grad()
        results.append(steps)
        if hooked:
            assert [marks.size_bytes for marks in recorder.steps[-1]] == bucket_bytes(wrapped)
            assert len(recorder.steps[-1]) > 1
    local = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    multiplied, divided = local * (1.0 / dist.get_world_size()), local / dist.get_world_size()
    return [results[0][-1], results[1][-1]], [multiplied, divided]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_hook_averages_bit_for_bit_like_ddp(ranks: int, dtype: torch.dtype) -> None:
    for (plain, hooked), (multiplied, divided) in on_ranks(ranks, gradients, dtype):
        assert len(plain) == len(hooked) == 6
        for expected, actual in zip(plain, hooked, strict=True):
            assert expected.abs().max() > 0
            assert torch.equal(expected, actual)
        if ranks == 3 and dtype == torch.float32:
            assert not torch.equal(multiplied, divided), "the test would detect a hook that divides"


def test_only_ddp_has_buckets() -> None:
    with pytest.raises(TypeError, match=r"DistributedDataParallel.* Linear"):
        record_buckets(nn.Linear(1, 1), BucketRecorder(CpuClock(), None))


# --------------------------------------------------------------------------------------------------------- windows


def test_every_bucket_of_every_step_is_recorded(pair: list[RankOutput]) -> None:
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


def test_a_bucket_is_ready_and_reduced_within_its_step(pair: list[RankOutput]) -> None:
    for measurement in pair:
        length = {row["step"]: row["step_s"] for row in measurement.tables["steps"] if "step_s" in row}
        last = {
            row["step"]: row["last_gradient_s"] for row in measurement.tables["steps"] if row.get("last_gradient_s")
        }
        for row in measurement.tables["buckets"]:
            assert 0 < row["ready_s"] < row["end_s"] < length[row["step"]]
        for number, last_s in last.items():
            ready = [row["ready_s"] for row in measurement.tables["buckets"] if row["step"] == number]
            assert not ready or max(ready[:-1]) < last_s == ready[-1], "the last gradient completes the last bucket"


def test_blocks_with_and_without_communication_each_begin_with_a_step_that_does_not_count(
    pair: list[RankOutput],
) -> None:
    windows = ("synchronised", "no_sync", "lead_in")
    order = [row["window"] for row in pair[0].tables["steps"] if row["window"] in windows]
    block = {kind: ["lead_in", *[kind] * count] for kind, count in (("synchronised", 2), ("no_sync", 4))}
    assert order == [*block["synchronised"], *block["no_sync"], *block["synchronised"]]
    assert all(row["step_s"] > 0 for row in pair[0].tables["steps"] if row["window"] in ("synchronised", "no_sync"))


def drift(rank: int) -> list[bool]:
    """Return whether ranks have equal weights after steps under no_sync, and after wrapping the model again."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    first = ddp.wrap_model(model, Trial(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def same() -> bool:
        weights = [torch.zeros_like(model.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(weights, model.weight.detach())
        return torch.equal(*weights)

    with first.no_sync():  # type: ignore[operator]
        first(torch.full((2, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    before = same()
    del first
    ddp.wrap_model(model, Trial(), None)
    return [before, same()]


def test_wrapping_the_model_again_equalises_the_weights() -> None:
    assert on_ranks(2, drift) == [[False, True]] * 2


def test_observations_enclose_all_windows_and_energies_the_plain_window(
    pair: list[RankOutput],
) -> None:
    for rank, measurement in enumerate(pair):
        first, last = measurement.evidence["before"], measurement.evidence["after"]
        before, after = measurement.evidence["plain_window"]["before"], measurement.evidence["plain_window"]["after"]
        assert {observation["rank"] for observation in (first, last, before, after)} == {rank}
        assert [energy["devices"] for energy in (before, after)] == [[CPU]] * 2
        assert before["at_s"] - first["at_s"] > sum(row["step_s"] for row in steps_of(measurement, "warmup"))
        in_turn = [steps_of(measurement, window)[0]["window_s"] for window in ("plain", "phases")]
        assert after["at_s"] - before["at_s"] > sum(in_turn)
        assert last["at_s"] > after["at_s"]


def test_with_loaders_the_energies_enclose_the_plain_window_alone() -> None:
    trial = Trial(model="mlp", batch_per_gpu=4, warmup_steps=2, steps=2, loader_workers=1)
    [measurement] = on_ranks(1, measured, trial)
    before, after = measurement.evidence["plain_window"]["before"], measurement.evidence["plain_window"]["after"]
    assert after["at_s"] - before["at_s"] > steps_of(measurement, "plain")[0]["window_s"]
    assert measurement.evidence["after"]["at_s"] - after["at_s"] > steps_of(measurement, "phases")[0]["window_s"]


@pytest.mark.parametrize("steps", range(1, 12))
def test_blocks_of_interleaved_steps_cancel_a_drift(steps: int) -> None:
    kinds = [kind for kind, count in interleaved_blocks(steps) for _ in range(count)]
    assert kinds.count(True) == kinds.count(False) == steps
    moments = {kind: [i for i, of_step in enumerate(kinds) if of_step is kind] for kind in (True, False)}
    middle = {kind: sum(values) / steps for kind, values in moments.items()}
    assert steps % 2 or middle[True] == middle[False]


# ----------------------------------------------------------------------------------------------------------- sweep


def test_sweep_sizes_are_powers_of_four_the_largest_and_the_buckets() -> None:
    assert sweep_sizes(1024, [40, 8000]) == [4, 16, 40, 64, 256, 1024, 8000]
    assert sweep_sizes(1000, []) == [4, 16, 64, 256, 1000]
    assert sweep_sizes(2**30, [])[-2:] == [2**28, 2**30]
    assert sweep_sizes(16, [0, 1, 7]) == [4, 16]
    assert all(size % 4 == 0 for size in sweep_sizes(1001, [1002, 7]))


def test_the_sweep_has_every_size_on_every_rank(pair: list[RankOutput]) -> None:
    for rank, measurement in enumerate(pair):
        buckets = {row["bytes"] for row in measurement.tables["buckets"]}
        sizes = [row["bytes"] for row in measurement.tables["sweep"]]
        assert set(sizes) == set(sweep_sizes(PAIR.sweep_bytes, buckets)) > buckets
        assert sizes == sorted(sizes)
        assert {row["repetition"] for row in measurement.tables["sweep"]} == set(range(REPETITIONS))
        assert all(row["seconds"] > 0 and row["rank"] == rank for row in measurement.tables["sweep"])


def test_without_communication_steps_there_is_no_breakdown_and_no_sweep() -> None:
    trial = Trial(model="mlp", world_size=2, batch_per_gpu=4, warmup_steps=2, steps=2, communication_steps=0)
    for measurement in on_ranks(2, measured, trial):
        assert (measurement.tables["buckets"], measurement.tables["sweep"], measurement.trace) == ([], [], None)
        assert {row["window"] for row in measurement.tables["steps"]} == {"warmup", "plain", "phases"}


# ----------------------------------------------------------------------------------------------------------- trace


def test_only_selected_ranks_record_a_trace_of_the_parts_of_each_step(pair: list[RankOutput]) -> None:
    assert pair[0].trace is None
    assert pair[1].trace is not None
    events = json.loads(gzip.decompress(pair[1].trace))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    steps = len(steps_of(pair[1], "profile"))
    assert steps == len(steps_of(pair[0], "profile"))
    for name in ("step", "load_wait", "forward", "loss", "backward", "optimizer"):
        assert names.count(name) == steps
    assert list(islice((event["name"] for event in events if "gloo:all_reduce" in event["name"]), 1))


def test_a_single_rank_can_record_a_trace() -> None:
    trial = Trial(model="mlp", parallel="none", batch_per_gpu=4, warmup_steps=2, steps=2, profile_ranks="all")
    measurement = run(trial, RankSetup(rank=0, device=CPU))
    assert measurement.trace is not None
    assert measurement.tables["buckets"] == []
    assert [row["window"] for row in measurement.tables["steps"]][-3:] == ["profile"] * 3


def test_the_hook_has_the_signature_that_ddp_requires() -> None:
    assert averaging_hook.__annotations__["bucket"] is dist.GradBucket, "DDP checks the annotation"


# ---------------------------------------------------------------------------------------------------------- graphs


def traced_graph(rank: int) -> RankOutput:
    """Run a trial with a fake CUDA graph: the capture runs a step, and replays return its output."""

    def captured(step: Any, example: Any, device: Any, resident: Any, non_blocking: Any, context: Any = None) -> Any:
        with (context or contextlib.nullcontext)():
            output = step(example, no_mark)

        def replay(batch: Any, start_part: Any) -> Any:
            start_part("graph")
            return output

        return replay

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainables.step.context.capture", captured)
        patch.setattr("trainables.measure.communication_windows.GraphClock", lambda device: CpuClock())
        patch.setattr("trainables.step.context.stream_for", lambda trial, device: contextlib.nullcontext())
        return measured(rank, PAIR.but(model="mlp", execution="graph", image_size=28, profile_ranks="0"))


def test_a_graph_that_communicates_is_recorded_step_by_step() -> None:
    first, second = on_ranks(2, traced_graph)
    assert first.trace is not None and second.trace is None
    for measurement in (first, second):
        assert len(steps_of(measurement, "profile")) == PROFILE_STEPS
        assert len(steps_of(measurement, "communication")) == PAIR.communication_steps


# -------------------------------------------------------------------------------------------- collectives of a trace

TOKENS = quick_pair(
    model="gpt2_tiny", dataset="token_sample", sequence_length=32, batch_per_gpu=4, communication_steps=3, steps=2
)
CALLS = {"zero1": {"all_reduce", "broadcast"}, "fsdp2": {"all_gather", "reduce_scatter"}, "hsdp": {"all_reduce"}}
"""operations of two ranks; with a copy of the weights on each, hybrid sharding gathers nothing"""


def measured_all(rank: int) -> dict[str, RankOutput]:
    trials = {name: TOKENS.but(parallel=name, profile_ranks="1") for name in CALLS}
    return {name: measured(rank, trial) for name, trial in trials.items()}


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, RankOutput]]:
    return on_ranks(2, measured_all)


@pytest.mark.parametrize("name", CALLS)
def test_every_collective_of_a_sharded_step_is_on_both_ranks(sharded: list[dict[str, RankOutput]], name: str) -> None:
    keys = ("step", "operation", "group", "bytes", "collective")
    first, second = (
        [tuple(row[key] for key in keys) for row in of_rank[name].tables["collectives"]] for of_rank in sharded
    )
    assert sorted(first, key=str) == sorted(second, key=str)
    assert {row[1] for row in first} >= CALLS[name]
    for rank, of_rank in enumerate(sharded):
        profiled = {row["step"]: row for row in steps_of(of_rank[name], "profile")}
        rows = of_rank[name].tables["collectives"]
        assert {row["step"] for row in rows} == set(profiled) and len(profiled) == TOKENS.communication_steps
        for row in rows:
            assert row["rank"] == rank and row["window"] == "profile" and row["bytes"] > 0
            # gloo may note the end late, when its thread runs again
            assert 0 <= row["start_s"] < min(row["end_s"], profiled[row["step"]]["step_s"])
            assert 0 <= row["hidden_s"] <= row["end_s"] - row["start_s"] + 1e-9


@pytest.mark.parametrize("name", CALLS)
def test_time_with_a_collective_is_at_most_their_sum(sharded: list[dict[str, RankOutput]], name: str) -> None:
    for of_rank in sharded:
        for step in steps_of(of_rank[name], "profile"):
            rows = [row for row in of_rank[name].tables["collectives"] if row["step"] == step["step"]]
            total_s = sum(row["end_s"] - row["start_s"] for row in rows)
            assert 0 < step["exposed_collectives_s"] <= step["collectives_s"] <= total_s + 1e-9
            assert step["kernels_s"] is None


def test_only_zero_has_buckets_and_all_strategies_keep_the_trace_of_the_named_rank(
    sharded: list[dict[str, RankOutput]],
) -> None:
    for name in CALLS:
        assert bool(sharded[0][name].tables["buckets"]) == (name == "zero1")
        assert [of_rank[name].trace is not None for of_rank in sharded] == [False, True]


def test_collectives_of_two_copies_on_two_ranks_each_are_matched_within_their_group() -> None:
    trial = TOKENS.but(parallel="hsdp", world_size=4, batch_per_gpu=2, communication_steps=2)
    groups: dict[str, set[tuple[str | None, int]]] = {}
    for output in on_ranks(4, measured, trial):
        for row in output.tables["collectives"]:
            groups.setdefault(row["operation"], set()).add((row["group"], row["rank"]))
    within = {("copy 0", 0), ("copy 0", 1), ("copy 1", 2), ("copy 1", 3)}
    places = [f"place {place} of the copies" for place in (0, 1)]
    assert groups == {
        "all_gather": within,
        "reduce_scatter": within,
        "all_reduce": {(places[0], 0), (places[1], 1), (places[0], 2), (places[1], 3)},
    }
