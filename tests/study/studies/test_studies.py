"""Each named study is a complete grid that fits its machine."""

import sys
from typing import Any

import pytest

from study.capacity import NodeCapacity
from study.errors import ConfigurationError
from study.plan.estimate import estimate
from study.plan.trials import plan_trials
from study.studies.basic import STUDIES
from trainables.registry import (
    DATASETS,
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

CPU_HOST = [NodeCapacity("a", "10.0.0.1", cpus=2, gpus=0)]
ONE_CORE = [NodeCapacity("a", "10.0.0.1", cpus=1, gpus=0)]
GPU_HOST = [NodeCapacity("a", "10.0.0.1", cpus=32, gpus=4)]
GPU_CLUSTER = [NodeCapacity("head", "10.0.0.1", cpus=0, gpus=0)] + [
    NodeCapacity(name, f"10.0.0.{number}", cpus=48, gpus=4) for number, name in enumerate("bcd", start=2)
]


@pytest.mark.parametrize("capacity", [CPU_HOST, ONE_CORE, GPU_HOST, GPU_CLUSTER])
@pytest.mark.parametrize("name", ["default", "weak", "strong", "smoke"])
def test_every_trial_of_a_plain_study_is_valid_and_fits(name: str, capacity: list[NodeCapacity]) -> None:
    rows = plan_trials(STUDIES[name](capacity), capacity)
    assert {(row.status, row.reason) for row in rows} == {("pending", "")}


@pytest.mark.parametrize("capacity", [CPU_HOST, ONE_CORE, GPU_HOST, GPU_CLUSTER])
@pytest.mark.parametrize("name", STUDIES)
def test_every_trial_of_a_named_study_is_valid_or_has_a_reason_why_it_cannot_run(
    name: str, capacity: list[NodeCapacity]
) -> None:
    rows = plan_trials(STUDIES[name](capacity).with_overrides({"data_dir": ("/data",)}), capacity)
    assert {row.status for row in rows} <= {"pending", "infeasible", "skipped"}
    assert any(row.status == "pending" for row in rows)
    assert all(bool(row.reason) == (row.status != "pending") for row in rows)
    reasons = ("is larger than an epoch: ", "hybrid sharding shards nothing", "supports one node")
    assert all(any(text in row.reason for text in reasons) for row in rows if row.status == "skipped")


def test_everything_can_run_on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainables.rules._installed", lambda package: True)  # torchao and Horovod are optional
    host = [NodeCapacity("a", "10.0.0.1", cpus=32, gpus=2)]
    rows = plan_trials(STUDIES["everything"](host), host)
    assert {row.status for row in rows} == {"pending"}
    trials = [row.trial for row in rows if row.trial]
    for field, registry in (
        ("model", MODELS), ("precision", PRECISIONS), ("parallel", PARALLEL), ("execution", EXECUTIONS),
        ("memory_format", MEMORY_FORMATS), ("optimizer", OPTIMIZERS), ("storage", STORAGES), ("decode", DECODERS),
    ):  # fmt: skip
        assert {getattr(trial, field) for trial in trials} == set(registry)
    without_files = set(names_with(DATASETS, "needs_data_dir", False))
    assert {trial.dataset for trial in trials} == without_files


def test_trials_that_require_gpus_are_infeasible_on_cpus_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("trainables.rules._installed", lambda package: True)
    rows = plan_trials(STUDIES["everything"](CPU_HOST), CPU_HOST)
    reasons = {row.case: row.reason for row in rows if row.status != "pending"}
    assert {case: reason.partition(" requires GPUs")[0] for case, reason in reasons.items()} == {
        "model mlstm4096": "model 'mlstm4096' is too large to train on a CPU rank",
        "model mlstm8192": "model 'mlstm8192' is too large to train on a CPU rank",
        "model gpt2": "model 'gpt2' is too large to train on a CPU rank",
        "model gpt2_medium": "model 'gpt2_medium' is too large to train on a CPU rank",
        "model llama_1b": "model 'llama_1b' is too large to train on a CPU rank",
        "model llama_8b": "model 'llama_8b' is too large to train on a CPU rank",
        "precision tf32": "precision 'tf32'",
        "precision fp8": "precision 'fp8'",
        "parallel dp": "parallel 'dp'",
        "decode nvjpeg": "decode 'nvjpeg'",
        "decode nvjpeg_ahead": "decode 'nvjpeg_ahead'",
        "batches copied ahead": "copy_ahead",
        "execution graph": "execution 'graph'",
        "execution compile_graph": "execution 'compile_graph'",
        "synchronised batch normalisation": "sync_batch_norm",
    }


def test_an_image_study_without_a_data_folder_asks_for_data_dir() -> None:
    study = STUDIES["acceleration-ladder"](GPU_HOST)
    cases = {row.case for row in plan_trials(study, GPU_HOST) if "--data-dir" in row.reason}
    assert cases == set(study.cases)


def test_without_gpus_the_ladder_uses_the_shipped_sample() -> None:
    rows = plan_trials(STUDIES["acceleration-ladder"](CPU_HOST), CPU_HOST)
    reasons = {row.reason.partition(";")[0] for row in rows}
    assert reasons == {"", "parallel 'dp' requires GPUs", "needs 2 nodes"}
    assert {row.trial.dataset for row in rows if row.trial and not row.trial.epochs} == {"image_folder_sample"}


def test_a_ladder_trains_in_each_of_its_precisions_regardless_of_overrides() -> None:
    study = STUDIES["acceleration-ladder"](GPU_HOST).with_overrides(
        {"dataset": ("tiny_imagenet",), "data_dir": ("/data",), "steps": (5,)}
    )
    rows = [row for row in plan_trials(study, GPU_HOST) if row.trial and row.trial.epochs]
    assert {row.case for row in rows} == set(study.extra_trials) and len(rows) == 4 * study.repeats
    trainings = [row.trial for row in rows if row.trial]
    assert {trial.precision for trial in trainings} == {"fp32", "fp16", "fp16_master", "fp16_pure"}
    assert {trial.but(precision="fp32", repeat=0, seed=0).trial_id for trial in trainings} == {
        trainings[0].but(seed=0).trial_id
    }
    assert {(trial.dataset, trial.world_size) for trial in trainings} == {("fashion_mnist_sample", 1)}


def test_ladder_steps_on_one_node_have_one_global_batch_and_the_two_node_step_doubles_it() -> None:
    study = STUDIES["acceleration-ladder"](GPU_CLUSTER)
    assert study.ladder
    rows = plan_trials(study, GPU_CLUSTER)
    batches = {row.case: row.trial.global_batch for row in rows if row.trial and row.case not in study.extra_trials}
    assert batches.pop("DDP, mixed precision, two nodes") == 1024
    assert set(batches.values()) == {512}
    assert len(batches) == 11, "with the step that emulates two nodes"


def test_the_ladder_step_with_more_loader_workers_also_has_more_cpu_threads() -> None:
    trials = {row.case: row.trial for row in plan_trials(STUDIES["acceleration-ladder"](GPU_CLUSTER), GPU_CLUSTER)}
    before, after = trials["DataParallel, fp32"], trials["DataParallel, more loader workers and CPU threads"]
    assert before and after
    assert (before.loader_workers, before.cpus_per_rank) == (2, 2)
    assert (after.loader_workers, after.cpus_per_rank) == (8, 12)
    assert after.but(loader_workers=2, cpus_per_rank=2).trial_id == before.trial_id


def test_the_steps_of_an_epoch_depend_on_the_global_batch() -> None:
    rows = plan_trials(STUDIES["hpml-lab4"](GPU_HOST), GPU_HOST)
    timed = [row.trial for row in rows if row.trial and not row.trial.epochs]
    steps = {(t.world_size, t.batch_per_gpu): (t.warmup_steps, t.steps) for t in timed}
    assert steps[1, 32] == (312, 312)
    assert steps[4, 512] == (4, 52), "13 epochs, for at least 50 steps"
    assert steps[4, 32768] == (2, 50), "the batch is larger than the data set"
    overridden = STUDIES["hpml-lab4"](GPU_HOST).with_overrides({"steps": (7,)})
    again = [row.trial for row in plan_trials(overridden, GPU_HOST) if row.trial and not row.trial.epochs]
    assert {trial.steps for trial in again} == {7}


def test_overriding_a_field_of_cases_merges_equal_trials() -> None:
    rows = plan_trials(STUDIES["everything"](CPU_HOST).with_overrides({"precision": ("bf16",)}), CPU_HOST)
    ids = [row.trial.trial_id for row in rows if row.trial]
    assert len(ids) == len(set(ids))
    assert {row.fields["precision"] for row in rows} == {"bf16"}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_its_registered_name_and_a_question(name: str) -> None:
    study = STUDIES[name](CPU_HOST)
    assert study.name == name
    assert study.question.endswith("?")


def test_the_default_study_without_gpus_is_a_small_grid_with_one_core_per_rank() -> None:
    study = STUDIES["default"](CPU_HOST)
    assert study.axes == {"world_size": (1, 2), "batch_per_gpu": (16, 64)}
    assert study.repeats == 3
    trials = [row.trial for row in plan_trials(study, CPU_HOST)]
    assert len(trials) == 12
    assert {(t.model, t.dataset, t.device, t.memory_format) for t in trials if t} == {
        ("resnet20", "fashion_mnist_sample", "cpu", "channels_last")
    }
    assert {(t.cpus_per_rank, t.loader_workers) for t in trials if t} == {(1, 0)}


def test_the_default_study_times_resnet50_and_a_transformer_on_all_gpus_in_powers_of_two() -> None:
    study = STUDIES["default"](GPU_CLUSTER)
    assert study.axes == {
        "world_size": (1, 2, 4, 8),
        "model": ("resnet50", "transformer"),
        "batch_per_gpu": (64, 256),
    }
    assert study.repeats == 5
    trials = [row.trial for row in plan_trials(study, GPU_CLUSTER)]
    assert {(t.world_size, t.nodes) for t in trials if t} == {(1, 1), (2, 1), (4, 1), (8, 2)}
    assert {(t.dataset, t.image_size, t.precision) for t in trials if t} == {("synthetic", 224, "bf16")}
    assert {(t.communication_steps, t.sweep_bytes) for t in trials if t} == {(10, 2**30)}


def test_the_default_study_is_estimated_to_take_at_most_four_minutes_on_two_cores_and_eight_on_two_gpus() -> None:
    two_gpus = [NodeCapacity("a", "10.0.0.1", cpus=32, gpus=2)]
    for host, minutes in ((CPU_HOST, 4), (two_gpus, 8)):
        assert estimate(plan_trials(STUDIES["default"](host), host), [], None).duration_s < 60 * minutes


@pytest.mark.parametrize(
    ("axes", "length"),
    [
        ({"model": ("gpt2",)}, 1024),
        ({"model": ("gpt2",), "sequence_length": (512,)}, 512),
        ({"model": ("transformer",)}, 256),
    ],
)
def test_a_model_has_its_own_sequence_length_unless_one_is_given(axes: dict[str, Any], length: int) -> None:
    study = STUDIES["default"](GPU_HOST).with_overrides(axes)
    rows = plan_trials(study, GPU_HOST)
    assert {row.trial.sequence_length for row in rows if row.trial} == {length}


def test_a_workload_replaces_the_models_of_a_study() -> None:
    study = STUDIES["default"](GPU_HOST).with_overrides({"workload": ("mine.py:build",)})
    assert set(study.axes) == {"world_size", "batch_per_gpu", "workload"}
    assert not {"model", "dataset", "image_size"} & set(study.base)
    both = STUDIES["default"](GPU_HOST).with_overrides({"workload": ("mine.py:build",), "model": ("a", "b")})
    assert both.axes["model"] == ("a", "b"), "the workload may read trial.model"


def test_weak_fixes_the_batch_per_gpu_and_strong_the_global_batch() -> None:
    weak = [row.trial for row in plan_trials(STUDIES["weak"](GPU_HOST), GPU_HOST)]
    strong = [row.trial for row in plan_trials(STUDIES["strong"](GPU_HOST), GPU_HOST)]
    assert {t.batch_per_gpu for t in weak if t} == {128}
    assert {t.global_batch for t in strong if t} == {512}
    assert {t.world_size for t in weak if t} == {t.world_size for t in strong if t} == {1, 2, 4}


def test_settings_for_gpus_are_infeasible_on_cpus_with_a_reason() -> None:
    axes = {"precision": ("fp32", "tf32"), "interconnect": ("auto", "no_p2p", "socket")}
    for capacity, unmet in ((CPU_HOST, 5), (GPU_HOST, 0)):
        overrides = axes | {"world_size": (1,), "batch_per_gpu": (8,)}
        rows = plan_trials(STUDIES["smoke"](capacity).with_overrides(overrides, repeats=1), capacity)
        assert [row.status for row in rows].count("infeasible") == unmet
        reasons = {row.reason for row in rows if row.status == "infeasible" and row.fields["precision"] == "fp32"}
        assert len(reasons) == (2 if unmet else 0)
        assert all("interconnect" in reason and "NCCL" in reason for reason in reasons)


def test_overriding_the_global_batch_removes_the_batch_per_gpu_and_vice_versa() -> None:
    by_global_batch = STUDIES["default"](CPU_HOST).with_overrides({"global_batch": (8,)})
    assert "batch_per_gpu" not in by_global_batch.axes
    by_batch_per_gpu = by_global_batch.with_overrides({"batch_per_gpu": (4,)})
    assert "global_batch" not in by_batch_per_gpu.axes


def test_an_overridden_field_replaces_the_base_value() -> None:
    study = STUDIES["default"](CPU_HOST).with_overrides({"model": ("mlp",), "precision": ("fp32",)}, repeats=1)
    assert "model" not in study.base
    assert study.axes["model"] == ("mlp",)
    assert study.axes["precision"] == ("fp32",)
    assert study.repeats == 1


def test_the_interconnect_study_uses_complete_nodes_and_fixes_the_batch_per_gpu_or_the_global_batch() -> None:
    rows = plan_trials(STUDIES["interconnect"](GPU_CLUSTER), GPU_CLUSTER)
    trials = [row.trial for row in rows if row.trial and row.trial.model == "vgg19" and row.trial.repeat == 0]
    assert {(trial.nodes, trial.world_size, trial.batch_per_gpu) for trial in trials} == {
        (1, 4, 64),  # the first trial of both weak and strong; 3 nodes are no power of two
        (2, 8, 64),
        (2, 8, 32),
    }
    assert len(trials) == 3
    two_cpus = [NodeCapacity(name, f"10.0.0.{number}", cpus=2, gpus=0) for number, name in enumerate("ab", start=2)]
    on_cpus = [row.trial for row in plan_trials(STUDIES["interconnect"](two_cpus), two_cpus) if row.trial]
    assert {(trial.nodes, trial.world_size) for trial in on_cpus} == {(1, 1), (2, 2)}  # one rank per host


def test_the_vgg_study_also_trains_with_each_timed_batch() -> None:
    overrides = {"batch_per_gpu": (12, 128), "dataset": ("cifar10",), "data_dir": ("/data",)}
    study = STUDIES["vgg-case-study"](GPU_HOST).with_overrides(overrides)
    trials = [row.trial for row in plan_trials(study, GPU_HOST) if row.trial]
    timed = {(t.parallel, t.world_size, t.batch_per_gpu) for t in trials if not t.epochs}
    trained = {(t.parallel, t.world_size, t.batch_per_gpu) for t in trials if t.epochs}
    assert trained == {key for key in timed if key[0] == "ddp"} and len(timed) == 8
    assert {(t.model, t.dataset, t.image_size) for t in trials} == {("vgg19", "cifar10", 224)}


def test_one_case_of_a_study_is_planned_alone() -> None:
    study = STUDIES["acceleration-ladder"](CPU_HOST).only(["LMDB", "DDP, fp32"])
    assert {row.case for row in plan_trials(study, CPU_HOST)} == {"LMDB", "DDP, fp32"}
    assert STUDIES["weak"](CPU_HOST).only(()).axes == STUDIES["weak"](CPU_HOST).axes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2-scaling", r"--case: 'weak' is no case of the study 'gpt2-scaling'; its cases are 'weak, 2', 'weak, 8'"),
        ("default", "--case: 'weak' is no case of the study 'default'; leave --case out"),
    ],
)
def test_an_unknown_case_is_refused_with_the_names_of_the_others(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        STUDIES[name](CPU_HOST).only(["weak"])
