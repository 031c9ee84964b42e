"""What all tests share. With FORBID_SKIPS=1, as in continuous integration, a skipped test fails."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from study.cli import progress
from tests.support.hosts import PATIENCE
from tests.support.local_ray import started
from tests.support.system import missing

# Ray reads it when it is imported; a cluster and all who join it must agree
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.update(PATIENCE)

# whoever runs the tests in the background has SIGINT ignored, and the commands that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

progress.LONG_WAIT_S = 1000.0  # a line about a long wait depends on the host's load, and tests compare stderr

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that lacks something from the system (tests/support/system.py), before any fixture does work."""
    reason = missing(*(name for mark in item.iter_markers("system") for name in mark.args))
    if reason:
        pytest.skip(reason)


ORDER = (
    "own ray",
    "shared ray",
    "faults of processes",
    "faults of hosts",
    "test_ray_up.py",
    "test_safety.py",
    "test_faults.py",
    "committed studies",
    "named studies",
    "test_everything.py",
    "test_frameworks.py",
    "test_scripts.py",
    "test_trainings.py",
    "test_account_windows.py",
    "test_failing_scripts.py",
    "test_user_code.py",
)
"""Groups that start first, because they take longest. A process with a single test gets the next group as well."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every file a group of its own unless it names one: xdist runs a group in one process (--dist loadgroup).

    All tests that use the fixture `local_ray`, of any file, are the group "shared ray".
    """
    groups = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        of_file = "shared ray" if "local_ray" in getattr(item, "fixturenames", ()) else item.path.name
        groups[item] = mark.args[0] if mark else of_file
        if not mark:
            item.add_marker(pytest.mark.xdist_group(groups[item]))
        if config.getoption("loadgroup", False):  # xdist 3.8 writes the group where pytest 9.2 no longer reads it
            item._id = type(item._id).parse(f"{item.nodeid}@{groups[item]}")
    items.sort(key=lambda item: ORDER.index(groups[item]) if groups[item] in ORDER else len(ORDER))


def pytest_collection_finish() -> None:
    """Keeps what was imported out of garbage collections, of which every trial makes three."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else a library warns of leaks at the end


@pytest.fixture(scope="session")
def local_ray() -> Iterator[str]:
    """Address of one local Ray for all tests in the group "shared ray", which one process runs."""
    with started() as address:
        yield address


@pytest.fixture
def results_folder(tmp_path: Any) -> str:
    """A results folder that does not exist yet."""
    return str(tmp_path / "results")


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    """Figures that a test has drawn are closed after it; pyplot would keep them all."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are made without their figures, which take most of the time."""
    from tests.support.report import show_figures

    show_figures(monkeypatch, set())
