"""Every registered name trains on CPU ranks in the "everything" study, or the plan gives a reason why it cannot."""

import math
from importlib.util import find_spec

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
from trainables.rules import has_cpp_compiler
from trainables.step.context import RankOutput, RankSetup
from trainables.trial import Trial

HOST = [NodeCapacity("a", "10.0.0.1", cpus=2, gpus=0)]
REGISTRIES = {
    "model": MODELS, "precision": PRECISIONS, "parallel": PARALLEL, "execution": EXECUTIONS,
    "memory_format": MEMORY_FORMATS, "optimizer": OPTIMIZERS, "storage": STORAGES, "decode": DECODERS,
}  # fmt: skip
GPU_ONLY = {
    "model": {*names_with(MODELS, "fits_cpu", False)}, "precision": {"tf32", "fp8"}, "parallel": {"dp"},
    "execution": {"graph", "compile_graph"}, "decode": {*names_with(DECODERS, "on_device")},
}  # fmt: skip
"""Infeasible on CPUs; test_studies checks the reasons."""

WITHOUT_BUCKETS = {"parallel none", "parallel ddp_delayed", "parallel horovod", "parallel fsdp2", "parallel hsdp"}
"""Cases whose strategy has no gradient buckets that a hook could observe."""


def measure_all(rank: int, trials: dict[str, Trial]) -> dict[str, RankOutput]:
    return {case: run(trial, RankSetup(rank=rank, device=torch.device("cpu"))) for case, trial in trials.items()}


def test_every_registered_name_trains_or_is_infeasible_and_strategies_measure_all_tables() -> None:
    planned = {row.case: row.trial for row in plan_trials(STUDIES["everything"](HOST), HOST) if row.status == "pending"}
    trials: dict[str, Trial] = {}
    for case, trial in planned.items():
        assert case is not None and trial is not None
        # only strategies measure communication: its windows would take minutes for all cases
        with_communication = case in ("plain", "accumulation") or case.startswith("parallel ")
        trials[case] = trial if with_communication else trial.but(steps=1, warmup_steps=2, communication_steps=0)
    trials["static"] = trials["plain"].but(static_graph=True, gradient_as_bucket_view=False)
    for field, registry in REGISTRIES.items():
        names = {getattr(trial, field) for trial in trials.values()}
        without_compiler = {"compile", "compile_blocks"} if field == "execution" and not has_cpp_compiler() else set()
        not_installed = {"horovod"} if field == "parallel" and find_spec("horovod") is None else set()
        assert names == set(registry) - GPU_ONLY.get(field, set()) - without_compiler - not_installed

    for size in (1, 2):
        trials_of_size = {case: trial for case, trial in trials.items() if trial.world_size == size}
        for outputs in on_ranks(size, measure_all, trials_of_size, timeout_s=600):
            assert outputs.keys() == trials_of_size.keys()
            for case, output in outputs.items():
                _check_tables(case, trials_of_size[case], output)
            if size == 2:
                losses = [[row["loss"] for row in outputs[case].tables["steps"]] for case in ("plain", "static")]
                assert losses[0] == losses[1], "options of DDP change the memory layout of gradients, not their values"


def _check_tables(case: str, trial: Trial, output: RankOutput) -> None:
    assert {"warmup", "plain", "phases"} <= {row["window"] for row in output.tables["steps"]}, case
    assert all(math.isfinite(row["loss"]) and row["loss"] > 0 for row in output.tables["steps"]), case
    phases = [row for row in output.tables["steps"] if row["window"] == "phases"]
    assert len(phases) == trial.steps, case
    assert {row["samples"] for row in phases} == {trial.samples_per_step}
    reduce_times_s = [row.get("reduce_s") for row in phases]
    assert all(reduce_times_s) if trial.parallel in ("ddp_delayed", "horovod") else not any(reduce_times_s), case
    parts = [key for key in phases[0] if key.endswith("_s") and not key.startswith(("host", "step", "window"))]
    for row in phases:
        assert sum(row[key] or 0 for key in parts) == pytest.approx(row["step_s"], abs=1e-9)
    has_communication = trial.communication_steps > 0 and trial.world_size > 1 and case not in WITHOUT_BUCKETS
    assert bool(output.tables["buckets"]) == bool(output.tables["sweep"]) == has_communication, case
