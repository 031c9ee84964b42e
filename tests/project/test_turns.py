"""Two sides that run alternately: their order, and the steps of a trial that are timed."""

import itertools
import json
import threading
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness import turns
from benchmarks.harness.in_turn import Blocks, SameProcess
from benchmarks.harness.turns import LEAD_STEPS, Turns, new_turns


def test_two_sides_run_as_abba_and_wait_for_all_ranks_of_the_other(tmp_path: Path) -> None:
    file, ran, lock = new_turns(tmp_path, ranks=2), [], threading.Lock()

    def side(name: str, rank: int) -> None:
        mine = Turns(file, name, rank)
        for _ in range(6):
            mine.start()
            with lock:
                ran.append(name)
            mine.end()

    threads = [threading.Thread(target=side, args=(name, rank)) for name in "AB" for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_order = [(name, len(list(group))) for name, group in itertools.groupby(ran)]
    assert in_order == [("A", 2), ("B", 4), ("A", 4), ("B", 4), ("A", 4), ("B", 4), ("A", 2)]


def test_waiting_for_a_dead_side_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.01)
    alone = Turns(new_turns(tmp_path, ranks=1), "A", 0)
    with pytest.raises(TimeoutError, match="the other side"):
        alone.start()


def test_blocks_cover_the_plain_and_the_phases_window_without_their_lead_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count()  # every reading of the clock advances it by 1 s; synchronising does not
    monkeypatch.setattr("benchmarks.harness.in_turn.time.perf_counter", lambda: float(next(now)))
    file = new_turns(tmp_path, ranks=1)
    Turns(file, "B", 0).mine[0] = 10**6  # side B has always ended its block
    steps, blocks_a_window, settling = 3, 2, 4
    window = blocks_a_window * (LEAD_STEPS + steps) + 1
    synchronised: list[int] = []
    turns_of = partial(Turns, file, "A", 0)
    blocks = Blocks(tmp_path, 0, steps, settling, window, lambda: synchronised.append(blocks.seen - 1), turns_of)
    for _ in range(settling + 2 * window + 5):
        blocks()
    assert json.loads((tmp_path / "ours-0.json").read_text()) == [1.0] * 2 * blocks_a_window
    first = [settling + begin for begin in (2, 5, 7, 10)]
    assert synchronised == [*first, *(step + window for step in first)]


def test_a_bare_loop_in_the_process_of_the_study_runs_as_abba(tmp_path: Path) -> None:
    ran: list[str] = []
    file = tmp_path / "bare-0.json"
    others = SameProcess(lambda: ran.append("lead"), lambda: float(ran.append("B") or 2.0), file)  # type: ignore[func-returns-value]
    for _ in range(4):
        others.start()
        ran.append("A")
        others.end()
    assert [name for name in ran if name != "lead"] == list("ABBAABBA")
    assert ran.count("lead") == 4 * LEAD_STEPS
    assert json.loads(file.read_text()) == [2.0] * 4
