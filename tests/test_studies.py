"""Every named study is a full grid that fits the machine it was made for."""

import pytest

from study.capacity import NodeCapacity
from study.plan import plan_trials
from study.studies import STUDIES

CPU_HOST = [NodeCapacity("a", "10.0.0.1", cpus=2, gpus=0)]
ONE_CORE = [NodeCapacity("a", "10.0.0.1", cpus=1, gpus=0)]
GPU_HOST = [NodeCapacity("a", "10.0.0.1", cpus=32, gpus=4)]
GPU_CLUSTER = [NodeCapacity("head", "10.0.0.1", cpus=0, gpus=0)] + [
    NodeCapacity(name, f"10.0.0.{number}", cpus=48, gpus=4) for number, name in enumerate("bcd", start=2)
]


@pytest.mark.parametrize("capacity", [CPU_HOST, ONE_CORE, GPU_HOST, GPU_CLUSTER])
@pytest.mark.parametrize("name", STUDIES)
def test_every_trial_of_a_named_study_is_valid_and_fits(name: str, capacity: list[NodeCapacity]) -> None:
    rows = plan_trials(STUDIES[name](capacity), capacity)
    assert {(row.status, row.reason) for row in rows} == {("pending", "")}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_goes_by_its_registered_name_and_asks_a_question(name: str) -> None:
    study = STUDIES[name](CPU_HOST)
    assert study.name == name
    assert study.question.endswith("?")


def test_the_default_study_without_gpus_is_the_grid_that_ends_in_minutes() -> None:
    study = STUDIES["default"](CPU_HOST)
    assert study.axes == {
        "world_size": (1, 2),
        "batch_per_gpu": (2, 4),
        "loader_workers": (0, 1),
        "precision": ("fp32", "bf16"),
    }
    assert study.repeats == 3
    trials = [row.trial for row in plan_trials(study, CPU_HOST)]
    assert len(trials) == 48
    assert {(t.model, t.dataset, t.device, t.memory_format) for t in trials if t} == {
        ("resnet18", "fashion_mnist_sample", "cpu", "channels_last")
    }
    assert {(t.account_steps, t.sweep_bytes) for t in trials if t} == {(1, 2**22)}


def test_the_default_study_uses_all_gpus_in_powers_of_two() -> None:
    study = STUDIES["default"](GPU_CLUSTER)
    assert study.axes["world_size"] == (1, 2, 4, 8)
    assert study.axes["batch_per_gpu"] == (32, 128, 512)
    trials = [row.trial for row in plan_trials(study, GPU_CLUSTER)]
    assert {(t.world_size, t.nodes) for t in trials if t} == {(1, 1), (2, 1), (4, 1), (8, 2)}
    assert {t.cpus_per_rank for t in trials if t} == {12}
    assert {(t.account_steps, t.sweep_bytes) for t in trials if t} == {(10, 2**30)}


def test_weak_holds_the_batch_per_gpu_and_strong_the_global_batch() -> None:
    weak = [row.trial for row in plan_trials(STUDIES["weak"](GPU_HOST), GPU_HOST)]
    strong = [row.trial for row in plan_trials(STUDIES["strong"](GPU_HOST), GPU_HOST)]
    assert {t.batch_per_gpu for t in weak if t} == {128}
    assert {t.global_batch for t in strong if t} == {1024}
    assert {t.world_size for t in weak if t} == {t.world_size for t in strong if t} == {1, 2, 4}


def test_what_exists_on_gpus_only_is_infeasible_with_the_reason_on_cpus() -> None:
    axes = {"precision": ("fp32", "tf32"), "interconnect": ("auto", "no_p2p", "socket")}
    for capacity, unmet in ((CPU_HOST, 5), (GPU_HOST, 0)):
        asked = STUDIES["smoke"](capacity).asking(axes | {"world_size": (1,), "batch_per_gpu": (8,)}, repeats=1)
        rows = plan_trials(asked, capacity)
        assert [row.status for row in rows].count("infeasible") == unmet
        reasons = {row.reason for row in rows if row.status == "infeasible" and row.fields["precision"] == "fp32"}
        expected = {
            f"interconnect {name!r} is a setting of NCCL; ranks on CPUs use gloo" for name in ("no_p2p", "socket")
        }
        assert reasons == (expected if unmet else set())


def test_asking_for_a_global_batch_drops_the_batch_per_gpu_and_the_other_way_round() -> None:
    asked = STUDIES["default"](CPU_HOST).asking({"global_batch": (8,)})
    assert "batch_per_gpu" not in asked.axes
    back = asked.asking({"batch_per_gpu": (4,)})
    assert "global_batch" not in back.axes


def test_an_axis_that_is_asked_for_replaces_the_base_value() -> None:
    asked = STUDIES["default"](CPU_HOST).asking({"model": ("mlp",), "precision": ("fp32",)}, repeats=1)
    assert "model" not in asked.base
    assert asked.axes["model"] == ("mlp",)
    assert asked.axes["precision"] == ("fp32",)
    assert asked.repeats == 1
