"""The keeper of worker groups, whose groups here are told when to be ready; no Ray runs."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from study import worker_group
from study.layout import Layout, ProcessKind
from study.worker_group import Keeper
from trainables.trial import Trial

LAYOUT = Layout(ProcessKind.of(Trial()), ("a",), (1,))
JOB = {"id": "first", "trial": Trial().model_dump(), "source": None}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the groups that were started, in order."""
    names: list[str] = []
    monkeypatch.setattr(worker_group._Group, "start", lambda group, keeper: names.append(group.name))
    monkeypatch.setattr(worker_group.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    return names


async def prepared_and_measured(started: list[str]) -> dict[str, Any]:
    keeper = Keeper("study", [])
    await keeper.prepare(LAYOUT, "block-0")
    await keeper.prepare(LAYOUT, "block-0")
    await keeper.opened(started[0], {"ranks": []}, [])
    measuring = asyncio.create_task(keeper.measure(JOB, LAYOUT, "block-0", 60.0))
    job = await keeper.next_job(started[0])
    assert job == JOB
    await keeper.finished(started[0], "first", [{"warmup_began_at": 100.0, "windows_ended_at": 103.0}])
    return await measuring


def test_the_first_trial_finds_the_group_that_was_started_ahead_of_it(started: list[str]) -> None:
    outcome = asyncio.run(prepared_and_measured(started))
    assert len(started) == 1
    assert (outcome["status"], outcome["worker_group"], outcome["duration_s"]) == ("done", started[0], 3.0)
    times = outcome["environment"]["group"]
    assert times["asked_at"] <= times["opened_at"]
