"""Two results folders side by side: what matches, what a ratio's interval says, and when a build fails."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from analysis.compare.folders import compare
from analysis.load.results import ResultsError
from study.cli.compare import share
from study.errors import DOES_NOT_FIT, DONE, SOME_FAILED, USAGE, ConfigurationError
from study.scaling import main
from tests.support.frames import FIELDS, environment, grid, record, steps, write_study, write_trial
from tests.support.trainings import TRAINING, epochs, write_training

Law = Callable[[dict[str, Any]], float]


def folder(directory: Path, trials: list[dict[str, Any]], step_s: Law, gpu: str = "NVIDIA H200") -> Path:
    """Done trials; each repeat is a little off, by known factors."""
    write_study(directory)
    for fields in trials:
        own = step_s(fields) * (1.0, 1.01, 0.99, 1.005, 0.995)[fields["repeat"] % 5]
        write_trial(directory, record(fields, environment=environment(fields, gpu)), steps(fields, own))
    return directory


def without(directory: Path, field: str) -> Path:
    """The same folder as if its trials were older than a field."""
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
    """Batch 64 became a tenth slower, 32 did not; 16 is only in the first, 8 GPUs are only in the second."""
    place = tmp_path_factory.mktemp("pair")
    before = folder(place / "a", trials([1, 2], [16, 32, 64]), by_batch(64, 1.0))
    after = folder(place / "b", trials([1, 2, 8], [32, 64]), by_batch(64, 1.1))
    return before, after


def test_the_largest_loss_comes_first_and_what_is_in_one_folder_only_is_named(pair: tuple[Path, Path]) -> None:
    found = compare(*pair)
    assert found.rows["label"].tolist()[2:] == ["1 GPU, batch 32 per GPU", "2 GPUs, batch 32 per GPU"]
    assert set(found.rows["label"][:2]) == {"1 GPU, batch 64 per GPU", "2 GPUs, batch 64 per GPU"}
    assert found.rows["verdict"].tolist() == ["slower", "slower", "within noise", "within noise"]
    assert found.rows["throughput_samples_per_s_ratio"].tolist() == pytest.approx([1 / 1.1, 1 / 1.1, 1, 1])
    assert found.only_a == ("1 GPU, batch 16 per GPU", "2 GPUs, batch 16 per GPU")
    assert found.only_b == ("8 GPUs, batch 32 per GPU", "8 GPUs, batch 64 per GPU")
    assert (found.assumed, found.environments, found.left_out) == ((), (), ())


def test_a_ratio_has_welchs_interval_on_logarithms_of_the_repeats(pair: tuple[Path, Path]) -> None:
    row = compare(*pair).rows.iloc[0]
    own = np.log([1.0, 1.01, 0.99])
    expected = stats.ttest_ind(-own - math.log(1.1), -own, equal_var=False).confidence_interval(0.95)
    interval = (row["throughput_samples_per_s_low"], row["throughput_samples_per_s_high"])
    assert interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    for name in ("step_s", "forward_s", "backward_s", "optimizer_s"):
        assert row[f"{name}_ratio"] == pytest.approx(1.1)
        assert row[f"{name}_low"] > 1


def test_only_a_loss_whose_whole_interval_is_beyond_the_threshold_is_a_regression(pair: tuple[Path, Path]) -> None:
    found = compare(*pair)  # 9.1 % lost, the interval is 1 to 2 % wide to each side
    assert len(found.regressions(0.05)) == 2
    assert len(found.regressions(0.085)) == 0
    assert len(found.regressions(0.0)) == 2


def test_a_single_repeat_has_no_interval_and_is_no_regression(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32], repeats=1), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32], repeats=3), lambda fields: 0.2)
    found = compare(before, after)
    assert found.rows["verdict"].tolist() == ["no interval"]
    assert found.rows["throughput_samples_per_s_ratio"].tolist() == pytest.approx([0.5])
    assert found.regressions(0.05).empty


def test_a_field_that_only_one_folder_has_takes_its_default_in_the_other(tmp_path: Path) -> None:
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
    found = compare(before, tmp_path / "b")
    assert found.assumed == ("A does not have accumulation_steps: its trials are taken to have the default, 1.",)
    assert len(found.rows) == 1
    assert len(found.only_b) == 1
    assert "accumulation steps 2" in found.only_b[0]


def test_a_field_without_a_default_that_only_one_folder_has_is_refused(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32]), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32], of_tomorrow=1), lambda fields: 0.1)
    for one, other in ((before, after), (after, before)):
        with pytest.raises(ResultsError, match=rf"{before} lacks the fields of_tomorrow, which {after} has"):
            compare(one, other)


def test_other_machines_are_named_and_compared(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32], cpus_per_rank=8), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [32], cpus_per_rank=4), lambda fields: 0.05, gpu="NVIDIA B200")
    found = compare(before, after)
    assert found.environments == (
        ("device", "NVIDIA H200", "NVIDIA B200"),
        ("cpus_per_rank", "8", "4"),
    )
    assert found.rows["verdict"].tolist() == ["faster"]


def test_trials_of_a_folder_under_unlike_environments_are_not_mixed(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32], repeats=4), lambda fields: 0.1)
    fields = FIELDS | trials([1], [32], repeats=5)[-1]
    odd = record(fields, environment=environment(fields, "NVIDIA B200"))
    write_trial(before, odd, steps(fields, 0.01))
    found = compare(before, before)
    assert found.rows["n_a"].tolist() == [4]
    assert found.left_out[0] == f"{before}: 1 trials under other environments of the same folder are left out."


def test_folders_that_share_nothing_say_in_what_they_differ(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1], [32, 64]), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1], [128]), lambda fields: 0.1)
    with pytest.raises(ResultsError) as caught:
        compare(before, after)
    assert str(caught.value) == (
        f"{before} and {after} have no configuration in common: "
        "batch_per_gpu is 32, 64 in the first and 128 in the second"
    )


def test_a_folder_without_a_done_trial_is_refused(tmp_path: Path) -> None:
    empty = write_study(tmp_path / "a")
    with pytest.raises(ResultsError) as caught:
        compare(empty, empty)
    assert str(caught.value) == f"{empty}: nothing to compare: no trial is done; run the study first"


def test_a_folder_of_trainings_is_refused_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write_study(tmp_path / "a")
    write_training(place, TRAINING, epochs(TRAINING, 0.9))
    why = "its only done trial is a training to an accuracy, and none is timed; give the folder of a timed study, such as `run default`"
    assert main(["compare", str(place), str(place)]) == USAGE
    assert main(["predict", str(place), "--gpus", "8"]) == USAGE
    assert capsys.readouterr().err.splitlines() == [
        f"error: {place}: nothing to compare: {why}", f"error: {place}: nothing to predict from: {why}",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0%", 0.0), (" 2.5 % ", 0.025), ("99.9%", 0.999)])
def test_a_percentage_is_read(text: str, value: float) -> None:
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["5", "0.05", "five", "-1%", "100%", "", "%", "1e2%", "nan%", "٥%"])
def test_anything_else_is_no_percentage(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        share(text)
    assert str(caught.value) == (
        f"--fail-above: {text!r} is not a percentage; allowed: from 0% to below 100%, such as 5%"
    )


def test_the_command_fails_exactly_where_a_regression_is_shown(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = map(str, pair)
    assert main(["compare", before, after]) == DONE
    assert main(["compare", before, after, "--fail-above", "5%"]) == SOME_FAILED
    assert main(["compare", after, before, "--fail-above", "5%"]) == DONE
    capsys.readouterr()
    assert main(["compare", before, after, "--fail-above", "5"]) == USAGE
    assert capsys.readouterr().err.startswith("error: --fail-above: '5' is not a percentage")
    assert main(["compare", before, "/nowhere"]) == USAGE
    assert capsys.readouterr().err == (
        "error: /nowhere: no study.json, so this is not a results folder; give the folder that a study was run into\n"
    )


def test_where_nothing_can_be_judged_the_command_neither_passes_nor_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = folder(tmp_path / "once", trials([1], [32, 64], repeats=1), by_batch(64, 1.0))
    slow = folder(tmp_path / "slow", trials([1], [32, 64]), lambda fields: 0.2)
    assert main(["compare", str(once), str(slow), "--fail-above", "5%"]) == DOES_NOT_FIT
    out = " ".join(capsys.readouterr().out.split())
    assert "0 of 2 could be judged" in out
    assert "run both with --repeats 3 or more" in out
    assert "lost more than" not in out
    assert main(["compare", str(once), str(slow)]) == DONE
    capsys.readouterr()
    assert main(["compare", str(once), str(slow), "--fail-above", "5%", "--json"]) == DOES_NOT_FIT
    assert json.loads(capsys.readouterr().out)["judged"] == 0


def test_where_some_cannot_be_judged_the_others_decide_and_they_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [*trials([1], [32]), *trials([1], [64, 128], repeats=1)]
    before = folder(tmp_path / "a", mixed, lambda fields: 0.1)
    after = folder(tmp_path / "b", mixed, lambda fields: 0.2)
    assert main(["compare", str(before), str(before), "--fail-above", "5%"]) == DONE
    assert "2 of 3 could not be judged" in capsys.readouterr().out
    assert main(["compare", str(before), str(after), "--fail-above", "5%"]) == SOME_FAILED
    assert "1 has lost more than" in capsys.readouterr().out


def test_the_terminal_shows_each_configuration_with_its_ratio_in_80_columns(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    import study.cli.compare as shown

    monkeypatch.setattr(shown, "terminal", lambda: Console(width=80, markup=False, emoji=False, highlight=False))
    assert main(["compare", *map(str, pair), "--fail-above", "5%"]) == SOME_FAILED
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()[3:]) <= 80
    assert "0.909 [0.889, 0.930]" in out
    assert "only in A: 1 GPU, batch 16 per GPU; 2 GPUs, batch 16 per GPU" in out
    assert "4 configurations: 2 slower, 2 within noise" in out
    assert "2 have lost more than 5.0\u00a0% of throughput beyond noise (whole interval)" in out


def test_json_has_everything_with_null_where_nothing_is_known(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, pair), "--json", "--fail-above", "5%"]) == SOME_FAILED
    told = json.loads(capsys.readouterr().out)
    first = told["configurations"][0]
    assert (told["regressions"], told["fail_above"], first["beyond_threshold"]) == (2, 0.05, True)
    assert first["throughput_samples_per_s"]["ratio"] == pytest.approx(1 / 1.1)
    assert first["fields"]["batch_per_gpu"] == 64
    assert len(first["throughput_samples_per_s"]["interval"]) == 2
    assert told["only_b"] == ["8 GPUs, batch 32 per GPU", "8 GPUs, batch 64 per GPU"]
