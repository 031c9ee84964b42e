"""Comparison of trainings: hand-made folders with known accuracies, lossless batches and noise scales."""

import json
import math
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.compare.accuracy import by_precision, goodput, rank_speed_ups, seed_difference
from analysis.figures.style import render
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load, load_reduced
from analysis.report.report import write_report
from analysis.report.sections import PLOTS, TABLES
from analysis.statistics import mean_interval, welch_difference
from analysis.study import analyse
from analysis.verdict.accuracy import at_report_epoch
from analysis.verdict.answer import answer
from analysis.verdict.card import card_of
from analysis.verdict.next_steps import best
from analysis.verdict.trust import trust
from tests.support.frames import cpu_law, grid, record, steps, write_results, write_study, write_trial
from tests.support.trainings import LARS, LINEAR, NOISE, NOTHING, TRAINING, WARMED, epochs, large_batch, write_training

FIGURES = ("accuracy_batch", "training_curves", "lr_schedules")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_batch(tmp_path_factory.mktemp("trainings") / "results")


@pytest.fixture(scope="module")
def known(folder: Path) -> ReportInputs:
    return with_models(analyse(load_reduced(folder)))


def trained_study(directory: Path, *trainings: tuple[dict[str, Any], list[float]], **columns: Any) -> ReportInputs:
    """Return a study of trainings with one accuracy per seed; every step takes 10 ms."""
    write_study(directory)
    for recipe, accuracies in trainings:
        for seed, top1 in enumerate(accuracies):
            fields = TRAINING | recipe | {"seed": seed, "repeat": seed}
            write_training(directory, fields, epochs(fields, top1, **columns))
    return with_models(analyse(load(directory)))


def test_mean_and_difference_have_student_and_welch_intervals() -> None:
    """Two seeds each; half-widths follow from t = 12.706 with 1 degree of freedom, and t = 4.303 with Welch's 2."""
    low, high = mean_interval(pd.Series([0.90, 0.92]))
    assert mean_interval(pd.Series([0.90, 0.92]), least=0, most=1) == (low, 1), "a share is at most 1"
    assert (low, high) == pytest.approx((0.91 - 12.706205 * 0.01, 0.91 + 12.706205 * 0.01))
    result = welch_difference(pd.Series([0.80, 0.82]), pd.Series([0.90, 0.92]))
    half = 4.302653 * math.sqrt(2e-4)
    assert result == pytest.approx((-0.10, -0.10 - half, -0.10 + half))
    assert welch_difference(pd.Series([1.0, 1.0]), pd.Series([2.0, 2.0])) == (-1.0, -1.0, -1.0)
    share_difference = welch_difference(pd.Series([0.1, 0.9]), pd.Series([0.0, 0.8]), 1.0)
    assert share_difference == (pytest.approx(0.1), -1, 1), "two shares differ by at most 1"
    assert welch_difference(pd.Series([1.0]), pd.Series([2.0, 2.0]))[0] == -1.0
    assert np.isnan(welch_difference(pd.Series([1.0]), pd.Series([2.0, 2.0]))[1:]).all()
    assert np.isnan(mean_interval(pd.Series([1.0]))).all()


def test_equal_seeds_are_pairs_only_if_nothing_but_the_layout_differs() -> None:
    """Differences of 0.01, 0.02 and 0.03 have a standard deviation of 0.01; t is 4.303 with 2 degrees of freedom."""
    reference = pd.Series([0.70, 0.80, 0.90], index=[0, 1, 2])
    values = pd.Series([0.93, 0.82, 0.71], index=[2, 1, 0])
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert seed_difference(values, reference, only_layout=True) == pytest.approx((0.02, 0.02 - half, 0.02 + half))
    unpaired = welch_difference(values, reference, 1.0)
    assert unpaired[2] - unpaired[1] > 10 * half
    assert seed_difference(values, reference, only_layout=False) == unpaired
    others = values.set_axis([0, 1, 3])
    assert seed_difference(others, reference, only_layout=True) == unpaired, "other seeds are no pairs"


def test_cells_match_hand_computed_values(tmp_path: Path) -> None:
    analysis = trained_study(
        tmp_path / "results", (NOTHING, [0.90, 0.92]), ({"batch_per_gpu": 256, "accumulation_steps": 2}, [0.80, 0.82])
    )
    assert analysis.accuracy is not None
    small, large = (row for _, row in analysis.accuracy.cells.iterrows())
    assert small["is_reference"]
    assert (small["made_of"], large["made_of"]) == ("1 × 128", "1 × 256 × 2 accumulated")
    assert (large["global_batch"], large["n"]) == (512, 2)
    half = 4.302653 * math.sqrt(2e-4)
    assert large[["top1", "top1_sd", "difference", "difference_low", "difference_high"]].tolist() == pytest.approx(
        [0.81, math.sqrt(2e-4), -0.10, -0.10 - half, -0.10 + half]
    )
    assert large["within_noise"] is False
    # 99 % of 0.91 is 0.9009: 0.92 reaches it in the last epoch, 0.90 does not
    assert analysis.accuracy.target == pytest.approx(0.9009)
    assert (small["reached"], small["runs"]) == (1, 2)
    assert np.isnan(small["time_to_target_s"]), "one run that reached it must not represent both"


def test_the_largest_lossless_batch_of_every_recipe_is_found(known: ReportInputs) -> None:
    assert known.accuracy is not None
    rows = known.accuracy.lossless_batches.set_index("recipe")
    lars = "square root + gradual warm-up + LARS"
    assert rows["lossless_batch"].to_dict() == {
        "no recipe": 512,
        "linear": 2048,
        "linear + gradual warm-up": 8192,
        lars: 32768,
    }
    assert rows["is_open"].to_dict() == {
        "no recipe": False,
        "linear": False,
        "linear + gradual warm-up": False,
        lars: True,
    }
    assert rows["failing_batch"].tolist()[:3] == [2048, 8192, 32768]
    assert rows["failing_difference"].tolist()[:3] == pytest.approx([-0.06] * 3, abs=0.003)


def test_the_interval_of_the_noise_scale_contains_the_true_value(known: ReportInputs) -> None:
    assert known.accuracy is not None
    row = known.accuracy.lossless_batches.iloc[0]
    assert row["critical_batch_low"] < 1500 < row["critical_batch_high"]
    assert row["critical_from"] == "batch 128 (1 × 64 × 2 accumulated), n = 5"


def test_the_noise_scale_averages_numerator_and_denominator_separately(tmp_path: Path) -> None:
    """Epochs with tr 10, 20, .. 60 and |G|^2 1, 1, 1, 1, 1, -1: 35 over 4/6."""
    columns = {"noise_trace": [10.0, 20, 30, 40, 50, 60], "noise_norm2": [1.0, 1, 1, 1, 1, -1]}
    analysis = trained_study(tmp_path / "results", (NOISE, [0.9]), **columns)
    assert analysis.accuracy is not None
    [cell] = (row for _, row in analysis.accuracy.cells.iterrows())
    result = cell[["noise_batch", "noise_batch_first", "noise_batch_last"]].tolist()
    assert result[:2] == pytest.approx([35 / (4 / 6), 15.0])
    assert np.isnan(result[2]), "the mean of |G|^2 of the last two epochs is 0"
    assert cell["noise_epochs_last"] == "5 to 6"
    assert np.isinf(cell["noise_batch_high"]) or cell["noise_batch_high"] > 2 * cell["noise_batch"]


def test_goodput_is_throughput_times_pollux_efficiency(tmp_path: Path) -> None:
    """phi 1000, M0 128: a sample at batch 2048 contributes 1128 / 3048 of one at 128; a step takes 10 ms."""
    analysis = trained_study(
        tmp_path / "results", (NOISE, [0.9, 0.9]), (NOTHING, [0.9, 0.9]), ({"batch_per_gpu": 2048}, [0.9, 0.9]),
        noise_trace=1000.0, noise_norm2=1.0,
    )  # fmt: skip
    assert analysis.accuracy is not None
    rows = goodput(analysis.accuracy.cells, analysis.accuracy.plain).set_index("global_batch")
    assert rows["efficiency"].to_dict() == pytest.approx({128: 1.0, 2048: 1128 / 3048})
    throughput = 60_000 / (30 * 0.01)  # an epoch is 30 steps
    assert rows.loc[2048, "goodput_samples_per_s"] == pytest.approx(throughput * 1128 / 3048)
    assert rows["is_best"].to_dict() == {128: False, 2048: True}


def test_the_interval_of_goodput_includes_that_of_throughput(tmp_path: Path) -> None:
    """Equal noise scales have an interval of zero width, which leaves that of the throughput."""
    analysis = trained_study(tmp_path / "results", (NOISE, [0.9, 0.9]), noise_trace=1000.0, noise_norm2=1.0)
    assert analysis.accuracy is not None
    cells = analysis.accuracy.cells.assign(
        throughput_samples_per_s=200.0, throughput_samples_per_s_low=180.0, throughput_samples_per_s_high=220.0
    )
    row = goodput(cells, analysis.accuracy.plain).iloc[0]
    result = row[["goodput_samples_per_s_low", "goodput_samples_per_s", "goodput_samples_per_s_high"]].tolist()
    assert result == pytest.approx([180.0, 200.0, 220.0])


def test_recipes_are_named_by_the_fields_that_differ(tmp_path: Path) -> None:
    large = {"batch_per_gpu": 1024}
    regularised = {"decay_norm_and_bias": False, "label_smoothing": 0.1}
    runs = [NOTHING, large, large | LINEAR, large | WARMED, large | WARMED | {"warmup": "constant"}, large | LARS]
    analysis = trained_study(tmp_path / "results", *((run, [0.9]) for run in [*runs, large | WARMED | regularised]))
    assert analysis.accuracy is not None
    assert list(dict.fromkeys(analysis.accuracy.cells.sort_values("recipe_number", kind="stable")["recipe"])) == [
        "no recipe",
        "linear",
        "linear + constant warm-up",
        "linear + gradual warm-up",
        "square root + gradual warm-up + LARS",
        "linear + gradual warm-up + no decay of norms and biases + label smoothing 0.1",
    ]


def test_recipes_with_a_rule_share_the_plain_runs_at_the_reference_batch(tmp_path: Path) -> None:
    analysis = trained_study(
        tmp_path / "results",
        (NOTHING, [0.90, 0.92]),
        (LINEAR, [0.90, 0.92]),
        (LINEAR | {"batch_per_gpu": 512}, [0.9, 0.92]),
    )
    assert analysis.accuracy is not None
    rows = analysis.accuracy.cells
    assert rows[["recipe", "global_batch", "n", "is_reference"]].to_numpy().tolist() == [
        ["no recipe", 128, 2, True],
        ["linear", 128, 2, True],
        ["linear", 512, 2, False],
    ]


def test_with_one_seed_the_largest_lossless_batch_is_unknown(tmp_path: Path) -> None:
    analysis = trained_study(tmp_path / "results", (NOTHING, [0.9]), ({"batch_per_gpu": 512}, [0.5]))
    assert TABLES["lossless_batch"](analysis).cells()["largest lossless batch"].tolist() == ["unknown: too few seeds"]
    assert TABLES["accuracy"](analysis).cells()["compared with reference"].tolist() == [
        "reference",
        "unknown: too few seeds",
    ]
    assert any(line.startswith("Too few seeds") for line in answer(analysis))


def test_the_report_epoch_is_compared_with_the_largest_batch_per_rank_on_all_ranks(tmp_path: Path) -> None:
    """Epoch 5 of 6 is 0.05 below the last; training accuracy is 0.02 higher, the loss 2 (1 - accuracy)."""
    largest = {"world_size": 2, "batch_per_gpu": 512}
    analysis = trained_study(
        tmp_path / "results", (NOTHING, [0.90, 0.92]), ({"batch_per_gpu": 512}, [0.7, 0.7]), (largest, [0.80, 0.82]),
        (largest | WARMED, [0.88, 0.90]), (largest | LARS, [0.86, 0.88]),
    )  # fmt: skip
    assert TABLES["report_epoch"](analysis).frame.empty, "the study selects no epoch"
    study = analysis.results.study | {"configuration": {"report_epoch": 5}}
    analysis = replace(analysis, results=replace(analysis.results, study=study))
    table = TABLES["report_epoch"](analysis)
    cells = table.cells()
    assert table.title.startswith("Epoch 5: ") and "all GPUs" in table.title
    assert cells[["recipe", "global batch", "composition", "n"]].to_numpy().tolist() == [
        ["no recipe", "128", "1 × 128", "2"],
        ["no recipe", "1,024", "2 × 512", "2"],
        ["linear + gradual warm-up", "1,024", "2 × 512", "2"],
        ["square root + gradual warm-up + LARS", "1,024", "2 × 512", "2"],
    ]
    frame = table.frame
    assert frame["epoch_loss"].tolist() == pytest.approx([0.28, 0.48, 0.32, 0.36])
    assert frame["epoch_top1"].tolist() == pytest.approx([0.88, 0.78, 0.86, 0.84])
    assert frame["epoch_top1_difference"].tolist()[1:] == pytest.approx([-0.10, -0.02, -0.04])
    assert np.isnan(frame["epoch_top1_difference"].iloc[0])
    assert analysis.accuracy is not None and at_report_epoch(analysis.accuracy, None) is None
    assert at_report_epoch(analysis.accuracy, 7) is None, "no training came so far"
    text = at_report_epoch(analysis.accuracy, 5)
    assert text is not None and text.startswith("In epoch 5")
    for part in (
        "0.280 and 88.0\u00a0% with plain training at batch 128",
        "0.480 and 78.0\u00a0% with plain training at batch 1,024",
        "0.320 and 86.0\u00a0% with linear + gradual warm-up at batch 1,024",
        "0.360 and 84.0\u00a0% with square root + gradual warm-up + LARS at batch 1,024",
    ):
        assert part in text
    line = card_of(analysis).line("report_epoch")
    assert line is not None and line.label == "epoch 5"
    losses = [quantity.value for quantity in line.quantities if quantity.name == "training_loss"]
    assert losses == pytest.approx([0.28, 0.48, 0.32, 0.36])


def test_time_to_a_given_target_counts_complete_epochs_and_cost(tmp_path: Path) -> None:
    """0.75 is reached after epoch 3 of 6 (0.90 - 0.15); 469 steps of 10 ms per epoch, on one GPU at 3 per hour."""
    directory = tmp_path / "results"
    write_study(directory, configuration={"price-per-gpu-hour": 3.0})
    fields = TRAINING | {"target_accuracy": 0.75}
    write_training(directory, fields, epochs(fields, 0.90))
    table = TABLES["time_to_target"](with_models(analyse(load(directory))))
    assert "75.00\u00a0%" in table.note and "after the fact" not in table.note
    row = table.frame.iloc[0]
    assert row[["steps_to_target", "samples_to_target", "time_to_target_s"]].tolist() == pytest.approx(
        [1407, 180_000, 14.07]
    )
    assert row["hours_to_target"] == pytest.approx(14.07 / 3600)
    assert row["money_to_target"] == pytest.approx(3 * 14.07 / 3600)


def test_the_answer_says_where_accuracy_fails_and_what_mends_it(known: ReportInputs) -> None:
    said = answer(known)
    assert len(said) == 6
    assert "global batch 128 reaches a held-out accuracy of 9" in said[0]
    assert "up to batch 512 and drops by 6.0" in said[1]
    assert said[1].endswith("at 2,048.")
    assert "square root + gradual warm-up + LARS (at least 32,768; " in said[2]
    assert said[2].endswith("points lower), linear + gradual warm-up (8,192) and linear (2,048).")
    assert "noise scale estimates" in said[3]
    assert "linear + gradual warm-up at batch 8,192: 1.0" in said[4]
    assert "goodput is highest with linear at batch 2,048: " in said[5]
    assert any(line.startswith("Up to 4 trainings ran concurrently") for line in trust(known))


def test_the_best_for_time_to_accuracy_is_the_one_that_reaches_it_soonest(known: ReportInputs) -> None:
    text = best(known, "time-to-accuracy")
    assert text.startswith("Best for time to accuracy: ") and "reach 91.1\u00a0% is linear + grad" in text
    assert best(known, "throughput").startswith("Best for throughput: unknown")


def test_trainings_are_excluded_from_timing_tables(tmp_path: Path) -> None:
    timed = grid({}, world_size=[1, 2], repeat=range(2))
    timed_only = with_models(analyse(load(write_results(tmp_path / "alone", timed, cpu_law))))
    mixed = write_results(tmp_path / "mixed", timed, cpu_law)
    fields = TRAINING | {"device": "cpu"}
    write_training(mixed, fields, epochs(fields, 0.9))
    both = with_models(analyse(load(mixed)))
    assert both.axes == timed_only.axes
    names = ("throughput", "weak_scaling", "phases")
    for name in names:
        pd.testing.assert_frame_equal(TABLES[name](both).cells(), TABLES[name](timed_only).cells())
    assert len(TABLES["accuracy"](both).frame) == 1
    assert not len(TABLES["accuracy"](timed_only).frame)
    assert [PLOTS[name](timed_only) for name in FIGURES] == [None] * 3


@pytest.mark.usefixtures("no_figures")
def test_the_report_of_a_training_study_has_no_empty_timing_tables(folder: Path, known: ReportInputs) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in FIGURES:
            figure = PLOTS[name](known)
            assert figure is not None
            render(figure)
    report = write_report(folder)
    page, found = Path(report.path).read_text(), report.summary
    written = {path.stem for path in (folder / "report" / "tables").glob("*.csv")}
    assert {"accuracy", "lossless_batch", "time_to_target", "goodput", "trials"} <= written
    assert not {"report_epoch", "throughput", "phases", "weak_scaling"} & written
    assert "No trial is done yet" not in page
    assert found.columns[:4] == ["recipe", "global batch", "composition", "accuracy (%)"]
    assert len(found.rows) == 21


def test_a_single_batch_has_no_largest_lossless_batch(tmp_path: Path) -> None:
    found = trained_study(tmp_path / "results", (NOTHING, [0.90, 0.91]))
    assert found.accuracy is not None
    assert found.accuracy.lossless_batches.empty
    said = " ".join(answer(found))
    assert "90.5\u00a0%" in said
    assert "Without a recipe" not in said
    assert "critical batch" not in said


def test_a_study_of_one_recipe_names_it_as_what_its_batches_were_trained_with(tmp_path: Path) -> None:
    on_large = LINEAR | {"batch_per_gpu": 2048}
    found = trained_study(
        tmp_path / "results", (LINEAR | {"batch_per_gpu": 512}, [0.90, 0.91, 0.90]), (on_large, [0.70, 0.71, 0.70])
    )
    card = card_of(found)
    said = " ".join([*answer(found), *(line.text for line in card.lines)])
    assert "with linear" in said
    assert "ithout a recipe" not in said and "Plain training" not in said


@pytest.mark.usefixtures("no_figures")
def test_the_same_batch_on_more_ranks_is_compared_by_time(tmp_path: Path) -> None:
    in_order = {"order": "in_order"}
    on_two = in_order | {"world_size": 2, "batch_per_gpu": 64}
    found = trained_study(tmp_path / "results", (in_order, [0.90, 0.91]), (on_two, [0.90, 0.91]))
    said = " ".join(answer(found))
    assert "is plain training at batch 128 (1 × 128)" in said
    assert "runner-up: plain training at batch 128 (2 × 64)" in said
    card = card_of(found)
    target, scales = card.line("time_to_target"), card.line("scales")
    assert target is not None and target.text.endswith("(1 × 128)")
    assert scales is not None and scales.quantities[0].value == pytest.approx(1.0)
    assert found.accuracy is not None
    (row,) = rank_speed_ups(found.accuracy).to_dict("records")
    assert (row["global_batch"], row["world_size"], row["baseline"]) == (128, 2, 1)
    assert row["speed_up"] == pytest.approx(1.0), "each step takes 10 ms"
    write_report(tmp_path / "results")
    assert "- order: in_order" in (tmp_path / "results/report/report.md").read_text(), "a field of every trial"


def test_an_epochs_file_without_accuracy_is_left_out_with_its_path(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    trial_folder = write_trial(directory, record(TRAINING), steps(TRAINING, 0.1))
    epochs(TRAINING, 0.9).drop(columns="validation_top1").to_parquet(trial_folder / "epochs.parquet")
    results = load(directory)
    assert results.trials.empty
    assert results.damaged == (
        f"{trial_folder}/epochs.parquet: missing columns validation_top1; "
        "remove that trial's folder and run the study again",
    )


def test_wide_intervals_are_clipped_to_possible_accuracies(tmp_path: Path) -> None:
    result = trained_study(tmp_path, (NOTHING, [0.90, 0.91]), (NOTHING | {"batch_per_gpu": 4096}, [0.10, 0.90]))
    assert result.accuracy is not None
    [wide] = result.accuracy.cells.query("global_batch == 4096").to_dict("records")
    assert (wide["top1_low"], wide["top1_high"]) == (0, 1)
    assert wide["difference_low"] == -1, "two accuracies differ by at most 100 points"


def test_number_formats_at_one_batch_are_compared_with_fp32_in_points(tmp_path: Path) -> None:
    """Means 0.80, 0.79 and 0.60, each with a variance of 2e-4; Welch's t is 4.303 with 2 degrees of freedom."""
    tops = {"bf16": [0.78, 0.80], "fp32": [0.79, 0.81], "fp16_pure": [0.59, 0.61]}
    result = trained_study(tmp_path / "results", *(({"precision": name}, values) for name, values in tops.items()))
    assert result.accuracy is not None and result.accuracy.plain == "fp32"
    assert 100 * 4.302653 * math.sqrt(2e-4) == pytest.approx(6.08, abs=0.005)
    said = " ".join(answer(result))
    assert "bf16 reaches 1.00 points less (difference [-7.08, 5.08], not significantly" in said
    assert "fp16_pure reaches 20.00 points less (difference [-26.08, -13.92], significantly" in said
    assert not {"nothing", "recipe"} & set(" ".join(answer(result)).split())
    line = card_of(result).line("accuracy")
    assert line is not None and line.text.endswith("(in fp32)")
    reached = by_precision(result.accuracy)
    assert reached["top1"].to_dict() == pytest.approx({"fp32": 0.80, "bf16": 0.79, "fp16_pure": 0.60})
    assert reached["trained"].unique().tolist() == [
        "resnet18_small on fashion_mnist_sample, 6 epochs at global batch 128"
    ]


def test_trainings_that_differ_in_more_than_number_format_are_not_compared_by_it(tmp_path: Path) -> None:
    kinds = ({"precision": "fp32"}, {"precision": "bf16"}, {"precision": "bf16", "learning_rate": 0.5})
    result = trained_study(tmp_path / "results", *((fields, [0.8, 0.8]) for fields in kinds))
    assert by_precision(result.accuracy).empty and by_precision(None).empty


NEWER = (
    "lr_rule", "warmup", "warmup_epochs", "reference_batch", "learning_rate", "optimizer", "precision", "repeat",
    "accumulation_steps",
)  # fmt: skip


def lacking_study(directory: Path, lacking: Collection[str], everywhere: bool) -> Path:
    """Write four trainings, of which all or half do not record these fields."""
    write_study(directory)
    for seed in range(2):
        for batch in (128, 256):
            fields = TRAINING | {"batch_per_gpu": batch, "seed": seed, "repeat": seed}
            if everywhere or seed:
                fields = {name: value for name, value in fields.items() if name not in lacking}
            frame = epochs(TRAINING | {"batch_per_gpu": batch}, 0.9)
            write_training(directory, TRAINING | fields, frame)
            path = next(path for path in directory.rglob("trial.json") if is_of(path, seed, batch))
            path.write_text(json.dumps(json.loads(path.read_text()) | {"trial": fields}))
    return directory


@pytest.mark.parametrize("lacking", [*((name,) for name in NEWER), NEWER])
@pytest.mark.parametrize("everywhere", [True, False])
def test_trainings_whose_records_lack_a_field_are_compared(
    tmp_path: Path, lacking: Collection[str], everywhere: bool
) -> None:
    known = with_models(analyse(load(lacking_study(tmp_path, lacking, everywhere))))
    assert known.accuracy is not None
    assert known.accuracy.runs["global_batch"].tolist().count(128) == 2
    assert not known.accuracy.cells["recipe"].str.contains("nan").any()
    if everywhere:
        assert [table.title for make in TABLES.values() if len((table := make(known)).frame)]
        assert answer(known)


@pytest.mark.parametrize("everywhere", [True, False])
def test_trainings_whose_records_lack_all_newer_fields_are_reported(tmp_path: Path, everywhere: bool) -> None:
    write_report(lacking_study(tmp_path, NEWER, everywhere))
    assert (tmp_path / "report/index.html").exists()


def is_of(path: Path, seed: int, batch: int) -> bool:
    trial = json.loads(path.read_text())["trial"]
    return (trial["seed"], trial["batch_per_gpu"]) == (seed, batch)
