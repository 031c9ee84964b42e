"""Modelled durations, compared with those of recorded studies and with the models' own operations and weights."""

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from analysis.read.results import load
from study.plan.duration import RENEWAL_S, START_S, trial_s
from study.plan.estimate import has_own_launch
from trainables.registry import IMAGE_MODELS, MODELS, SAMPLE_DATASETS
from trainables.registry import load as load_target
from trainables.step.flops import step_flops
from trainables.trial import Trial

RESULTS = Path(__file__).parents[3] / "benchmarks/results"


@pytest.mark.parametrize(
    "folder",
    [
        "communication",
        "captured",
        "default-1gpu",
        "default-4gpu",
        "forum-phases-h200",
        "hpml-lab4-h200",
        "vgg-case-study-h200",
    ],
)
def test_a_recorded_gpu_study_took_between_half_and_twice_the_modelled_time(folder: str) -> None:
    trials = load(RESULTS / folder).trials
    done = trials[trials["status"] == "done"]
    names = [name for name in Trial.model_fields if name in done]
    fields: list[dict[str, Any]] = done[names].to_dict("records")  # type: ignore[assignment]
    modelled_s = sum(trial_s(Trial.model_construct(**of_trial)) for of_trial in fields)
    assert len(done) >= 12
    assert 0.5 < done["duration_s"].sum() / modelled_s < 2


STARTS = (
    "averaging", "number-formats", "storage-order", "forum-phases", "vgg-case-study", "mlstm-scaling", "hpml-lab4",
)  # fmt: skip


@pytest.mark.parametrize(("own_launch", "modelled_s"), [(True, START_S["cuda"]), (False, RENEWAL_S["cuda"])])
def test_recorded_worker_groups_took_between_half_and_twice_the_modelled_time_to_start(
    own_launch: bool, modelled_s: float
) -> None:
    starts_s = {}
    for folder in STARTS:
        for record in load(RESULTS / folder).trials.to_dict("records"):
            group = (record["environment"] or {}).get("group")
            if group and has_own_launch(record) == own_launch:
                starts_s[folder, record["worker_group"]] = group["opened_at"] - group["asked_at"]
    assert len(starts_s) >= 10
    assert 0.5 < median(starts_s.values()) / modelled_s < 2


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_operations_of_a_model_are_those_of_the_registry(name: str) -> None:
    facts = MODELS[name]
    if name in IMAGE_MODELS:
        build = partial(load_target(facts), 10, 3, 224)
        flops = step_flops(build, torch.zeros(2, 3, 224, 224, device="meta"), name, 224)
        assert flops is not None and flops / 2e9 == pytest.approx(facts.image_gflop, rel=0.01)
    else:
        trial = Trial(model=name, dataset=SAMPLE_DATASETS[facts.reads])
        build = partial(load_target(facts), facts.vocabulary or 256, trial)
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in build().parameters())
    assert weights / 1e6 == pytest.approx(facts.million_weights, rel=0.01)


def test_a_limit_of_windows_shortens_slow_trials_only() -> None:
    slow, fast = Trial(model="resnet50", image_size=224, steps=200), Trial(model="mlp", steps=200)
    assert trial_s(slow.but(window_limit_s=3.0)) < 0.2 * trial_s(slow)
    assert trial_s(fast.but(window_limit_s=60.0)) == trial_s(fast)
