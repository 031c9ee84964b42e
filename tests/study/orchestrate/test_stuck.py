"""Which rank keeps the others waiting, and where trials go whose nodes are lost."""

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


def test_a_rank_whose_process_does_not_answer_is_named() -> None:
    assert stuck.culprits([WAITS, None]) == {1: "does not answer"}


def test_of_ranks_that_answer_the_one_that_waits_for_nobody_is_named_with_its_own_innermost_call() -> None:
    assert stuck.culprits([WAITS, BACKWARD, LOADS]) == {2: "is in load (mine.py:12)"}


@pytest.mark.parametrize("ranks", [[LOADS, LOADS], [WAITS, BACKWARD], [[], []]])
def test_nobody_is_named_where_all_do_alike(ranks: list[stuck.Calls]) -> None:
    assert stuck.culprits(ranks) == {}


def test_ranks_that_all_answer_and_all_wait_are_kept_apart_by_what_is_between_them() -> None:
    assert stuck.wait_for_each_other([WAITS, BACKWARD])
    assert not stuck.wait_for_each_other([WAITS, LOADS])
    assert not stuck.wait_for_each_other([WAITS, None])
    assert not stuck.wait_for_each_other([WAITS])


def test_the_log_holds_every_ranks_calls() -> None:
    assert stuck.calls_as_text(0, LOADS[:2]) == (
        "rank 0 at the time limit\n  /study/orchestrate/rank.py:90 serve\n  /home/me/mine.py:12 load\n"
    )
    assert stuck.calls_as_text(1, None) == "rank 1 at the time limit\n  does not answer\n"


def serve(go: threading.Event) -> None:
    go.wait(30)


def test_calls_are_those_of_the_thread_that_serves_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck, "SERVE_CALL", (__file__, "serve"))
    go = threading.Event()
    thread = threading.Thread(target=serve, args=(go,))
    thread.start()
    try:
        found = stuck.calls()
    finally:
        go.set()
        thread.join()
    assert (__file__, "serve") in [(file, name) for file, _, name in found]
    assert stuck.calls() == []


def nodes(*names: str) -> list[NodeCapacity]:
    return [NodeCapacity(node_id=name, address=name, cpus=4, gpus=0) for name in names]


TRIALS = [Trial(world_size=size, nodes=2) for size in (2, 4)]


def test_a_layout_stays_where_its_nodes_are_and_else_moves_to_nodes_that_fit() -> None:
    (layout,) = layouts(TRIALS, nodes("a", "b", "c")).values()
    assert layout.node_ids == ("a", "a", "b", "b")
    assert relocate(layout, nodes("a", "b")) is layout
    moved = relocate(layout, nodes("a", "c"))
    assert moved.node_ids == ("a", "a", "c", "c")
    assert (moved.kind, moved.world_sizes) == (layout.kind, layout.world_sizes)


def test_a_layout_that_fits_nowhere_says_what_it_needs() -> None:
    (layout,) = layouts(TRIALS, nodes("a", "b")).values()
    with pytest.raises(ValueError, match=re.escape("2 nodes with 2 ranks of 1 CPUs each are needed; 1 fit")):
        relocate(layout, nodes("a"))
