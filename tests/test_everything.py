"""Every registered name in the smallest study that there is: it trains on CPU ranks, or the plan says why it cannot."""

import math
from typing import Any

import pytest
import torch

from study.capacity import NodeCapacity
from study.plan import plan_trials
from study.studies import STUDIES
from tests.gloo import on_ranks
from trainables.registry import EXECUTIONS, MEMORY_FORMATS, MODELS, PARALLEL, PRECISIONS
from trainables.run import run
from trainables.trial import Trial

pytestmark = pytest.mark.timeout(900)

HOST = [NodeCapacity("a", "10.0.0.1", cpus=2, gpus=0)]
REGISTRIES = {
    "model": MODELS, "precision": PRECISIONS, "parallel": PARALLEL, "execution": EXECUTIONS, "memory_format": MEMORY_FORMATS,
}  # fmt: skip
LACKING_ON_CPUS = {
    "model": {"mlstm4096", "mlstm8192"}, "precision": {"tf32"}, "parallel": {"dp", "horovod"}, "execution": {"graph", "compile_graph"},
}  # fmt: skip
"""for the reasons that test_studies reads from the plan"""


def losses(rank: int, trials: dict[str, Trial]) -> dict[str, dict[str, list[Any]]]:
    """Of each trial the losses of its steps, by window."""
    found: dict[str, dict[str, list[Any]]] = {}
    for name, trial in trials.items():
        for row in run(trial, rank=rank, device=torch.device("cpu")).rows:
            found.setdefault(name, {}).setdefault(row["window"], []).append(row["loss"])
    return found


def test_every_registered_name_trains_or_is_infeasible() -> None:
    rows = [row for row in plan_trials(STUDIES["everything"](HOST), HOST) if row.status == "pending"]
    # what explains a step is not asked for: its windows, for each of these, would take minutes
    trials = {row.case: row.trial.but(steps=1, account_steps=0) for row in rows if row.trial}
    for size in (1, 2):
        asked = {case: trial for case, trial in trials.items() if trial.world_size == size}
        for found in on_ranks(size, losses, asked, timeout_s=600):
            for case, by_window in found.items():
                assert {"warmup", "plain", "phases"} <= set(by_window), case
                assert all(math.isfinite(loss) for window in by_window.values() for loss in window), case
            assert found.keys() == asked.keys()
    for field, registry in REGISTRIES.items():
        names = {getattr(trial, field) for trial in trials.values()}
        assert names == set(registry) - LACKING_ON_CPUS.get(field, set())
