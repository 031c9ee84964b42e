"""Next steps: the trial that narrows a prediction most for its cost, and the best configuration for a goal."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from analysis.predict.fit import Spread, fit
from analysis.predict.forecast import NETWORK, forecast
from analysis.predict.inputs import ReportInputs, with_models
from analysis.predict.laws import LAWS, Points, ring_factor
from analysis.predict.model import ScalingModel, models, models_of
from analysis.predict.next_trial import (
    LEAST_GAIN,
    NARROWER,
    THIRD_SIZE,
    NextTrial,
    expected,
    next_trial,
    steps_of_a_trial,
)
from analysis.read.results import load
from analysis.read.study_record import GOALS
from analysis.study import analyse
from analysis.verdict.answer import answer
from analysis.verdict.next_steps import best, best_predicted, sentence
from study.cli.predict import outlook
from tests.analysis.predict.test_prediction import GPU, ring_law, series, study
from tests.support.frames import grid, write_results, write_study


def by_hand(model: ScalingModel, size: int, target: int) -> float:
    """Refit with one more run on `size` ranks; return the variance of the predicted log step at `target`.

    The unit is the variance of a single run.
    """
    sizes = np.array([*model.series.sizes, size])
    batch = np.full(len(sizes), model.series.base_batch)
    points = Points(sizes, batch, batch, np.zeros(len(sizes)))
    step_s = model.chosen.step_s(points)  # the step time that the law expects
    repeats = np.array([*model.series.points["n"], 1])
    refit = fit(model.chosen.law, points, np.log(step_s), repeats, Spread(1.0, 9))
    return float(refit.leverage(model.series.at([target]))[0])  # type: ignore[union-attr]


def ring_series(*sizes: int, seed: int = 0, spread: float = 0.005) -> ScalingModel:
    rng = np.random.default_rng(seed)
    [model] = models_of([series({n: 0.020 + 0.003 * float(ring_factor(n)) for n in sizes}, spread, rng=rng)])
    assert model.law in LAWS
    return model


def test_expected_variance_equals_a_refit_with_the_added_run() -> None:
    model = ring_series(1, 2, 4)
    before = float(model.chosen.leverage(model.series.at([16]))[0])
    for size in (1, 2, 4):
        trial = expected(model, size, 16, steps=100)
        assert trial is not None
        after = by_hand(model, size, 16)
        assert after < before
        run, shown = model.run_spread, np.log1p(trial.half_width_before)
        law = (shown / stdtrit(run.degrees, 0.975)) ** 2 - run.variance * (
            1 + before
        )  # what laws add to a run's spread
        assert law > 0
        t_after = stdtrit(run.degrees + 1, 0.975)  # the run is one degree of freedom more
        half_width = t_after * np.sqrt(run.variance * (1 + after) + law)
        assert np.log1p(trial.half_width_after) == pytest.approx(half_width, rel=1e-3)


def far_from_8(directory: Path, **axes: Any) -> ReportInputs:
    """Return a study of 1, 2 and 3 GPUs with one repeat, whose prediction for 8 profits from a run on 4."""
    return study(directory, world_size=[1, 2, 3], repeat=[0], **axes)


def test_next_trial_removes_most_variance_per_gpu_hour(tmp_path: Path) -> None:
    analysis = far_from_8(tmp_path)
    best_trial = next_trial(analysis, target=8)
    assert best_trial is not None
    assert best_trial.why == NARROWER
    assert best_trial.half_width_after <= (1 - LEAST_GAIN) * best_trial.half_width_before

    rates = {}
    for model, size in itertools.product(models(analysis), (1, 2, 3, 4)):
        trial = expected(model, size, 8, steps_of_a_trial(analysis, model))
        assert trial is not None
        gain = np.log1p(trial.half_width_before) ** 2 - np.log1p(trial.half_width_after) ** 2
        if trial.half_width_after <= (1 - LEAST_GAIN) * trial.half_width_before:
            rates[(trial.series, size)] = gain / trial.gpu_hours
    assert max(rates, key=lambda key: rates[key]) == (best_trial.series, best_trial.world_size)


def test_no_trial_is_suggested_that_narrows_the_interval_by_less_than_a_tenth(tmp_path: Path) -> None:
    analysis = study(tmp_path, repeat=range(6))
    trials = [
        trial
        for model, size in itertools.product(models(analysis), (1, 2, 4))
        if (trial := expected(model, size, 8, 100)) is not None
    ]
    assert max(1 - trial.half_width_after / trial.half_width_before for trial in trials) < LEAST_GAIN
    assert next_trial(analysis, target=8) is None
    assert "10\u00a0%" in sentence(analysis, None)


def test_no_trial_is_suggested_where_there_is_no_interval(tmp_path: Path) -> None:
    analysis = far_from_8(tmp_path)
    assert next_trial(analysis, target=16) is None, "the nodes hold 8 GPUs, and no network was measured"


def test_gpu_hours_follow_from_measured_steps(tmp_path: Path) -> None:
    analysis = far_from_8(tmp_path, batch_per_gpu=[32])
    trial = next_trial(analysis, target=8)
    assert trial is not None
    of_a_trial = len(analysis.results.steps.query("rank == 0")) / len(analysis.results.trials)
    step_s = ring_law({"batch_per_gpu": 32, "world_size": trial.world_size})["step_s"]
    assert trial.gpu_hours == pytest.approx(trial.world_size * of_a_trial * step_s / 3600, rel=0.02)


def test_two_sizes_recommend_the_cheapest_third_size(tmp_path: Path) -> None:
    analysis = study(tmp_path, world_size=[1, 2])
    trial = next_trial(analysis)
    assert trial is not None
    assert (trial.world_size, trial.batch_per_gpu, trial.why) == (4, 32, THIRD_SIZE)
    text = sentence(analysis, trial)
    assert "4 GPUs, batch 32 per GPU" in text
    assert THIRD_SIZE in text


def test_next_trial_on_cpus_doubles_the_ranks_up_to_the_cores_of_a_host(tmp_path: Path) -> None:
    analysis = study(tmp_path, world_size=[1, 2], batch_per_gpu=[32], device=["cpu"])
    trial = next_trial(analysis)
    assert trial is not None
    assert (trial.world_size, trial.target, trial.why) == (4, 16, THIRD_SIZE), "16 cores"
    for cores, size in ((8, 4), (2, None)):
        for environment in analysis.results.trials["environment"]:
            environment["nodes"] = [{"cpu_count": cores}]
        trial = next_trial(analysis)
        assert (trial and trial.world_size) == size


def test_more_cpu_ranks_than_a_host_has_cores_are_predicted_without_an_interval(tmp_path: Path) -> None:
    analysis = study(tmp_path, world_size=[1, 2], batch_per_gpu=[32], device=["cpu"])
    for environment in analysis.results.trials["environment"]:
        environment["nodes"] = [{"cpu_count": 4}]
    inside, beyond = forecast(analysis, [4, 8]).rows.sort_values("world_size").to_dict("records")
    assert (inside["nodes"], beyond["nodes"]) == (1, 2)
    assert inside["step_s_low"] < inside["step_s"]
    assert math.isnan(beyond["step_s_low"]) and beyond["caveat"] == NETWORK


def test_more_ranks_reduce_the_law_error_at_the_target() -> None:
    wrong = replace(ring_series(1, 2, 4, spread=0.001), law_error=0.01)
    near, far = expected(wrong, 4, 64, 100), expected(wrong, 8, 64, 100)
    assert near is not None
    assert far is not None
    assert far.half_width_after < 0.9 * near.half_width_after


def test_next_trial_is_smaller_than_the_target(tmp_path: Path) -> None:
    analysis = study(tmp_path)
    for target in (2, 4, 8):
        trial = next_trial(analysis, target=target)
        assert trial is None or trial.world_size < target


def test_sentence_states_cost_and_expected_gain(tmp_path: Path) -> None:
    analysis = study(tmp_path)
    text = sentence(analysis, NextTrial(1, 4, 128, 0.25, 64, 0.123, 0.0456, NARROWER))
    facts = ("4 GPUs, batch 128 per GPU", "0.25 GPU-hours", NARROWER, "for 64 GPUs", "12.3\u00a0%", "4.6\u00a0%")
    assert [fact for fact in facts if fact not in text] == []
    assert sentence(analysis, None).startswith("Next trial: none ")


def measured(
    directory: Path, steps_s: dict[tuple[int, int], float], repeats: int = 3, spread: float = 0.002
) -> ReportInputs:
    """Write a study with these step times by number of GPUs and batch."""
    trials = [
        fields
        for size, batch in steps_s
        for fields in grid(GPU, world_size=[size], batch_per_gpu=[batch], repeat=range(repeats))
    ]

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": steps_s[fields["world_size"], fields["batch_per_gpu"]]}

    return with_models(analyse(load(write_results(directory, trials, law, spread=spread))))


def test_best_for_throughput_and_for_cost_differ(tmp_path: Path) -> None:
    analysis = measured(tmp_path, {(1, 32): 0.010, (2, 32): 0.014, (4, 32): 0.015}, spread=0.0)
    first, second = best(analysis, "throughput").split("; ")
    assert first == "Best for throughput: 4 GPUs, batch 32 per GPU, 8,533 [8,533, 8,533] samples/s"
    assert "2 GPUs, batch 32 per GPU, 46.4\u00a0% less (significantly" in second
    first, second = best(analysis, "cost").split("; ")
    assert first.startswith("Best for cost: 1 GPU, batch 32 per GPU, 11.52 [11.52, 11.52] million samples")
    assert "2 GPUs, batch 32 per GPU, 28.6\u00a0% less (significantly" in second


def test_overlapping_intervals_are_not_significantly_different(tmp_path: Path) -> None:
    analysis = measured(tmp_path, {(1, 32): 0.010, (1, 64): 0.0199}, spread=0.03)
    assert " less (not significantly" in best(analysis, "throughput")


def test_one_repeat_cannot_tell_whether_configurations_differ(tmp_path: Path) -> None:
    analysis = measured(tmp_path, {(1, 32): 0.010, (2, 32): 0.011}, repeats=1)
    assert " less (one repeat" in best(analysis, "throughput")


def test_single_configuration_has_no_runner_up(tmp_path: Path) -> None:
    analysis = measured(tmp_path, {(2, 32): 0.010}, spread=0.0)
    assert best(analysis, "throughput") == (
        "Best for throughput: 2 GPUs, batch 32 per GPU, 6,400 [6,400, 6,400] samples/s; nothing else was measured."
    )


def of_fields(directory: Path, step_s: dict[str, float], field: str, **base: Any) -> ReportInputs:
    """Write a study of one GPU with three repeats without noise, and these step times by the value of a field."""
    trials = [
        trial
        for i, value in enumerate(step_s)
        for trial in grid(GPU | base | {field: value}, repeat=range(3 * i, 3 * i + 3))
    ]
    return with_models(
        analyse(load(write_results(directory, trials, lambda fields: {"step_s": step_s[fields[field]]}, spread=0.0)))
    )


def test_the_best_predicted_configuration_is_not_the_best_measured_one(tmp_path: Path) -> None:
    steps_s = {(1, 32): 0.010, (2, 32): 0.011, (4, 32): 0.0115, (1, 64): 0.019, (2, 64): 0.0235, (4, 64): 0.0258}
    analysis = measured(tmp_path, steps_s | {(1, 512): 0.030, (8, 512): 0.2})
    measured_best = best(analysis, "throughput")
    assert "8 GPUs, batch 512 per GPU" in measured_best
    rows = forecast(analysis, [8, 16]).rows
    texts = best_predicted(analysis, rows, "throughput")
    assert texts[0].startswith("Best predicted throughput on 8 GPUs: batch 32 per GPU, ")
    by_series = rows[(rows["world_size"] == 8) & rows["step_s"].notna()]
    assert texts[0].split(", ")[1].startswith(f"{by_series['throughput_samples_per_s'].max():,.0f}"[:5].split(",")[0])
    assert texts[1].endswith("[network not measured].")
    assert best_predicted(analysis, rows.assign(step_s=np.nan), "throughput")[0].endswith("nothing is predicted there.")
    with pytest.raises(ValueError, match="goal 'speed'; allowed: throughput, cost"):
        best_predicted(analysis, rows, "speed")


def test_a_measured_configuration_that_is_better_than_each_predicted_one_is_named(tmp_path: Path) -> None:
    steps_s = {(1, 32): 0.010, (2, 32): 0.011, (4, 32): 0.0115, (8, 512): 0.1}
    analysis = measured(tmp_path, steps_s, spread=0.0)
    rows = forecast(analysis, [3, 8]).rows
    on_three, on_eight = best_predicted(analysis, rows, "throughput")
    assert "measured already" not in on_three
    assert on_eight.endswith("; measured already: 40,960 with 8 GPUs, batch 512 per GPU, not predicted.")
    (cost,) = best_predicted(analysis, rows, "cost")
    assert cost.endswith("; measured already: 18.43 million with 8 GPUs, batch 512 per GPU, not predicted.")


def test_each_model_has_its_own_best_configuration(tmp_path: Path) -> None:
    analysis = of_fields(tmp_path, {"resnet18": 0.010, "resnet50": 0.020}, "model")
    assert best(analysis, "throughput") == (
        "Best for throughput of resnet18: 1 GPU, batch 32 per GPU, 3,200 [3,200, 3,200] samples/s; nothing else was "
        "measured. Best for throughput of resnet50: 1 GPU, batch 32 per GPU, 1,600 [1,600, 1,600] samples/s; nothing "
        "else was measured."
    )


def test_many_workloads_have_no_best_configuration(tmp_path: Path) -> None:
    analysis = of_fields(tmp_path, dict.fromkeys("abcd", 0.01), "model")
    assert "4 workloads" in best(analysis, "cost")


def test_emulated_interconnect_is_never_best_if_a_real_one_was_measured(tmp_path: Path) -> None:
    analysis = of_fields(tmp_path, {"auto": 0.020, "socket": 0.010}, "interconnect", world_size=2)
    assert best(analysis, "throughput").startswith(
        "Best for throughput: 2 GPUs, batch 32 per GPU, interconnect auto, 3,200 [3,200, 3,200] samples/s; nothing else"
    )
    alone = of_fields(tmp_path / "alone", {"no_p2p": 0.020, "socket": 0.010}, "interconnect", world_size=2)
    assert "socket (emulated), 6,400 [6,400, 6,400] samples/s; runner-up:" in best(alone, "throughput")


def test_timing_fields_do_not_make_a_runner_up(tmp_path: Path) -> None:
    analysis = of_fields(tmp_path, {"": 0.020, "all": 0.0201}, "profile_ranks")
    assert best(analysis, "throughput").endswith("; nothing else was measured.")


def test_time_to_accuracy_is_unknown_without_training_trials(tmp_path: Path) -> None:
    analysis = measured(tmp_path, {(2, 32): 0.010}, repeats=1)
    assert best(analysis, "time-to-accuracy").startswith("Best for time to accuracy: unknown")


def test_unknown_goal_lists_the_allowed_ones(tmp_path: Path) -> None:
    analysis = measured(tmp_path, {(2, 32): 0.010}, repeats=1)
    with pytest.raises(ValueError, match="goal 'speed'; allowed: throughput, time-to-accuracy, cost"):
        best(analysis, "speed")
    assert all(best(analysis, goal) for goal in GOALS)


def test_answer_and_predict_use_goal_and_price_of_the_study(tmp_path: Path) -> None:
    measured(tmp_path, {(1, 32): 0.010, (2, 32): 0.011, (4, 32): 0.012}, repeats=2)
    folder = next(path.parent for path in tmp_path.rglob("study.json"))

    def run(**configuration: Any) -> tuple[list[str], list[str], float]:
        """Return the answer, that of predict, and its cost per million samples."""
        write_study(folder, configuration={"repeats": 2} | configuration)
        prediction = outlook(str(folder), "8", None, None, None)
        cost = prediction.as_json["predictions"][0]["cost_per_million_samples"]
        return answer(with_models(analyse(load(folder)))), prediction.answer, cost

    plain, plain_lines, plain_cost = run()
    sentences, lines, cost = run(goal="cost", **{"price-per-gpu-hour": 2.0})
    assert sentences[:-1] == plain and sentences[-1].startswith("Best for cost: 1 GPU")
    assert [line.split(":")[0] for line in plain_lines if line.startswith("Best")] == [
        "Best predicted throughput on 8 GPUs"
    ]
    assert [line.split(":")[0] for line in lines if line.startswith("Best")] == ["Best predicted cost"]
    assert plain_cost is None and cost > 0
    assert run(goal="throughput")[0] == plain, "throughput is always part of the answer"
    assert run(goal="time-to-accuracy")[0][-1].startswith("Best for time to accuracy: unknown")
