"""Shared by tests of the orchestration: the store of a results folder, and trials of workloads on CPU ranks."""

import contextlib
from pathlib import Path
from typing import Any

import psutil

from study.store.store import Store
from tests.support.trials import quick_trial
from trainables.trial import Trial

WORKLOADS = Path(__file__).with_name("faulty_workloads.py")


def workload_trial(name: str, **fields: Any) -> Trial:
    """Return a trial of a workload in `faulty_workloads`, by default on two ranks."""
    return quick_trial(**{"workload": f"{WORKLOADS}:{name}", "world_size": 2, **fields})


def new_store(folder: Path) -> Store:
    """Open an empty results folder of a study named "test"."""
    return Store.open(
        str(folder), name="test", question="Does it work?", configuration={}, versions={}, command="pytest"
    )


def assert_ended(file: Path) -> None:
    """Assert that all processes whose ids a workload wrote into this file have ended, or end within seconds."""
    processes = []
    for pid in map(int, file.read_text().split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def processes_of(marker: str) -> list[psutil.Process]:
    """Return live processes whose command line or working folder contains `marker`, such as a Ray session's folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if marker in " ".join(process.cmdline()) or marker in process.cwd():
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return processes
