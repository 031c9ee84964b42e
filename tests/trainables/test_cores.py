"""Cores of a rank's own: held by one process at a time, for all its threads, and given back."""

import multiprocessing
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from trainables.rules import unmet_requirement
from trainables.step.precision import fp32
from trainables.step.process import own_cores, settings_for
from trainables.trial import Trial


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Other tests of this host lock their own files."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_all_threads_of_a_process_go_to_its_cores_and_back() -> None:
    allowed, ended = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with own_cores(1) as own:
            assert len(own) == 1
            assert own <= allowed
            assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id or 0) == own
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id or 0) == allowed
    finally:
        ended.set()
        other.join()


def hold(folder: str, answer: Any, end: Any) -> None:
    tempfile.gettempdir = lambda: folder
    with own_cores(1) as own:
        answer.send(own)
        end.recv()


def test_two_processes_never_share_a_core_and_one_that_ends_gives_its_own_back(own_folder: Path) -> None:
    allowed = os.sched_getaffinity(0)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    end_receiver, end_sender = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(str(own_folder), sender, end_receiver))
    process.start()
    try:
        theirs = receiver.recv()
        if len(allowed) > 1:
            with own_cores(len(allowed) - 1) as mine:
                assert mine == allowed - theirs
        expected = f"and {len(allowed) - 1} of the {len(allowed)} that this process may use are free"
        with pytest.raises(RuntimeError, match=expected), own_cores(len(allowed)):
            pass
        assert os.sched_getaffinity(0) == allowed
    finally:
        end_sender.send(None)
        process.join()
    with own_cores(len(allowed)) as mine:
        assert mine == allowed


def test_a_trial_has_its_cores_for_its_own_length_only() -> None:
    allowed = os.sched_getaffinity(0)
    with settings_for(Trial(pin_cores=True), fp32):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == allowed
    with settings_for(Trial(), fp32):
        assert os.sched_getaffinity(0) == allowed


def test_a_gpu_rank_is_not_pinned() -> None:
    assert (unmet_requirement(Trial(device="cuda", pin_cores=True)) or "").startswith("pin_cores is for CPU ranks")
