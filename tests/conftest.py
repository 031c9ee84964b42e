"""What all tests share. With FORBID_SKIPS=1, as in continuous integration, a skipped test fails."""

import os
import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.hosts import PATIENCE

# Ray reads it when it is imported; a cluster and all who join it must agree
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.update(PATIENCE)

# whoever runs the tests in the background has SIGINT ignored, and the commands that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None)  # an example may meet other work, here and in CI
settings.load_profile("any machine")

pytest_plugins = ["pytester"]


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip into a failure that shows its reason; expected failures stay what they are."""
    if os.environ.get("FORBID_SKIPS") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: FORBID_SKIPS=1, but: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report)
    return report


SCOPES = {
    "faults": ("test_faults.py",),
    "under Ray": (
        "test_end_to_end.py", "test_cluster.py", "test_training_study.py", "test_tuning.py", "test_monitoring.py",
        "test_architecture.py", "test_command_line.py", "test_doctor.py",
    ),
    "ray up": ("test_ray_up.py",),
}  # fmt: skip
"""Files that one process runs one after the other, the scopes that take longest first.

faults: minutes of which the machine's cores idle most. under Ray: those that start one and those whose commands would join one
that they find on this host. ray up: hosts of its own, for minutes."""


def _scope(file: str) -> str | None:
    return next((scope for scope, names in SCOPES.items() if Path(file).name in names), None)


class FilesTogether(LoadScopeScheduling):
    """Gives a worker a file of tests at a time, or a scope of them.

    Who runs the faults takes nothing else: it waits most of the time, and as one more worker it would slow the others down.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return _scope(file) or file

    def _reschedule(self, node: WorkerController) -> None:
        if "faults" in self.assigned_work[node] and len(self.nodes) > 1:
            node.shutdown()  # it ends when it has run what it has
        else:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    return FilesTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = list(SCOPES)
    items.sort(key=lambda item: order.index(scope) if (scope := _scope(item.path.name)) else len(order))


@pytest.fixture
def results_folder(tmp_path: Any) -> str:
    """A results folder that does not exist yet."""
    return str(tmp_path / "results")


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are made without their figures, which take most of the time."""
    from analysis.sections import SECTIONS

    monkeypatch.setattr("analysis.report.SECTIONS", [replace(section, figures=()) for section in SECTIONS])
