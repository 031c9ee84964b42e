"""`compare DIR @NAME`: committed results as the baseline, and scaling compared apart from speed."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from analysis.compare.folders import compare
from analysis.read.fields import fields_of
from analysis.read.results import load_reduced
from study.capacity import NodeCapacity
from study.cli import commands
from study.cli.compare import folders
from study.errors import DONE, SOME_FAILED, USAGE
from study.references import REFERENCES
from study.scaling import main
from tests.analysis.compare.test_compare import folder, trials

RESULTS = Path(__file__).parent.parent.parent.parent / "benchmarks" / "results"
FOUR_GPUS = [NodeCapacity("a", "10.0.0.1", cpus=64, gpus=4)]


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """B's single GPU has 0.8 times A's rate; from 1 to 4 GPUs, A's step grows by 10 %, and B's by 37.5 %."""
    directory = tmp_path_factory.mktemp("slower")
    before = folder(directory / "a", trials([1, 4], [32]), lambda f: 0.1 * (1.1 if f["world_size"] == 4 else 1))
    after = folder(directory / "b", trials([1, 4], [32]), lambda f: 0.125 * (1.375 if f["world_size"] == 4 else 1))
    return before, after


def test_the_rate_of_one_gpu_and_the_scaling_are_compared_apart(slower: tuple[Path, Path]) -> None:
    (row,) = compare(*slower).scaling.to_dict("records")
    assert (row["world_size"], row["reference_world_size"]) == (4, 1)
    assert row["rate_ratio"] == pytest.approx(0.8)
    assert (row["efficiency_a"], row["efficiency_b"]) == pytest.approx((1 / 1.1, 1 / 1.375))
    assert row["efficiency_ratio"] == pytest.approx(1.1 / 1.375)
    assert row["efficiency_low"] <= row["efficiency_ratio"] <= row["efficiency_high"] < 0.9


def test_a_loss_of_speed_on_every_number_of_gpus_is_no_loss_of_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folder(tmp_path / "a", trials([1, 4], [32]), lambda fields: 0.1)
    after = folder(tmp_path / "b", trials([1, 4], [32]), lambda fields: 0.2)
    gate = ["compare", str(before), str(after), "--fail-above", "5%"]
    assert main(gate) == SOME_FAILED
    assert main([*gate, "--scaling"]) == DONE
    capsys.readouterr()
    assert main([*gate, "--scaling", "--json"]) == DONE
    output = json.loads(capsys.readouterr().out)
    assert (output["measure"], output["regressions"], output["scaling"][0]["rate_ratio"]) == (
        "scaling efficiency", 0, pytest.approx(0.5)
    )  # fmt: skip


def test_a_loss_of_scaling_fails_the_gate(slower: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, slower), "--fail-above", "5%", "--scaling"]) == SOME_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Regression: 1 of 1 configuration lost more than 5.0\u00a0% of scaling efficiency."
    assert any(line.startswith("B's rate on 1 rank is 0.80 times A's") for line in lines)


@pytest.mark.parametrize("options", [[], ["--table"], ["--format", "markdown"], ["--fail-above", "5%"]])
def test_a_comparison_of_scaling_shows_the_efficiencies(
    slower: tuple[Path, Path], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", *map(str, slower), "--scaling", *options])
    output = capsys.readouterr().out
    (row,) = [line for line in output.splitlines() if "90.9" in line and "72.7" in line]
    assert row.strip("| ").startswith("4 GPUs") and "0.800" in row and row.strip("| ").endswith("scales worse")
    assert ("samples/s" in output) == (options == ["--table"])
    assert ("**Scaling efficiency of " in output) == ("markdown" in options)


def test_a_comparison_of_scaling_without_a_threshold_has_an_answer(
    slower: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, slower), "--scaling"]) == DONE
    assert capsys.readouterr().out.splitlines()[0] == "B scales worse in 1 of 1 configuration."


def test_one_repeat_gives_a_ratio_without_an_interval(tmp_path: Path) -> None:
    before = folder(tmp_path / "a", trials([1, 4], [32], repeats=1), lambda fields: 0.1)
    (row,) = compare(before, before).scaling.to_dict("records")
    assert row["efficiency_ratio"] == 1
    assert np.isnan(row["efficiency_low"]) and np.isnan(row["efficiency_high"])


def test_a_reference_compared_with_itself_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    name, reference = "resnet18-small_4xh200_2026-11", "default-4gpu"
    assert main(["compare", str(RESULTS / reference), f"@{name}", "--json"]) == DONE
    output = json.loads(capsys.readouterr().out)
    assert (
        {row["rate_ratio"] for row in output["scaling"]}
        == {row["efficiency_ratio"] for row in output["scaling"]}
        == {1}
    )
    assert output["only_a"] == []
    assert main(["compare", str(RESULTS / reference), f"@{name}"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Your rate on 1 rank is 1.00 times the reference's")
    assert f"A: @{name}" in lines


def test_an_unknown_reference_is_one_line_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "results/mine", "@tpu"]) == USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: unknown reference '@tpu'; allowed: @") and len(error.splitlines()) == 1


def test_results_without_a_configuration_of_the_reference_get_the_command_that_measures_them(
    slower: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "resnet18-small_4xh200_2026-11"
    assert main(["compare", str(slower[0]), f"@{name}"]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith(
        f"; fix: measure those of the reference: python -m study.scaling {REFERENCES[name].command}"
    )


def test_the_documentation_shows_the_command_of_every_reference() -> None:
    page = (RESULTS.parent.parent / "docs" / "compare.md").read_text()
    for name, reference in REFERENCES.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `@{name}` |")]
        assert row.endswith(f"| `python -m study.scaling {reference.command}` |")


@pytest.mark.parametrize("name", REFERENCES)
def test_the_command_of_a_reference_measures_its_configurations(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "planning_nodes", lambda address: FOUR_GPUS)
    words = shlex.split(REFERENCES[name].command)[1:]
    assert main(["plan", *words, "--repeats", "1", "--json"]) == DONE
    planned = [row["fields"] for row in json.loads(capsys.readouterr().out)["trials"]]
    folder_of_reference, _, may_differ = folders("mine", f"@{name}")
    results = load_reduced(folder_of_reference)
    machine = fields_of(results.study).of_kind("machine")
    compared = [
        field for field in planned[0] if field in results.trials and field not in {*machine, *may_differ, "repeat"}
    ]
    measured = [dict(zip(compared, row, strict=True)) for row in results.trials[compared].astype(object).to_numpy()]
    for trial in planned:
        nearest = min(({f for f in compared if str(row[f]) != str(trial[f])} for row in measured), key=len)
        assert nearest == set(), "no trial of the reference has these values"
