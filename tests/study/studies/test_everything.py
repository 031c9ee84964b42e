"""Every registered name in the smallest study that there is: it trains on CPU ranks, or the plan says why it cannot."""

import math

import pytest
import torch

from study.capacity import NodeCapacity
from study.plan.trials import plan_trials
from study.studies.basic import STUDIES
from tests.support.gloo import on_ranks
from trainables.measure.run import run
from trainables.registry import (
    DECODERS,
    EXECUTIONS,
    MEMORY_FORMATS,
    MODELS,
    OPTIMIZERS,
    PARALLEL,
    PRECISIONS,
    STORAGES,
    names_with,
)
from trainables.step.context import RankOutput, RankSetup
from trainables.trial import Trial

pytestmark = pytest.mark.timeout(900)

HOST = [NodeCapacity("a", "10.0.0.1", cpus=2, gpus=0)]
REGISTRIES = {
    "model": MODELS, "precision": PRECISIONS, "parallel": PARALLEL, "execution": EXECUTIONS, "memory_format": MEMORY_FORMATS,
    "optimizer": OPTIMIZERS, "storage": STORAGES, "decode": DECODERS,
}  # fmt: skip
LACKING_ON_CPUS = {
    "model": {"mlstm4096", "mlstm8192"}, "precision": {"tf32"}, "parallel": {"dp"}, "execution": {"graph", "compile_graph"},
    "decode": {*names_with(DECODERS, "on_device")},
}  # fmt: skip
"""for the reasons that test_studies reads from the plan"""

UNEXPLAINED = {"parallel none", "parallel ddp_delayed", "parallel fsdp2"}
"""strategies without gradient buckets that a hook could watch"""


def measure_all(rank: int, trials: dict[str, Trial]) -> dict[str, RankOutput]:
    return {case: run(trial, RankSetup(rank=rank, device=torch.device("cpu"))) for case, trial in trials.items()}


def test_every_registered_name_trains_or_is_infeasible_and_strategies_say_what_their_step_was_made_of() -> None:
    planned = {row.case: row.trial for row in plan_trials(STUDIES["everything"](HOST), HOST) if row.status == "pending"}
    trials: dict[str, Trial] = {}
    for case, trial in planned.items():
        assert case is not None and trial is not None
        # what explains a step is asked of strategies only: its windows would take minutes for all
        whole = case in ("plain", "accumulation") or case.startswith("parallel ")
        trials[case] = trial if whole else trial.but(steps=1, account_steps=0)
    trials["static"] = trials["plain"].but(static_graph=True, gradient_as_bucket_view=False)
    for field, registry in REGISTRIES.items():
        names = {getattr(trial, field) for trial in trials.values()}
        assert names == set(registry) - LACKING_ON_CPUS.get(field, set())

    for size in (1, 2):
        asked = {case: trial for case, trial in trials.items() if trial.world_size == size}
        for found in on_ranks(size, measure_all, asked, timeout_s=600):
            assert found.keys() == asked.keys()
            for case, measurement in found.items():
                _assert_explained(case, asked[case], measurement)
            if size == 2:
                losses = [[row["loss"] for row in found[case].tables["steps"]] for case in ("plain", "static")]
                assert losses[0] == losses[1], "options of DDP change where gradients lie, not what they are"


def _assert_explained(case: str, trial: Trial, measurement: RankOutput) -> None:
    assert {"warmup", "plain", "phases"} <= {row["window"] for row in measurement.tables["steps"]}, case
    assert all(math.isfinite(row["loss"]) and row["loss"] > 0 for row in measurement.tables["steps"]), case
    phases = [row for row in measurement.tables["steps"] if row["window"] == "phases"]
    assert len(phases) == trial.steps, case
    assert {row["samples"] for row in phases} == {trial.samples_per_step}
    reduced = [row.get("reduce_s") for row in phases]
    assert all(reduced) if trial.parallel == "ddp_delayed" else not any(reduced), case
    parts = [key for key in phases[0] if key.endswith("_s") and not key.startswith(("host", "step", "window"))]
    for row in phases:
        assert sum(row[key] or 0 for key in parts) == pytest.approx(row["step_s"], abs=1e-9)
    explained = trial.account_steps > 0 and trial.world_size > 1 and case not in UNEXPLAINED
    assert bool(measurement.tables["buckets"]) == bool(measurement.tables["sweep"]) == explained, case
