"""Exclusive cores: reserved by one process at a time, for all its threads, and released afterwards."""

import multiprocessing
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from trainables.rules import unmet_requirement
from trainables.step.precision import fp32
from trainables.step.process import exclusive_cores, settings_for
from trainables.trial import Trial


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use separate lock files, because other tests may run on this host."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_all_threads_are_pinned_and_released() -> None:
    allowed, ended = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with exclusive_cores(1) as cores:
            assert len(cores) == 1
            assert cores <= allowed
            assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id or 0) == cores
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id or 0) == allowed
    finally:
        ended.set()
        other.join()


def hold(folder: str, answer: Any, end: Any) -> None:
    tempfile.gettempdir = lambda: folder
    with exclusive_cores(1) as cores:
        answer.send(cores)
        end.recv()


def test_processes_never_share_a_core_and_release_it_when_they_end(own_folder: Path) -> None:
    allowed = os.sched_getaffinity(0)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    end_receiver, end_sender = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(str(own_folder), sender, end_receiver))
    process.start()
    try:
        theirs = receiver.recv()
        if len(allowed) > 1:
            with exclusive_cores(len(allowed) - 1) as cores:
                assert cores == allowed - theirs
        expected = f"{len(allowed) - 1} of the {len(allowed)} cores"
        with pytest.raises(RuntimeError, match=expected), exclusive_cores(len(allowed)):
            pass
        assert os.sched_getaffinity(0) == allowed
    finally:
        end_sender.send(None)
        process.join()
    with exclusive_cores(len(allowed)) as cores:
        assert cores == allowed


def test_cores_are_pinned_only_during_a_trial() -> None:
    allowed = os.sched_getaffinity(0)
    with settings_for(Trial(pin_cores=True), fp32):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == allowed
    with settings_for(Trial(), fp32):
        assert os.sched_getaffinity(0) == allowed


def test_pinning_a_gpu_rank_is_infeasible() -> None:
    assert "pin_cores" in (unmet_requirement(Trial(device="cuda", pin_cores=True)) or "")
