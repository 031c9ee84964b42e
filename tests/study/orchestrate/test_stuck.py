"""Ranks that block the others, and layouts of trials whose nodes are lost."""

import re
import threading

import pytest

from study.capacity import NodeCapacity
from study.orchestrate import stuck
from study.plan.placement import layouts, relocate
from trainables.trial import Trial

WAITS = [("/study/orchestrate/rank.py", 90, "serve"), ("/site/torch/distributed/distributed_c10d.py", 3, "all_reduce")]
BACKWARD = [("/study/orchestrate/rank.py", 90, "serve"), ("/site/torch/autograd/graph.py", 8, "_engine_run_backward")]
LOADS = [
    ("/study/orchestrate/rank.py", 90, "serve"),
    ("/home/me/mine.py", 12, "load"),
    (f"{stuck.LIBRARY[1]}/socket.py", 5, "recv"),
]


def test_a_rank_that_does_not_answer_blocks_the_others() -> None:
    assert stuck.culprits([WAITS, None]) == {1: "does not answer"}


def test_the_rank_that_does_not_wait_blocks_the_others_and_its_innermost_call_is_reported() -> None:
    assert stuck.culprits([WAITS, BACKWARD, LOADS]) == {2: "is in load (mine.py:12)"}


@pytest.mark.parametrize("ranks", [[LOADS, LOADS], [WAITS, BACKWARD], [[], []]])
def test_no_rank_blocks_the_others_if_all_do_the_same(ranks: list[stuck.Calls]) -> None:
    assert stuck.culprits(ranks) == {}


def test_ranks_wait_for_each_other_only_if_all_answer_and_wait() -> None:
    assert stuck.wait_for_each_other([WAITS, BACKWARD])
    assert not stuck.wait_for_each_other([WAITS, LOADS])
    assert not stuck.wait_for_each_other([WAITS, None])
    assert not stuck.wait_for_each_other([WAITS])


def test_the_log_has_the_calls_of_every_rank() -> None:
    assert stuck.calls_as_text(0, LOADS[:2]) == (
        "rank 0 at the time limit\n  /study/orchestrate/rank.py:90 serve\n  /home/me/mine.py:12 load\n"
    )
    assert stuck.calls_as_text(1, None) == "rank 1 at the time limit\n  does not answer\n"


def serve(stop: threading.Event) -> None:
    stop.wait(30)


def test_calls_are_from_the_thread_that_serves_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck, "SERVE_CALL", (__file__, "serve"))
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(stop,))
    thread.start()
    try:
        calls = stuck.calls()
    finally:
        stop.set()
        thread.join()
    assert (__file__, "serve") in [(file, name) for file, _, name in calls]
    assert stuck.calls() == []


def nodes(*names: str) -> list[NodeCapacity]:
    return [NodeCapacity(node_id=name, address=name, cpus=4, gpus=0) for name in names]


TRIALS = [Trial(world_size=size, nodes=2) for size in (2, 4)]


def test_a_layout_moves_only_if_one_of_its_nodes_is_lost() -> None:
    (layout,) = layouts(TRIALS, nodes("a", "b", "c")).values()
    assert layout.node_ids == ("a", "a", "b", "b")
    assert relocate(layout, nodes("a", "b")) is layout
    moved = relocate(layout, nodes("a", "c"))
    assert moved.node_ids == ("a", "a", "c", "c")
    assert (moved.kind, moved.world_sizes) == (layout.kind, layout.world_sizes)


def test_a_layout_that_does_not_fit_raises_with_its_requirements() -> None:
    (layout,) = layouts(TRIALS, nodes("a", "b")).values()
    with pytest.raises(ValueError, match=re.escape("2 nodes with 2 ranks of 1 CPUs each are needed; 1 fit")):
        relocate(layout, nodes("a"))
