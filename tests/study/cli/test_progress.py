"""Progress of a run: live on a terminal, lines in a log, nothing if quiet."""

import io
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from analysis.duration import duration
from study.cli import progress
from study.cli.progress import Progress, describe, waiting
from study.orchestrate.protocol import Event
from study.plan.estimate import Expected
from study.plan.trials import varying_fields
from trainables.trial import Trial

TRIALS = [Trial(model="mlp", device="cuda", world_size=size, repeat=repeat) for repeat in range(2) for size in (1, 2)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until a test moves it."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.s)
    return now


def event(kind: Any, trial: Trial | None = None, **values: Any) -> Event:
    return Event(kind, trial, **values)


def watch(console: Console, clock: SimpleNamespace) -> Progress:
    """Three of four trials: one done, one failed, one running out of memory."""
    with Progress("weak", TRIALS, quiet=console.quiet, console=console) as shown:
        shown.on_event(event("group_starting"))
        clock.s = 10.0
        outcomes: list[dict[str, Any]] = [
            {"status": "done", "summary": {"throughput_samples_per_s": 1234.5}},
            {"status": "failed", "reason": "rank 1: [bold]RuntimeError[/bold] :smile:", "log": "results/error.log"},
            {"status": "out_of_memory", "reason": "rank 0"},
        ]
        for trial, values in zip(TRIALS, outcomes, strict=False):
            shown.on_event(event("trial_started", trial))
            clock.s += 10.0
            shown.on_event(event("trial_ended", trial, **values))
        shown.on_event(event("trial_started", TRIALS[3]))
    return shown


def test_a_log_gets_plain_lines_with_counts_times_and_error_logs(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    watch(Console(file=text, markup=False, emoji=False, highlight=False), clock)
    assert text.getvalue().splitlines() == [
        "starting Ray Tune",
        "starting a worker group",
        "[1/4, 20 s, about 60 s left] done: mlp, 1 GPU, repeat 1: 1,234 samples/s",
        "[2/4, 1 failed, 30 s, about 30 s left] failed: mlp, 2 GPUs, repeat 1",
        ("error: failed: mlp, 2 GPUs, repeat 1: rank 1: [bold]RuntimeError[/bold] :smile:; log: results/error.log"),
        "[3/4, 1 failed, 40 s, about 10 s left] out of memory: mlp, 1 GPU, repeat 2",
        "warning: out of memory: mlp, 1 GPU, repeat 2: rank 0",
    ]


def test_a_terminal_gets_a_live_display_and_keeps_failures_on_the_screen(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    shown = watch(
        Console(file=text, force_terminal=True, width=80, markup=False, emoji=False, color_system=None), clock
    )
    shown.on_activity({TRIALS[3].trial_id: "plain steps"})
    assert shown.render().plain.splitlines() == [
        "weak ━━━━━━━━━━━━╌╌╌╌ 3/4, 1 failed, 40 s, about 10 s left",
        "▸ mlp, 2 GPUs, repeat 2: plain steps",
        "  out of memory: mlp, 1 GPU, repeat 2",
        "  failed: mlp, 2 GPUs, repeat 1",
        "  done: mlp, 1 GPU, repeat 1: 1,234 samples/s",
    ]
    screen = text.getvalue()
    assert "error: failed: mlp, 2 GPUs" in screen
    assert "log: results/error.log" in screen


def test_what_a_trial_is_doing_is_never_cut(clock: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    with Progress("weak", TRIALS, quiet=False, console=console) as shown:
        shown.on_event(event("trial_started", TRIALS[1]))
        shown.on_activity({TRIALS[1].trial_id: "communication and other windows"})
        lines = shown.render().plain.splitlines()
    assert lines[1:3] == ["▸ mlp, 2 GPUs, repeat 1:", "    communication and other windows"]


def test_the_same_failure_is_explained_once(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    with Progress("weak", TRIALS, quiet=False, console=Console(file=text, width=200)) as shown:
        for rank, trial in enumerate(TRIALS):
            shown.on_event(event("trial_started", trial))
            reason = f"rank {rank} on node host (0a1b2c3d): ValueError: no such file"
            shown.on_event(event("trial_ended", trial, status="failed", reason=reason))
    lines = text.getvalue().splitlines()
    assert sum("no such file" in line for line in lines) == 1
    assert sum(line.startswith("[") and "failed: mlp" in line for line in lines) == 4


EXPECTED = Expected({trial.trial_id: 10.0 for trial in TRIALS}, start_s=20.0, renewal_s=3.0, end_s=5.0)
"""68 s: four trials, a worker group for each of two repeats, and the report"""


def test_only_the_time_of_the_current_trial_counts_down(clock: SimpleNamespace) -> None:
    with Progress("weak", TRIALS, quiet=True, expected=EXPECTED) as shown:
        assert shown.remaining.left_s() == 68.0
        clock.s = 7.0
        shown.on_event(event("group_starting"))
        assert shown.remaining.left_s() == 68.0, "Ray was starting, which is no part of it"
        clock.s += 12.0
        assert shown.remaining.left_s() == 56.0
        clock.s += 100.0
        assert shown.remaining.left_s() == 38.0, "three trials, a worker group and the report are left"
        shown.on_event(event("trial_ended", TRIALS[3], status="done"))
        assert shown.remaining.left_s() == 3 * 10.0 + 3.0 + 5.0, "a slow first start says nothing about the other one"


def test_the_remaining_time_never_rises_within_a_trial(clock: SimpleNamespace) -> None:
    with Progress("weak", TRIALS, quiet=True, expected=EXPECTED) as shown:
        clock.s = 6.0
        assert shown.remaining.left_s() == 62.0
        shown.on_event(event("group_starting"))  # the check of own code needs a group, too
        assert shown.remaining.left_s() == 62.0
        clock.s += 12.0
        assert shown.remaining.left_s() == 56.0


def test_ended_trials_give_the_time_of_their_repeats_and_scale_the_others(clock: SimpleNamespace) -> None:
    with Progress("weak", TRIALS, quiet=True, expected=EXPECTED) as shown:
        shown.on_event(event("group_starting"))
        clock.s += 24.0
        shown.on_event(event("trial_ended", TRIALS[0], status="done"))  # 14 s of them to start
        clock.s += 2.0
        shown.on_event(event("trial_ended", TRIALS[1], status="done"))
        # its repeat takes 2 s too; a fifth of the expected time, so the first took 2 s, and its start 22 s
        assert shown.remaining.left_s() == 2.0 + 2.0 + 3.0 + 5.0
        shown.on_event(event("group_starting"))
        clock.s += 24.0
        shown.on_event(event("trial_ended", TRIALS[2], status="done"))
        clock.s += 2.0
        shown.on_event(event("trial_ended", TRIALS[3], status="done"))
        assert shown.remaining.left_s() == 5.0
        assert "left" not in shown.render().plain, "the report is waited for elsewhere"


def test_the_check_of_own_code_is_shown_while_it_runs(clock: SimpleNamespace) -> None:
    with Progress("train", TRIALS, quiet=True) as shown:
        lines = []
        for activity in ({}, {"check": "running your code"}, {}):
            shown.on_activity(activity)
            lines += shown.render().plain.splitlines()[1:]
    assert lines == [f"▸ {line}" for line in (progress.STARTING, progress.CHECKING, progress.NEXT_TRIAL)]


def test_a_log_repeats_what_a_long_trial_is_doing(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    trial = TRIALS[0]
    with Progress("weak", TRIALS, quiet=False, console=Console(file=text, width=200)) as shown:
        shown.on_event(event("trial_started", trial))
        for _ in range(65):
            clock.s += 1.0
            shown.on_activity({trial.trial_id: "warm-up" if clock.s < 40 else "plain steps"})
    what = "mlp, 1 GPU, repeat 1"
    assert text.getvalue().splitlines()[1:] == [f"{what}: warm-up", f"{what}: plain steps"]


def test_a_long_wait_is_one_line_in_a_log_and_a_short_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    with waiting("reading results", console=Console(file=text)):
        pass
    assert text.getvalue() == ""
    monkeypatch.setattr(progress, "LONG_WAIT_S", 0.0)
    with waiting("reading results", console=Console(file=text)):
        time.sleep(0.2)
    assert text.getvalue() == "reading results\n"
    screen = io.StringIO()
    with waiting("reading results", console=Console(file=screen, force_terminal=True, color_system=None)):
        pass
    assert "reading results, 0 s" in screen.getvalue()


def test_quiet_shows_nothing(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    watch(Console(file=text, force_terminal=True, quiet=True), clock)
    assert text.getvalue() == ""


def test_time_left_is_unknown_before_a_trial_has_ended(clock: SimpleNamespace) -> None:
    shown = Progress("weak", TRIALS, quiet=True)
    clock.s = 100.0
    assert "left" not in shown.render().plain


def test_the_display_can_be_pickled_with_the_callbacks_that_tune_keeps() -> None:
    pickle.dumps(Progress("weak", TRIALS, quiet=True).on_event)


def test_descriptions_distinguish_cpu_ranks_from_gpus_and_name_the_workload() -> None:
    trial = Trial(workload="/home/me/mine.py:build", world_size=2, loader_workers=1, precision="bf16")
    assert describe(trial, ()) == "build, 2 CPU ranks, repeat 1"
    assert describe(trial, ["precision", "batch_per_gpu", "loader_workers"]) == (
        "build, 2 CPU ranks, bf16, batch 32, 1 worker, repeat 1"
    )


def test_trials_are_described_by_the_fields_that_vary_within_the_plan() -> None:
    trials = [
        Trial(model="mlp", parallel=parallel, pin_memory=pinned, repeat=repeat)
        for parallel in ("ddp", "zero1", "fsdp2")
        for pinned in (False, True)
        for repeat in range(2)
    ]
    varying = varying_fields(trials)
    assert varying == ("pin_memory", "parallel")
    lines = [describe(trial, varying) for trial in trials]
    assert len(set(lines)) == len(trials)
    assert lines[0] == "mlp, 1 CPU rank, pin_memory no, parallel ddp, repeat 1"


def test_the_last_trial_of_a_plan_is_described_like_the_others() -> None:
    planned = [TRIALS[0].but(batch_per_gpu=batch) for batch in (8, 16)]
    assert Progress("weak", planned[1:], quiet=True, planned=planned).varying == ("batch_per_gpu",)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89.4, "89 s"), (90, "2 min"), (3540, "59 min"), (3600, "1 h 0 min"), (9000, "2 h 30 min")],
)
def test_durations_are_formatted_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_concurrent_trainings_show_their_epoch_and_accuracy(clock: SimpleNamespace) -> None:
    trials = [Trial(model="mlp", epochs=9, batch_per_gpu=256, seed=seed) for seed in (0, 1)]
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress("large-batch", trials, quiet=False, console=screen) as shown:
        shown.on_event(event("group_starting"))
        for trial in trials:
            shown.on_event(event("trial_started", trial))
        shown.on_event(event("epoch_ended", trials[0], summary={"epoch": 3, "validation_top1": 0.8712}))
        what = "mlp, 1 CPU rank, seed"
        assert str(shown.render()).splitlines()[1:] == [f"▸ {what} 0: epoch 3/9, accuracy 87.1%", f"▸ {what} 1"]
        shown.on_event(event("trial_ended", trials[0], status="done"))
        assert str(shown.render()).splitlines()[1:] == [f"▸ {what} 1", f"  done: {what} 0"]


def test_a_log_gets_a_line_per_half_minute_of_training_and_the_final_accuracy(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    trial = Trial(model="mlp", epochs=9, lr_rule="linear")
    with Progress("large-batch", [trial], quiet=False, console=Console(file=text, width=200)) as shown:
        shown.on_event(event("trial_started", trial))
        for epoch in range(1, 10):
            clock.s += 12.0
            shown.on_event(event("epoch_ended", trial, summary={"epoch": epoch, "validation_top1": epoch / 10}))
        summary = {"epoch": 9, "validation_top1": 0.9, "throughput_samples_per_s": 5000.0}
        shown.on_event(event("trial_ended", trial, status="done", summary=summary))
    what = "mlp, 1 CPU rank, seed 0"
    assert text.getvalue().splitlines()[1:] == [
        f"{what}: epoch 3/9, accuracy 30.0%",
        f"{what}: epoch 6/9, accuracy 60.0%",
        f"{what}: epoch 9/9, accuracy 90.0%",
        f"[1/1, 2 min] done: {what}, epoch 9/9, accuracy 90.0%: 5,000 samples/s",
        "ending the worker group",
    ]
