"""A result that cannot be saved waits on this host until the results folder is back."""

import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from study.capacity import NodeCapacity
from study.cli import commands as session
from study.orchestrate.driver import Point, RunOptions, TrialDriver
from study.orchestrate.protocol import MOST_NOT_SAVED, Event, KnownTrials
from study.scaling import main
from study.store import spool
from study.store.store import Store, StoreError
from tests.study.cli.test_command_line import open_store as open_study
from tests.study.cli.test_command_line import result, trials_of
from tests.study.orchestrate.test_driver import NODES, FullStore, InstantKeeper
from tests.study.store.test_store import explained_result, files_below, open_store, result_of
from trainables.trial import Trial


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir(mode=0o700)
    return folder


def make_unwritable(store: Store) -> Path:
    """Move the results folder away and put a file in its place. Return where it went."""
    away = Path(f"{store.root}-away")
    Path(store.root).rename(away)
    Path(store.root).write_text("")
    return away


def restore(store: Store, away: Path) -> None:
    Path(store.root).unlink()
    away.rename(store.root)


def test_a_folder_that_was_moved_away_can_be_moved_back_to_its_place(tmp_path: Path, scratch: Path) -> None:
    """An attempt to save must not create it anew: `mv` would then put the old folder into the new one."""
    store, trial = open_store(tmp_path / "out"), Trial()
    away = Path(f"{store.root}-away")
    Path(store.root).rename(away)
    with pytest.raises(StoreError, match="it waits in"):
        spool.save(store, explained_result(trial), scratch, pauses_s=[0, 0])
    assert not Path(store.root).exists()
    away.rename(store.root)
    assert spool.flush(store, scratch) == [trial.trial_id]
    assert store.statuses() == {trial.trial_id: "done"}


def test_a_result_is_saved_when_the_folder_is_back_within_the_pauses(tmp_path: Path, scratch: Path) -> None:
    store, trial = open_store(tmp_path / "out"), Trial()
    away = make_unwritable(store)
    back = threading.Timer(0.3, restore, (store, away))
    back.start()
    spool.save(store, explained_result(trial), scratch, pauses_s=[0.1] * 100)
    back.join()
    assert store.statuses() == {trial.trial_id: "done"}
    assert not list(scratch.rglob("*.json"))


def test_a_result_waits_for_the_folder_until_another_is_saved(tmp_path: Path, scratch: Path) -> None:
    store, first, second = open_store(tmp_path / "out"), Trial(), Trial(repeat=1)
    away = make_unwritable(store)
    with pytest.raises(StoreError, match="cannot be saved in .*; it waits in .*, and the next run saves it"):
        spool.save(store, explained_result(first), scratch, pauses_s=[0])
    restore(store, away)
    spool.save(store, result_of(second), scratch, pauses_s=[])
    assert store.statuses() == {first.trial_id: "done", second.trial_id: "done"}
    expected = files_below(Path(store.trial_folder(first.trial_id)))
    assert "traces/rank11.json.gz" in expected and "buckets.parquet" in expected
    assert spool.flush(store, scratch) == []


def test_a_waiting_result_never_replaces_a_done_trial(tmp_path: Path, scratch: Path) -> None:
    store, trial = open_store(tmp_path / "out"), Trial()
    away = make_unwritable(store)
    with pytest.raises(StoreError):
        spool.save(store, result_of(trial, "failed"), scratch, pauses_s=[])
    restore(store, away)
    store.save(result_of(trial))
    assert spool.flush(store, scratch) == [trial.trial_id]
    assert store.statuses() == {trial.trial_id: "done"}


def test_without_room_for_waiting_results_the_error_says_that_the_trial_runs_again(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("study.store.spool.replace_folder", full)
    store = open_store(tmp_path / "out")
    make_unwritable(store)
    with pytest.raises(StoreError, match="it is lost, so the trial runs again"):
        spool.save(store, result_of(Trial()), scratch, pauses_s=[])


def test_an_error_that_does_not_pass_is_not_retried(tmp_path: Path, scratch: Path) -> None:
    store = open_store(tmp_path / "out")
    started_s = time.monotonic()
    with pytest.raises(StoreError, match="^no space left on device$"):
        spool.save(FullStore(store.out, store.filesystem, store.root), result_of(Trial()), scratch, pauses_s=[60])
    assert time.monotonic() - started_s < 30


def driven(store: Store, trials: Sequence[Trial], scratch: Path) -> KnownTrials:
    """Drive trials one after another until the run would end, and return what is known of them."""
    known = KnownTrials()
    driver = TrialDriver.of(trials, NODES, InstantKeeper(), store, RunOptions(save_pauses_s=()), lambda: NODES)
    for trial in trials:
        if known.unusable:
            break
        reports: list[dict[str, Any]] = []
        driver.run(Point(trial, "block-0"), reports.append)
        known.add(Event("trial_ended", trial, reports[-1]["status"], reports[-1]["reason"], reports[-1]))
    return known


def test_a_run_ends_after_three_trials_that_could_not_be_saved_and_the_next_run_saves_them(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    monkeypatch.setenv("SCALING_STUDY_SCRATCH", str(scratch))
    monkeypatch.setattr(session, "local_capacity", lambda: [NodeCapacity("", "localhost", cpus=2, gpus=0)])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    store, trials = open_study(tmp_path / "out"), trials_of("smoke")
    for trial in trials[MOST_NOT_SAVED:]:
        store.save(result(trial))
    away = make_unwritable(store)
    others = [trials[0].but(repeat=number) for number in range(20, 23)]
    known = driven(store, [*trials[:MOST_NOT_SAVED], *others], scratch)
    assert known.unusable.startswith("measured as done, but not saved: ")
    assert len(known.statuses) == MOST_NOT_SAVED and set(known.statuses.values()) == {"failed"}
    restore(store, away)
    assert main(["run", "smoke", "--address", "local", "--out", store.out]) == 0
    assert set(store.statuses().values()) == {"done"} and len(store.statuses()) == len(trials)
    shutil.rmtree(scratch)


def test_trials_in_between_that_are_saved_start_the_count_again() -> None:
    known = KnownTrials()
    for number, not_saved in enumerate([True, True, False, True, True]):
        known.add(Event("trial_ended", Trial(repeat=number), "failed", "x", {"not_saved": True} if not_saved else {}))
    assert known.unusable == "" and known.not_saved == 2
