"""Comparison of two results folders: matching configurations, intervals of ratios, and exit codes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.compare.folders import compare
from analysis.predict.inputs import report_inputs
from analysis.read.results import COUNTABLE, UNCOUNTED, ResultsError, load
from analysis.verdict.card import NOTHING, card_of
from study.cli.compare import share
from study.errors import DOES_NOT_FIT, DONE, SOME_FAILED, USAGE, ConfigurationError
from study.scaling import main
from tests.support.cards import script
from tests.support.frames import FIELDS, environment, grid, record, steps, write_study, write_trial
from tests.support.trainings import TRAINING, epochs, write_training

Law = Callable[[dict[str, Any]], float]


def folder(directory: Path, trials: list[dict[str, Any]], step_s: Law, gpu: str = "NVIDIA H200") -> Path:
    """Write done trials whose repeats deviate by known factors."""
    write_study(directory)
    for fields in trials:
        repeat_step_s = step_s(fields) * (1.0, 1.01, 0.99, 1.005, 0.995)[fields["repeat"] % 5]
        write_trial(directory, record(fields, environment=environment(fields, gpu)), steps(fields, repeat_step_s))
    return directory


def without(directory: Path, field: str) -> Path:
    """Remove a field from all trials, as in results recorded before it existed."""
    for path in directory.glob("trials/*/trial.json"):
        content = json.loads(path.read_text())
        del content["trial"][field]
        path.write_text(json.dumps(content))
    return directory


def trials(sizes: list[int], batches: list[int], repeats: int = 3, **more: Any) -> list[dict[str, Any]]:
    return grid({"device": "cuda", "steps": 4} | more, world_size=sizes, batch_per_gpu=batches, repeat=range(repeats))


def by_batch(slow_batch: int, factor: float) -> Law:
    return lambda fields: 0.1 * (factor if fields["batch_per_gpu"] == slow_batch else 1.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Batch 64 becomes 10 % slower, 32 does not; 16 is only in the first folder, 8 GPUs only in the second."""
    directory = tmp_path_factory.mktemp("pair")
    before = folder(directory / "a", trials([1, 2], [16, 32, 64]), by_batch(64, 1.0))
    after = folder(directory / "b", trials([1, 2, 8], [32, 64]), by_batch(64, 1.1))
    return before, after


def test_the_largest_loss_comes_first_and_unmatched_configurations_are_listed(pair: tuple[Path, Path]) -> None:
    comparison = compare(*pair)
    assert comparison.rows["label"].tolist()[2:] == ["1 GPU, batch 32 per GPU", "2 GPUs, batch 32 per GPU"]
    assert set(comparison.rows["label"][:2]) == {"1 GPU, batch 64 per GPU", "2 GPUs, batch 64 per GPU"}
    assert comparison.rows["verdict"].tolist() == ["slower", "slower", "not significant", "not significant"]
    assert comparison.rows["throughput_samples_per_s_ratio"].tolist() == pytest.approx([1 / 1.1, 1 / 1.1, 1, 1])
    assert comparison.only_a == ("1 GPU, batch 16 per GPU", "2 GPUs, batch 16 per GPU")
    assert comparison.only_b == ("8 GPUs, batch 32 per GPU", "8 GPUs, batch 64 per GPU")
    assert (comparison.assumed, comparison.environments, comparison.left_out) == ((), (), ())


@pytest.mark.parametrize("own, common", [({}, 2), ({"workload": "own.py:build"}, 0)])
def test_only_own_code_reads_a_length_of_texts_that_its_model_does_not(
    tmp_path: Path, own: dict[str, Any], common: int
) -> None:
    before, after = (
        folder(tmp_path / side, trials([1, 2], [32], model="resnet50", sequence_length=length, **own), lambda _: 0.1)
        for side, length in (("a", 128), ("b", 256))
    )
    if common:
        assert len(compare(before, after).rows) == common
    else:
        with pytest.raises(ResultsError, match="sequence_length is 128 in the first and 256 in the second"):
            compare(before, after)


def test_a_ratio_of_two_folders_has_the_welch_interval_if_only_groups_differ(pair: tuple[Path, Path]) -> None:
    row = compare(*pair).rows.iloc[0]
    logs = np.log([1.0, 1.01, 0.99])
    expected = stats.ttest_ind(-logs - math.log(1.1), -logs, equal_var=False).confidence_interval(0.95)
    interval = (row["throughput_samples_per_s_low"], row["throughput_samples_per_s_high"])
    assert interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    for name in ("step_s", "forward_s", "backward_s", "optimizer_s"):
        assert row[f"{name}_ratio"] == pytest.approx(1.1)
        assert row[f"{name}_low"] > 1


def test_a_regression_requires_the_complete_interval_beyond_the_threshold(pair: tuple[Path, Path]) -> None:
    comparison = compare(*pair)  # loss of 9.1 %, interval of 1 to 2 % on each side
    assert len(comparison.regressions(0.05)) == 2
    assert len(comparison.regressions(0.085)) == 0
    assert len(comparison.regressions(0.0)) == 2


def test_a_single_repeat_has_no_interval_and_no_regression(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32], repeats=1), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32], repeats=3), lambda fields: 0.2)
    comparison = compare(before, after)
    assert comparison.rows["verdict"].tolist() == ["no interval"]
    assert comparison.rows["throughput_samples_per_s_ratio"].tolist() == pytest.approx([0.5], rel=1e-4)
    assert comparison.regressions(0.05).empty


def test_a_field_missing_in_one_folder_takes_its_default(tmp_path: Path) -> None:
    before = without(folder(tmp_path / "a", trials([1], [32]), lambda fields: 0.1), "accumulation_steps")
    newer = [
        t | {"accumulation_steps": k, "learning_rate": 0.01 * k, "repeat": r}
        for k in (1, 2)
        for r in range(3)
        for t in trials([1], [32], repeats=1)
    ]
    write_study(tmp_path / "b")
    for fields in newer:
        name = f"k{fields['accumulation_steps']}-{fields['repeat']}"
        write_trial(tmp_path / "b", record(fields, trial_id=name), steps(fields, 0.1 + 0.001 * fields["repeat"]))
    comparison = compare(before, tmp_path / "b")
    [assumption] = comparison.assumed
    assert assumption.startswith("A ") and "accumulation_steps" in assumption and assumption.endswith(" 1.")
    assert len(comparison.rows) == 1
    assert len(comparison.only_b) == 1
    assert "accumulation steps 2" in comparison.only_b[0]


def test_a_field_without_a_default_that_only_one_folder_has_is_refused(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32]), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32], of_tomorrow=1), lambda fields: 0.1)
    for one, other in ((before, after), (after, before)):
        with pytest.raises(ResultsError, match=rf"{before} lacks the fields of_tomorrow, which {after} has"):
            compare(one, other)


def test_other_machines_are_listed_and_compared(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32], cpus_per_rank=8), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32], cpus_per_rank=4), lambda fields: 0.05, gpu="NVIDIA B200")
    comparison = compare(before, after)
    assert comparison.environments == (
        ("device", "NVIDIA H200", "NVIDIA B200"),
        ("cpus_per_rank", "8", "4"),
    )
    assert comparison.rows["verdict"].tolist() == ["faster"]


def test_trials_under_different_environments_are_not_mixed(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32], repeats=4), lambda fields: 0.1)
    fields = FIELDS | trials([1], [32], repeats=5)[-1]
    odd = record(fields, environment=environment(fields, "NVIDIA B200"))
    write_trial(before, odd, steps(fields, 0.01))
    comparison = compare(before, before)
    assert comparison.rows["n_a"].tolist() == [4]
    assert comparison.left_out[0].startswith(f"{before}: 1 trial")


def test_folders_without_common_configuration_report_the_differing_fields(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32, 64]), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [128]), lambda fields: 0.1)
    with pytest.raises(ResultsError) as caught:
        compare(before, after)
    message = str(caught.value)
    assert message.startswith(f"{before} and {after} have no configuration in common: ")
    assert "batch_per_gpu is 32, 64" in message
    assert "128" in message


def test_a_folder_without_a_done_trial_is_an_error(tmp_path: Path) -> None:
    empty = write_study(tmp_path / "a")
    with pytest.raises(ResultsError) as caught:
        compare(empty, empty)
    assert str(caught.value) == f"{empty}: nothing to compare: no trial is done; run the study first"


def test_a_folder_of_a_script_whose_samples_are_unknown_is_an_error_with_the_fix(tmp_path: Path) -> None:
    directory = script(tmp_path)
    for path in directory.glob("trials/*/steps.parquet"):
        frame = pd.read_parquet(path)
        frame.assign(samples=pd.array([None] * len(frame), dtype="Int64")).to_parquet(path)
    card = card_of(report_inputs(load(directory))[0])
    assert (card.form, card.lines[0].text, card.lines[1].text) == (NOTHING, UNCOUNTED, COUNTABLE)
    with pytest.raises(ResultsError, match=f"nothing to compare: {UNCOUNTED}; fix: "):
        compare(directory, directory)


def test_a_folder_of_trainings_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_study(tmp_path / "a")
    write_training(directory, TRAINING, epochs(TRAINING, 0.9))
    assert main(["compare", str(directory), str(directory)]) == USAGE
    assert main(["predict", str(directory), "--gpus", "8"]) == USAGE
    compare_error, predict_error = capsys.readouterr().err.splitlines()
    assert compare_error.startswith(f"error: {directory}: nothing to compare: ")
    assert predict_error.startswith(f"error: {directory}: nothing to predict from: ")
    assert compare_error.split(": ", 3)[3] == predict_error.split(": ", 3)[3]
    assert "training" in compare_error


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0%", 0.0), (" 2.5 % ", 0.025), ("99.9%", 0.999)])
def test_a_percentage_is_read(text: str, value: float) -> None:
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["5", "0.05", "five", "-1%", "100%", "", "%", "1e2%", "nan%", "٥%"])
def test_invalid_percentages_are_rejected(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        share(text)
    assert str(caught.value) == (
        f"--fail-above: {text!r} is not a percentage; allowed: from 0% to below 100%, such as 5%"
    )


def test_the_command_fails_only_if_a_regression_is_significant(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = map(str, pair)
    assert main(["compare", before, after]) == DONE
    assert main(["compare", before, after, "--fail-above", "5%"]) == SOME_FAILED
    assert main(["compare", after, before, "--fail-above", "5%"]) == DOES_NOT_FIT, "8 GPUs are missing"
    assert main(["compare", after, before, "--fail-above", "5%", "--allow-missing"]) == DONE
    capsys.readouterr()
    assert main(["compare", before, after, "--fail-above", "5"]) == USAGE
    assert capsys.readouterr().err.startswith("error: --fail-above: '5' is not a percentage")
    assert main(["compare", before, "/nowhere"]) == USAGE
    assert capsys.readouterr().err.startswith("error: /nowhere does not exist; ")


def test_without_intervals_the_command_neither_passes_nor_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = folder(tmp_path / "once", trials([1], [32, 64], repeats=1), by_batch(64, 1.0))
    slow = folder(tmp_path / "slow", trials([1], [32, 64]), lambda fields: 0.2)
    assert main(["compare", str(once), str(slow), "--fail-above", "5%"]) == DOES_NOT_FIT
    out = " ".join(capsys.readouterr().out.split())
    assert "no interval for 2 of 2 configurations" in out
    assert "run both with --repeats 3 or more" in out
    assert "throughput loss above" not in out
    assert main(["compare", str(once), str(slow)]) == DONE
    capsys.readouterr()
    assert main(["compare", str(once), str(slow), "--fail-above", "5%", "--json"]) == DOES_NOT_FIT
    assert json.loads(capsys.readouterr().out)["judged"] == 0


def test_rows_without_interval_are_counted_and_the_others_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [*trials([1], [32]), *trials([1], [64, 128], repeats=1)]
    before = folder(tmp_path / "a", mixed, lambda fields: 0.1)
    after = folder(tmp_path / "b", mixed, lambda fields: 0.2)
    assert main(["compare", str(before), str(before), "--fail-above", "5%"]) == DONE
    assert "no interval for 2 of 3 configurations" in capsys.readouterr().out
    assert main(["compare", str(before), str(after), "--fail-above", "5%"]) == SOME_FAILED
    assert "(entire 95 % interval): 1 of 1" in capsys.readouterr().out


def test_the_terminal_answers_in_one_line_and_fits_in_80_columns(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", *map(str, pair)]) == DONE
    answer, a, b, _, *lines = capsys.readouterr().out.splitlines()
    assert answer == "B is slower in 2 of 4 configurations; the others do not differ significantly."
    assert (a, b) == (f"A: {pair[0]}", f"B: {pair[1]}")
    assert max(map(len, lines)) <= 80 and all(line == line.rstrip() for line in lines)
    assert not any("backward" in line for line in lines)
    assert main(["compare", *map(str, pair), "--fail-above", "5%", "--table"]) == SOME_FAILED
    answer, a, b, _, *lines = capsys.readouterr().out.splitlines()
    assert answer == "Regression: 2 of 4 configurations lost more than 5.0\u00a0% of throughput."
    assert max(map(len, lines)) <= 80 and all(line == line.rstrip() for line in lines)
    out = "\n".join(lines)
    assert "0.909 [0.889, 0.930]" in out
    assert "backward" in out
    assert "only in A: 1 GPU, batch 16 per GPU; 2 GPUs, batch 16 per GPU" in out
    assert "4 configurations: 2 slower, 2 not significant" in out
    assert "throughput loss above 5.0\u00a0% (entire 95 % interval): 2 of 4" in out


def test_json_is_complete_and_uses_null_for_unknown_values(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, pair), "--json", "--fail-above", "5%"]) == SOME_FAILED
    output = json.loads(capsys.readouterr().out)
    first = output["configurations"][0]
    assert (output["regressions"], output["fail_above"], first["beyond_threshold"]) == (2, 0.05, True)
    assert first["throughput_samples_per_s"]["ratio"] == pytest.approx(1 / 1.1)
    assert first["fields"]["batch_per_gpu"] == 64
    assert len(first["throughput_samples_per_s"]["interval"]) == 2
    assert output["only_b"] == ["8 GPUs, batch 32 per GPU", "8 GPUs, batch 64 per GPU"]


def broken(directory: Path, batch: int, status: str = "failed", reason: str = "CUDA error: boom") -> Path:
    """Turn all trials of one batch into trials without a result."""
    for path in directory.glob("trials/*/trial.json"):
        content = json.loads(path.read_text())
        if content["trial"]["batch_per_gpu"] == batch:
            path.write_text(json.dumps(content | {"status": status, "reason": reason}))
            (path.parent / "steps.parquet").unlink()
    return directory


def test_a_configuration_that_fails_in_b_only_is_a_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = {64: "failed", 128: "timeout", 256: "out_of_memory"}
    before = folder(tmp_path / "a", trials([1], [32, *statuses]), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32, *statuses]), lambda fields: 0.1)
    for batch, status in statuses.items():
        broken(after, batch, status)
    failures = compare(before, after).failed
    assert {(failure.label, failure.status, failure.reason, failure.trials) for failure in failures} == {
        (f"batch {batch} per GPU", status, "CUDA error: boom", 3) for batch, status in statuses.items()
    }
    assert compare(before, after).only_a == ()
    arguments = ["compare", str(before), str(after)]
    assert main(arguments) == DONE
    assert main([*arguments, "--fail-above", "5%", "--allow-missing"]) == SOME_FAILED
    out = " ".join(capsys.readouterr().out.split()).partition("failed in B, done in A: ")[2]
    assert all(f"batch {batch} per GPU: " in out for batch in statuses)
    assert main([*arguments, "--fail-above", "5%", "--json"]) == SOME_FAILED
    assert json.loads(capsys.readouterr().out)["failed"][0]["reason"] == "CUDA error: boom"
    assert compare(after, before).failed == (), "it failed in A"


def test_a_folder_in_which_everything_failed_is_a_regression(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32]), lambda fields: 0.1)
    after = broken(folder(tmp_path / "b", trials([1], [32]), lambda fields: 0.1), 32)
    assert main(["compare", str(before), str(after), "--fail-above", "5%"]) == SOME_FAILED
    assert main(["compare", str(after), str(before), "--fail-above", "5%"]) == USAGE, "nothing is done in A"


def test_one_failed_repeat_counts_unless_it_failed_in_a_too(tmp_path: Path) -> None:
    def one_failed(directory: Path) -> Path:
        made = folder(directory, trials([1], [32], repeats=4), lambda fields: 0.1)
        path = next(iter(sorted(made.glob("trials/*/trial.json"))))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed", "reason": "boom"}))
        return made

    stable = folder(tmp_path / "stable", trials([1], [32], repeats=4), lambda fields: 0.1)
    first, second = one_failed(tmp_path / "a"), one_failed(tmp_path / "b")
    assert [failure.trials for failure in compare(stable, first).failed] == [1]
    assert compare(first, second).failed == ()


def test_a_configuration_missing_in_b_is_not_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = folder(tmp_path / "a", trials([1], [32, 64]), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32]), lambda fields: 0.1)
    arguments = ["compare", str(before), str(after), "--fail-above", "5%"]
    assert main(arguments) == DOES_NOT_FIT
    assert "only in A: batch 64 per GPU" in capsys.readouterr().out
    assert main([*arguments, "--allow-missing"]) == DONE


def noisy(directory: Path, step_s: float, spread: float) -> Path:
    """Write one configuration with three repeats."""
    write_study(directory)
    for fields, deviation in zip(trials([1], [32]), (-spread, 0.0, spread), strict=True):
        write_trial(directory, record(fields), steps(fields, step_s * math.exp(deviation)))
    return directory


def test_an_interval_on_both_sides_of_the_threshold_cannot_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = noisy(tmp_path / "a", 0.1, 0.08), noisy(tmp_path / "b", 0.1, 0.08)
    comparison = compare(before, after)
    row = comparison.rows.iloc[0]
    judged = comparison.judgements(0.05).iloc[0]
    assert (judged["judgement"], judged["is_suspected"]) == ("cannot be judged", False)
    half = math.log(row["throughput_samples_per_s_high"] / row["throughput_samples_per_s_low"]) / 2
    assert judged["detectable"] == pytest.approx(1 - 0.95 * math.exp(-half))
    assert main(["compare", str(before), str(after), "--fail-above", "5%"]) == DOES_NOT_FIT
    loss = f"{100 * judged['detectable']:.0f}\u00a0%"
    assert f"cannot be judged: all trials (would detect a loss of {loss} or more)" in capsys.readouterr().out
    assert comparison.judgements(0.5)["judgement"].tolist() == ["no regression"]
    assert main(["compare", str(before), str(after), "--fail-above", "50%"]) == DONE


def test_a_suspected_loss_among_judged_configurations_does_not_pass(tmp_path: Path) -> None:
    """Half the throughput, hidden by noise, beside a configuration that is unchanged."""
    fields = trials([1], [8, 16, 32]) + trials([1], [64], repeats=1)
    before, after = (folder(tmp_path / name, fields, by_batch(64, factor)) for name, factor in (("a", 1.0), ("b", 2.0)))
    assert compare(before, after).judgements(0.05)["is_suspected"].sum() == 1
    assert main(["compare", str(before), str(after), "--fail-above", "5%"]) == DOES_NOT_FIT
    assert main(["compare", str(before), str(before), "--fail-above", "5%"]) == DONE


def test_a_ratio_beyond_a_factor_of_2_is_printed_as_not_resolved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = noisy(tmp_path / "a", 0.1, 0.5), noisy(tmp_path / "b", 0.2, 0.5)
    assert main(["compare", str(before), str(after), "--format", "markdown"]) == DONE
    out = capsys.readouterr().out
    assert "not resolved (needs about" in out
    assert "0.5" not in out


def test_markdown_has_a_row_per_configuration(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, pair), "--fail-above", "5%", "--format", "markdown"]) == SOME_FAILED
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4
    assert r"| 0.909 \[0.889, 0.930\] | slower |" in out
    assert all(line.count(" | ") == 4 for line in table[2:])
    assert main(["compare", *map(str, pair), "--format", "html"]) == USAGE
    assert capsys.readouterr().err.startswith("error: --format: unknown format 'html'; allowed: text, markdown")
