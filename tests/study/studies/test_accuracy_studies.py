"""Studies that train to an accuracy: grids, seeds, merged trials, time estimates and warnings."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from study.capacity import NodeCapacity
from study.cli.configuration import resolve, to_yaml
from study.cli.prepared import concurrent_trainings, warnings
from study.plan.duration import AFTER_S, BEFORE_S, RENEWAL_S, START_S
from study.plan.estimate import estimate
from study.plan.placement import concurrent_slots
from study.plan.trials import PlannedTrial, plan_trials
from study.studies.basic import STUDIES
from study.studies.study import Study
from trainables.data.files import CIFAR10_FILES, CIFAR10_FOLDER, FASHION_MNIST_FILES, FASHION_MNIST_FOLDER
from trainables.trial import Trial

CPU_HOST = [NodeCapacity("a", "10.0.0.1", cpus=2, gpus=0)]
GPU_HOST = [NodeCapacity("a", "10.0.0.1", cpus=32, gpus=4)]
TWO_GPU_HOSTS = [NodeCapacity(name, "10.0.0.1", cpus=32, gpus=4) for name in ("a", "b")]
FULL_DATA: dict[str, tuple[Any, ...]] = {"data_dir": ("/data",), "dataset": ("fashion_mnist",)}
OFF_THE_REFERENCE = "the gradient noise scale is estimated at the reference batch"
RECIPES = sorted((Path(__file__).parent.parent.parent.parent / "study" / "studies" / "recipes").glob("*.yaml"))


def planned(study: Study, capacity: list[NodeCapacity] = GPU_HOST) -> list[Trial]:
    """Return the trials of a plan. All of them can run, except noise-scale trials away from the reference batch."""
    rows = [row for row in plan_trials(study, capacity) if row.reason != OFF_THE_REFERENCE]
    assert {(row.status, row.reason) for row in rows} == {("pending", "")}
    return [row.trial for row in rows if row.trial is not None]


def large_batch_trials() -> list[Trial]:
    return planned(STUDIES["large-batch"](GPU_HOST).with_overrides(FULL_DATA))


# ------------------------------------------------------------------------------------------------------ large-batch


def test_large_batch_trains_every_recipe_at_every_batch_with_five_seeds() -> None:
    counts: Counter[Any] = Counter(
        (t.global_batch, t.lr_rule, t.warmup, t.optimizer, t.zero_gamma) for t in large_batch_trials()
    )
    plain, zero_gamma = (128, "none", "none", "nesterov", False), (128, "linear", "gradual", "nesterov", True)
    assert counts.pop(plain) == 2 * 5, "the noise scale is a separate case"
    assert counts.pop(zero_gamma) == counts.pop((128, "sqrt", "gradual", "lars", False)) == 5
    assert set(counts.values()) == {5}
    assert {batch for batch, *_ in counts} == {512, 2048, 8192, 16384, 32768}
    assert {tuple(rest) for _, *rest in counts} == {
        ("none", "none", "nesterov", False),
        ("linear", "none", "nesterov", False),
        ("linear", "gradual", "nesterov", False),
        ("sqrt", "gradual", "lars", False),
        ("linear", "gradual", "nesterov", True),
    }


def test_recipes_that_are_equal_at_the_reference_batch_are_one_trial() -> None:
    trials = large_batch_trials()
    ids = [trial.trial_id for trial in trials]
    assert len(ids) == len(set(ids))
    reference = [t for t in trials if t.global_batch == 128 and t.accumulation_steps == 1]
    assert Counter(t.lr_rule for t in reference if t.optimizer == "nesterov" and not t.zero_gamma) == {"none": 5}


def test_a_batch_beyond_memory_is_accumulated_in_parts_that_fit() -> None:
    parts = {t.global_batch: (t.batch_per_gpu, t.accumulation_steps) for t in large_batch_trials() if not t.noise_scale}
    assert parts == {
        128: (128, 1), 512: (512, 1), 2048: (2048, 1), 8192: (8192, 1), 16384: (16384, 1), 32768: (16384, 2),
    }  # fmt: skip


def test_the_noise_scale_is_measured_at_the_reference_batch_by_accumulation() -> None:
    measured = [trial for trial in large_batch_trials() if trial.noise_scale]
    assert {(t.global_batch, t.accumulation_steps, t.optimizer) for t in measured} == {(128, 2, "nesterov")}
    assert len(measured) == 5


def test_a_noise_scale_trial_can_be_selected_by_its_batch_per_gpu() -> None:
    overrides = FULL_DATA | {
        "world_size": (1,),
        "batch_per_gpu": (64,),
        "accumulation_steps": (2,),
        "noise_scale": (True,),
    }
    study = STUDIES["large-batch"](GPU_HOST)
    assert {trial.global_batch for trial in planned(study.with_overrides(overrides))} == {128}
    rows = plan_trials(study.with_overrides(overrides | {"batch_per_gpu": (128,)}), GPU_HOST)
    assert {row.reason for row in rows} == {OFF_THE_REFERENCE}


def test_repeats_of_a_training_have_different_seeds_and_repeats_of_timed_trials_the_same() -> None:
    trials = planned(STUDIES["large-batch"](GPU_HOST).with_overrides(FULL_DATA | {"seed": (7,)}))
    assert {(trial.repeat, trial.seed) for trial in trials} == {(repeat, 7 + 1000 * repeat) for repeat in range(5)}
    timed = planned(STUDIES["smoke"](CPU_HOST), CPU_HOST)
    assert {trial.seed for trial in timed} == {0}


def test_batches_larger_than_an_epoch_are_skipped_with_a_reason() -> None:
    rows = plan_trials(STUDIES["large-batch"](GPU_HOST), GPU_HOST)
    reasons = {row.fields["batch_per_gpu"] * row.fields["accumulation_steps"]: row.reason for row in rows if row.reason}
    assert reasons == {
        batch: f"global batch {batch} is larger than an epoch: dataset 'fashion_mnist_sample' has 10000 images"
        for batch in (16384, 32768)
    }
    assert {row.status for row in rows if row.reason} == {"skipped"}


def test_overriding_batches_and_epochs_keeps_the_recipes() -> None:
    study = STUDIES["large-batch"](GPU_HOST).with_overrides(
        FULL_DATA | {"global_batch": (128, 1024), "epochs": (3,)}, repeats=1
    )
    trials = planned(study)
    assert {trial.epochs for trial in trials} == {3}
    counts = Counter((trial.global_batch, trial.noise_scale) for trial in trials)
    assert counts == {(128, False): 3, (1024, False): 5, (128, True): 1}


def test_without_gpus_large_batch_trains_a_perceptron_for_8_epochs_with_three_seeds() -> None:
    trials = planned(STUDIES["large-batch"](CPU_HOST), CPU_HOST)
    assert {(t.model, t.epochs, t.device, t.dataset) for t in trials} == {("mlp", 8, "cpu", "fashion_mnist_sample")}
    assert {t.seed for t in trials} == {0, 1000, 2000}
    assert max(t.global_batch for t in trials) == 8192
    assert len(trials) == 57


def test_the_printed_configuration_gives_the_same_plan(tmp_path: Path) -> None:
    study = STUDIES["large-batch"](GPU_HOST)
    file = tmp_path / "again.yaml"
    for overrides in ({}, {"global_batch": (128, 512), "epochs": (2,)}):
        first = study.with_overrides(overrides)
        file.write_text(to_yaml(resolve({"study": "large-batch"}), first))
        again = resolve({}, str(file))
        ids = [[t.trial_id for row in plan_trials(s, GPU_HOST) if (t := row.trial)] for s in (
            first, study.with_overrides(again.axes, again.repeats)
        )]  # fmt: skip
        assert ids[0] == ids[1]


# ------------------------------------------------------------------------------------------------ the other studies


def test_fifth_epoch_compares_batch_128_with_the_largest_batch_on_all_gpus_and_two_recipes() -> None:
    trials = planned(STUDIES["fifth-epoch"](GPU_HOST).with_overrides(FULL_DATA))
    assert Counter((t.world_size, t.global_batch, t.lr_rule, t.optimizer) for t in trials) == {
        (1, 128, "none", "sgd"): 3,
        (4, 32768, "none", "sgd"): 3,
        (4, 32768, "linear", "sgd"): 3,
        (4, 32768, "sqrt", "lars"): 3,
    }
    assert {trial.epochs for trial in trials} == {5}


def test_accuracy_fixes_the_global_batch_on_more_and_more_gpus() -> None:
    trials = planned(STUDIES["accuracy"](GPU_HOST).with_overrides(FULL_DATA))
    assert {(trial.world_size, trial.global_batch) for trial in trials} == {(1, 128), (2, 128), (4, 128)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_file_plans_one_training_that_can_run(recipe: Path, tmp_path: Path) -> None:
    files = {
        "fashion": [f"{FASHION_MNIST_FOLDER}/raw/{name}" for part in FASHION_MNIST_FILES.values() for name in part]
    }
    files["imagenet"] = ["train/class/0.JPEG", "val/class/0.JPEG"]
    cifar10 = [f"{CIFAR10_FOLDER}/{name}" for part in CIFAR10_FILES.values() for name in part]
    for name in files.get(recipe.stem.partition("-")[0], cifar10):  # a plan checks file names only
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    configuration = resolve({"data-dir": str(tmp_path)}, str(recipe))
    study = STUDIES[configuration.study](GPU_HOST).with_overrides(configuration.axes, configuration.repeats)
    trials = planned(study)
    assert all(trial.epochs for trial in trials)
    assert len({trial.but(repeat=0, seed=0, world_size=1, nodes=1, batch_per_gpu=1) for trial in trials}) == 1


def test_the_imagenet_recipe_matches_goyal_et_al() -> None:
    assert [path.stem for path in RECIPES] == [
        "cifar10", "fashion-mnist", "fast-small-images", "imagenet-resnet18", "imagenet-resnet50",
    ]  # fmt: skip
    axes = resolve({"data-dir": "/tmp"}, str(RECIPES[-1])).axes
    expected = {
        "model": "resnet50", "epochs": 90, "reference_batch": 256, "learning_rate": 0.1, "weight_decay": 1e-4,
        "momentum": 0.9, "lr_rule": "linear", "warmup": "gradual", "warmup_epochs": 5, "decay": "step",
        "optimizer": "nesterov", "zero_gamma": True, "decay_norm_and_bias": False,
    }  # fmt: skip
    assert {name: axes[name] for name in expected} == {name: (value,) for name, value in expected.items()}


# ------------------------------------------------------------------------- concurrent trainings, time and warnings

TRAINING = Trial(model="mlp", device="cuda", epochs=3, cpus_per_rank=8)


def test_concurrent_trainings_are_limited_by_the_request_and_by_what_fits() -> None:
    trials = [TRAINING, TRAINING.but(seed=1)]
    assert concurrent_trainings(1, trials, GPU_HOST) == 1
    assert concurrent_trainings(2, trials, GPU_HOST) == 2
    assert concurrent_trainings(9, trials, GPU_HOST) == 4
    assert concurrent_trainings(9, trials, TWO_GPU_HOSTS) == 8
    assert concurrent_trainings(9, [TRAINING.but(cpus_per_rank=16)], GPU_HOST) == 2, "each has its cores to itself"
    assert concurrent_trainings(9, [TRAINING.but(epochs=0), TRAINING.but(world_size=2)], GPU_HOST) == 1
    assert concurrent_slots(trials, TWO_GPU_HOSTS) == ["a"] * 4 + ["b"] * 4


def test_each_warning_about_a_plan_is_shown_once() -> None:
    trials = [TRAINING.but(optimizer="adamw", lr_rule="linear", seed=seed) for seed in (0, 1)]
    rule, limit = warnings(8, 4, trials)
    assert rule.startswith("warning: ") and "linear" in rule and "adamw" in rule
    assert "--max-concurrent 8" in limit and "4" in limit
    assert warnings(1, 1, [TRAINING]) == warnings(8, 1, [TRAINING.but(epochs=0)]) == []


def row_for(trial: Trial) -> PlannedTrial:
    return PlannedTrial(trial, trial.model_dump(), "pending")


def test_training_time_is_estimated_from_similar_trainings_and_divided_by_their_concurrency() -> None:
    record = {"status": "done", "trial": TRAINING.model_dump(), "duration_s": 3600.0}
    rows = [row_for(TRAINING.but(seed=seed, repeat=seed)) for seed in (1, 2)]
    rows += [row_for(TRAINING.but(lr_rule="linear", batch_per_gpu=512)), row_for(TRAINING.but(optimizer="lars"))]
    for concurrent, hours in ((1, 4.0), (4, 1.0)):
        estimated = estimate(rows, [record], price_per_gpu_hour=2.0, concurrent=concurrent)
        starts_s = START_S["cuda"] + 2 * RENEWAL_S["cuda"]  # three repeats
        assert estimated.duration_s == pytest.approx(hours * 3600 + starts_s + BEFORE_S + AFTER_S)
        assert estimated.gpu_hours == pytest.approx(4.0 + starts_s / 3600)
    assert "2 of 4 " in estimated.basis and "recipe" in estimated.basis
    for other in (TRAINING.but(epochs=4), TRAINING.but(model="resnet18")):
        assert "1 of 1 estimated from operations" in estimate([row_for(other)], [record], None).basis
