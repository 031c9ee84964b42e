"""The command `run` without Ray: its trials run on real ranks, which are local processes."""

from contextlib import nullcontext
from functools import partial

import pytest

from study.capacity import local_capacity
from study.orchestrate.twin.in_process import local_cluster, run_trials
from study.orchestrate.twin.local_ranks import LocalProcesses


def replace_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `run --address local` measure on local processes. Plan, keeper, ranks, store and report are real."""
    cluster = local_cluster(local_capacity())
    monkeypatch.setattr("study.cli.commands.connect", lambda target, **options: nullcontext(cluster))
    monkeypatch.setattr("study.orchestrate.tune.run_trials", partial(run_trials, ranks=LocalProcesses()))
