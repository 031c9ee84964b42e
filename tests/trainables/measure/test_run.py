"""Timed windows on real gloo ranks: rows, training, and no side effects on the next trial."""

import gc
import math
import multiprocessing.forkserver
import sys
import time
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn

from analysis.read.schema import STEPS_SCHEMA
from study.orchestrate.processes.fork_server import start_forkserver
from tests.support.gloo import on_ranks, preload_loader_processes
from tests.support.trials import quick_pair
from trainables.batch import byte_size, to_device
from trainables.build import build_workload
from trainables.data.loader import endless_batches
from trainables.measure.run import run
from trainables.measure.stopping import loaders_kept_up
from trainables.registry import PRECISIONS, load
from trainables.step.context import RankOutput, RankSetup, on_device, rank_context
from trainables.step.step import training_step
from trainables.step.timing import no_mark
from trainables.trial import Trial

CPU = torch.device("cpu")
PAIR = quick_pair(batch_per_gpu=16, steps=5, communication_steps=4, sweep_bytes=1024, deterministic=True)
ALONE = PAIR.but(world_size=1, batch_per_gpu=32)
CONVOLUTIONS = ALONE.but(model="resnet18", batch_per_gpu=4, steps=3)
UNLIKE = CONVOLUTIONS.but(
    precision="bf16",
    memory_format="channels_last",
    image_size=8,
    loader_workers=2,
    prefetch_batches=1,
    deterministic=False,
    seed=7,
)
LEARNING = PAIR.but(steps=60, learning_rate=0.05, communication_steps=0)

PHASES = {"load_wait_s", "forward_s", "loss_s", "backward_s", "optimizer_s"}

COMMUNICATION_WINDOWS = [
    ("lead_in", 3), ("synchronised", 4), ("no_sync", 4), ("communication_warmup", 2), ("communication", 4),
]  # fmt: skip
"""additional windows of two ranks, with their steps"""


# ------------------------------------------------------------------------------------- one visit of two gloo ranks


def loader_processes() -> list[int]:
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return [child.pid for child in psutil.Process(server).children(recursive=True)]


def measure_all(rank: int) -> dict[str, Any]:
    """Trials of one and of two ranks, one after another in the same processes."""
    if rank == 0:
        start_forkserver([])
    alone: Any = dist.new_group([0])
    results: dict[str, Any] = {
        "pair": run(PAIR, RankSetup(rank=rank, device=CPU)),
        "learning": run(LEARNING, RankSetup(rank=rank, device=CPU)),
        "steps together": gradients_and_weights(PAIR, rank, None),
    }
    if rank == 0:
        results["cold"] = run(CONVOLUTIONS, RankSetup(rank=0, device=CPU, group=alone))
        results["unlike"] = run(UNLIKE, RankSetup(rank=0, device=CPU, group=alone))
        results["remaining loaders"] = loader_processes()
        results["warm"] = run(CONVOLUTIONS, RankSetup(rank=0, device=CPU, group=alone))
        results["repeat"] = run(CONVOLUTIONS.but(repeat=1), RankSetup(rank=0, device=CPU, group=alone))
        results["steps alone"] = gradients_and_weights(ALONE, 0, alone)
    results["pair again"] = run(PAIR, RankSetup(rank=rank, device=CPU))
    return results


def gradients_and_weights(trial: Trial, rank: int, group: Any) -> dict[str, list[torch.Tensor]]:
    """Return the gradients of three steps and the weights after them, in fp32."""
    gradients: list[torch.Tensor] = []
    with rank_context(trial, RankSetup(rank, CPU, group)) as context:
        workload = context.workload

        def recording(parameters: Any) -> torch.optim.Optimizer:
            optimizer = workload.optimizer(parameters)
            params = optimizer.param_groups[0]["params"]
            optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad.clone() for p in params))
            return optimizer

        model = context.strategy.wrap_model(workload.model, trial, group)
        step = training_step(replace(context, workload=replace(workload, optimizer=recording)), model)
        for batch in islice(endless_batches(trial, workload, rank), 3):
            step(batch, no_mark)
        return {"gradients": gradients, "weights": [p.detach().clone() for p in workload.model.parameters()]}


@pytest.fixture(scope="module")
def visit() -> list[dict[str, Any]]:
    return on_ranks(2, measure_all)


def losses(measurement: RankOutput) -> list[float]:
    return [row["loss"] for row in measurement.tables["steps"]]


# ----------------------------------------------------------------------------------------------------------- rows


def windows(measurement: RankOutput) -> dict[str, list[dict[str, Any]]]:
    by_window: dict[str, list[dict[str, Any]]] = {}
    for row in measurement.tables["steps"]:
        by_window.setdefault(row["window"], []).append(row)
    return by_window


@pytest.mark.parametrize(
    ("name", "trial", "ranks"), [("pair", PAIR, 2), ("cold", CONVOLUTIONS, 1), ("unlike", UNLIKE, 1)]
)
def test_rows_are_ordered_by_window_and_step(visit: list[dict[str, Any]], name: str, trial: Trial, ranks: int) -> None:
    for rank in range(ranks):
        measurement = visit[rank][name]
        plain = len(windows(measurement)["plain"])  # with loader processes it lasts until they keep up
        assert plain == trial.steps if not trial.loader_workers else trial.steps <= plain <= trial.window_steps
        assert {row["rank"] for row in measurement.tables["steps"]} == {rank}
        assert {row["samples"] for row in measurement.tables["steps"]} == {trial.batch_per_gpu}
        assert [row["step"] for row in measurement.tables["steps"]] == list(range(len(measurement.tables["steps"])))
        assert [(window, len(rows)) for window, rows in windows(measurement).items()] == [
            ("warmup", trial.warmup_steps),
            ("plain", plain),
            ("phases", trial.steps),
            *COMMUNICATION_WINDOWS[: 5 * (ranks - 1)],
        ]


def test_the_plain_steps_of_a_cpu_trial_are_spread_between_its_phase_steps(visit: list[dict[str, Any]]) -> None:
    rows = visit[0]["cold"].tables["steps"]
    runs = [(window, len(list(steps))) for window, steps in groupby(row["window"] for row in rows)]
    assert CONVOLUTIONS.steps == 3
    assert runs[1:] == [("plain", 1), ("phases", 2), ("plain", 1), ("phases", 1), ("plain", 1)]


def test_rows_match_the_schema_of_the_store(visit: list[dict[str, Any]]) -> None:
    for row in visit[0]["pair"].tables["steps"]:
        assert set(row) <= set(STEPS_SCHEMA.names)
    pa.Table.from_pylist(visit[0]["pair"].tables["steps"], schema=STEPS_SCHEMA).validate(full=True)


def test_phases_add_up_to_the_step_and_steps_to_the_window(visit: list[dict[str, Any]]) -> None:
    for rank in range(2):
        by_window = windows(visit[rank]["pair"])
        for row in [*by_window["warmup"], *by_window["phases"]]:
            assert all(row[name] > 0 for name in PHASES)
            assert sum(row[name] for name in PHASES) == pytest.approx(row["step_s"], abs=1e-9)
            assert row["host_load_s"] <= row["load_wait_s"]
        steps_s = sum(row["step_s"] for row in by_window["phases"])
        assert 0.9 * by_window["phases"][0]["window_s"] < steps_s <= by_window["phases"][0]["window_s"]


def test_every_row_has_its_windows_time_except_the_warm_up(visit: list[dict[str, Any]]) -> None:
    by_window = windows(visit[0]["pair"])
    assert {row["window_s"] for row in by_window["warmup"]} == {None}
    for name in ("plain", "phases"):
        [window_s] = {row["window_s"] for row in by_window[name]}
        assert window_s > 0
    assert by_window["plain"][0]["window_s"] != by_window["phases"][0]["window_s"]


def test_the_plain_window_is_not_instrumented(visit: list[dict[str, Any]]) -> None:
    columns = {"rank", "window", "step", "samples", "window_s", "loss", "peak_memory_bytes"}
    for row in windows(visit[0]["pair"])["plain"]:
        assert {name for name, value in row.items() if value is not None} == columns - {"peak_memory_bytes"}


def test_gpu_columns_are_null_on_a_cpu(visit: list[dict[str, Any]]) -> None:
    for row in visit[0]["pair"].tables["steps"]:
        for name in ("host_to_device_s", "host_to_device_bytes", "previous_step_done", "peak_memory_bytes"):
            assert row.get(name) is None
        assert not any(name.endswith("launch_s") for name in row)


def test_the_span_covers_the_windows(visit: list[dict[str, Any]]) -> None:
    first, second = visit[0]["pair"], visit[0]["learning"]
    started_at, ended_at = first.span
    assert started_at < ended_at < second.span[0] < time.time()
    span_s = ended_at - started_at
    windows_s = sum(windows(first)[name][0]["window_s"] for name in ("plain", "phases", "communication"))
    assert windows_s < span_s < second.span[0] - started_at


# -------------------------------------------------------------------------------------------------------- training


def test_the_loss_falls(visit: list[dict[str, Any]]) -> None:
    for rank in range(2):
        learning = losses(visit[rank]["learning"])
        assert sum(learning[-20:]) < 0.6 * sum(learning[:20])


def test_ranks_see_different_samples(visit: list[dict[str, Any]]) -> None:
    assert losses(visit[0]["pair"]) != losses(visit[1]["pair"])


@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_two_ranks_train_like_one_rank_with_both_batches(visit: list[dict[str, Any]], what: str) -> None:
    first, second, alone = visit[0]["steps together"], visit[1]["steps together"], visit[0]["steps alone"]
    assert len(first[what]) == len(alone[what]) == (12 if what == "gradients" else 4)
    for mine, other, expected in zip(first[what], second[what], alone[what], strict=True):
        assert torch.equal(mine, other)
        assert expected.abs().max() > 0
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- side effects


def test_the_same_trial_gives_identical_losses_each_time(visit: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert losses(visit[rank]["pair"]) == losses(visit[rank]["pair again"])
        assert all(math.isfinite(loss) for loss in losses(visit[rank]["pair"]))


def test_a_warm_process_gives_the_losses_of_a_cold_one(visit: list[dict[str, Any]]) -> None:
    assert losses(visit[0]["warm"]) == losses(visit[0]["cold"])
    assert losses(visit[0]["unlike"])[:3] != losses(visit[0]["cold"])[:3]
    assert losses(visit[0]["repeat"]) != losses(visit[0]["cold"]), "a repeat has different weights"


def test_no_loader_process_outlives_its_trial(visit: list[dict[str, Any]]) -> None:
    assert visit[0]["remaining loaders"] == []


USERS = '''
import torch, weakref
from itertools import count
from torch import nn
from torch.utils.data import TensorDataset
from trainables.workload import Workload

models = []

def build(trial, spoil=lambda step, loss: loss):
    model = nn.Linear(4, 1)
    model.itself = [model]
    models.append(weakref.ref(model))
    steps = count()
    return Workload(
        model=model, dataset=TensorDataset(torch.ones(64, 4), torch.ones(64, 1)),
        loss=lambda output, target: spoil(next(steps), nn.functional.mse_loss(output, target)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=trial.learning_rate))

def diverging(trial):
    """A loss that is nan in step 0 and infinite in step 3, with unchanged gradients."""
    return build(trial, lambda step, loss: loss + loss.detach() * {0: float("nan"), 3: float("inf")}.get(step, 0.0))

def with_another_clock(trial):
    """A clock on which a step takes a millionth of a second."""
    import time
    ticks = count()
    time.perf_counter = time.monotonic = time.time = lambda: 1e-6 * next(ticks)
    return build(trial, lambda step, loss: (time.sleep(0.005), loss)[1])

def on_more_threads(trial):
    torch.set_num_threads(3)
    return build(trial)

def raising(trial):
    def spoil(step, loss):
        raise ArithmeticError(f"step {step}")
    return build(trial, spoil)
'''


@pytest.fixture
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "users_models.py"
    path.write_text(USERS)
    return str(path)


def users_trial(spec: str) -> Trial:
    return Trial(workload=spec, parallel="none", batch_per_gpu=4, warmup_steps=2, steps=2)


def test_a_model_is_freed_when_its_trial_ends(users_file: str) -> None:
    run(users_trial(f"{users_file}:build"), RankSetup(rank=0, device=CPU))
    assert [model() for model in sys.modules["users_models"].models] == [None]


def test_a_non_finite_loss_is_null(users_file: str) -> None:
    measurement = run(users_trial(f"{users_file}:diverging"), RankSetup(rank=0, device=CPU))
    assert [number for number, loss in enumerate(losses(measurement)) if loss is None] == [0, 3]


def test_a_workload_that_replaces_the_clock_changes_no_measurement(
    users_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, name, getattr(time, name))  # restores it after the test
    measurement = run(users_trial(f"{users_file}:with_another_clock"), RankSetup(rank=0, device=CPU))
    rows = measurement.tables["steps"]
    assert all(row["window_s"] >= 2 * 0.005 for row in rows if row["window"] == "plain")
    assert all(row["step_s"] >= 0.005 for row in rows if row["window"] == "phases")


def test_the_evidence_says_how_many_threads_torch_uses(users_file: str) -> None:
    threads = torch.get_num_threads()
    setup = RankSetup(rank=0, device=CPU)
    assert run(users_trial(f"{users_file}:build"), setup).evidence["threads"] == 1
    assert run(users_trial(f"{users_file}:on_more_threads"), setup).evidence["threads"] == 3
    assert torch.get_num_threads() == threads


def test_a_step_that_raises_leaves_the_process_clean(users_file: str) -> None:
    with pytest.raises(ArithmeticError, match="^step 0$"):
        run(users_trial(f"{users_file}:raising"), RankSetup(rank=0, device=CPU))
    assert gc.isenabled()
    assert torch.is_grad_enabled()
    measurement = run(users_trial(f"{users_file}:build"), RankSetup(rank=0, device=CPU))
    assert all(loss is not None for loss in losses(measurement))


# ---------------------------------------------------------------------------------------------------------- loaders

LOADED = '''"""A model that is slow at first, or always, and data that take 50 ms per batch."""
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from trainables.workload import Workload

class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.0125)
        return torch.full((4,), float(index)), index % 3

class Model(nn.Linear):
    def __init__(self, slow_steps):
        super().__init__(4, 3)
        self.slow_steps = slow_steps

    def forward(self, inputs):
        self.slow_steps -= 1
        time.sleep(0.15 if self.slow_steps >= 0 else 0)
        return super().forward(inputs)

class Bursts(Slow):
    """Samples of 0.1 s each, so that loader processes which start together also finish together."""

    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.full((4,), float(index)), index % 3

def build(slow_steps, dataset=None):
    model = Model(slow_steps)
    return Workload(
        model=model, dataset=dataset or Slow(), loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))

def keeps_up(trial):
    return build(1000)

def falls_behind(trial):
    return build(trial.warmup_steps)

def bursts(trial):
    return build(0, Bursts())
'''


@pytest.fixture
def loaded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write LOADED to a file and let loader processes start."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    preload_loader_processes()
    path = tmp_path / "loaded_models.py"
    path.write_text(LOADED)
    return path


@pytest.mark.parametrize(("name", "plain"), [("keeps_up", 2), ("falls_behind", 40)])
def test_a_window_ends_early_only_if_loaders_keep_up(loaded_file: Path, name: str, plain: int) -> None:
    trial = users_trial(f"{loaded_file}:{name}").but(warmup_steps=4, loader_workers=1, prefetch_batches=4)
    measured = windows(run(trial, RankSetup(rank=0, device=CPU)))
    assert len(measured["plain"]) == plain
    if name == "falls_behind":  # only the loader's rate is sustainable, whatever was ready at the start
        assert measured["plain"][0]["window_s"] / plain == pytest.approx(0.05, rel=0.2)


def test_a_window_does_not_end_within_a_burst_of_loaders_that_take_turns(loaded_file: Path) -> None:
    """Each of 8 loader processes needs 0.2 s for a batch of two, so that 40 batches per second are sustainable."""
    trial = users_trial(f"{loaded_file}:bursts").but(
        warmup_steps=3, steps=6, batch_per_gpu=2, loader_workers=8, prefetch_batches=2
    )
    measured = windows(run(trial, RankSetup(rank=0, device=CPU)))
    steps = len(measured["plain"])
    assert steps >= 10 * 8
    assert measured["plain"][0]["window_s"] / steps == pytest.approx(1 / 40, rel=0.25)
    assert len(measured["phases"]) == min(steps, 80)


@pytest.mark.parametrize(
    ("loaders", "decoder", "expected"), [(10, 10, True), (9, 9, True), (10, 8, False), (8, 10, False), (10, None, True)]
)
def test_a_window_ends_only_if_loaders_and_decoder_keep_up(loaders: int, decoder: int | None, expected: bool) -> None:
    made = [torch.tensor([100, loaders])] + ([] if decoder is None else [torch.tensor([50 + decoder])])
    assert loaders_kept_up(made, [100, 50][: len(made)], [5, 5, 10], None, False, [0.1, 0.1]) == expected


# ---------------------------------------------------------------------------------------------------------- batches


def test_nested_batches_are_counted_and_moved() -> None:
    batch = ({"image": torch.zeros(2, 3), "ids": [torch.zeros(4, dtype=torch.int64)]}, (torch.zeros(2), "name"))
    assert byte_size(batch) == 2 * 3 * 4 + 4 * 8 + 2 * 4
    inputs, (targets, name) = to_device(batch, torch.device("meta"), non_blocking=True)
    assert (inputs["image"].device.type, inputs["ids"][0].device.type, targets.device.type) == ("meta",) * 3
    assert name == "name"


def test_images_have_the_memory_format_of_the_trial() -> None:
    trial = CONVOLUTIONS.but(memory_format="channels_last", parallel="none")
    workload = on_device(build_workload(trial, CPU), trial, load(PRECISIONS["fp32"]), CPU)
    assert isinstance(workload.model.conv1, nn.Conv2d)
    assert workload.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    images = workload.prepare(torch.full((2, 3, 8, 8), 255, dtype=torch.uint8))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.unique().tolist() == [pytest.approx(1.0)]
