"""Notes of tables, and how texts are escaped in Markdown and CSV."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load_reduced
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.tables.communication import shares_of
from analysis.tables.table import Column, Table, as_csv
from analysis.text import as_prose
from scripts.claims.sources import committed_inputs
from tests.support.frames import RECORDED, grid, write_results, write_study

pytestmark = pytest.mark.xdist_group("committed studies")

STUDIES = ("communication", "hpml-lab4-h200", "large-batch", "acceleration-ladder-1gpu", "everything-1gpu")


def committed(study: str) -> ReportInputs:
    [inputs] = committed_inputs(study)
    return inputs


def undefined(table: Table, analysis: ReportInputs) -> list[str]:
    """Return columns that are neither an axis of the study nor defined, including optional columns without values."""
    axes = {*analysis.axes, "world_size"}
    # Empty tables still have columns of fields that do not vary.
    compared = () if len(table.frame) else (*analysis.fields.compared_in("own"), "batch_per_gpu")
    return [c.name for c in table.columns if not c.meaning and c.name not in {*axes, *compared}]


@pytest.mark.parametrize("study", STUDIES)
def test_every_column_is_an_axis_or_has_a_definition(study: str) -> None:
    analysis = committed(study)
    missing = {name: undefined(make(analysis), analysis) for name, make in TABLES.items()}
    assert not {name: columns for name, columns in missing.items() if columns}


def test_a_study_that_describes_hardly_any_field_has_all_tables(tmp_path: Path) -> None:
    trials = grid({}, world_size=[1, 2], repeat=range(2))
    folder = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1})
    write_study(folder, fields={"steps": RECORDED["steps"]})
    analysis = with_models(analyse(load_reduced(folder)))
    assert [len(make(analysis).frame) for name, make in TABLES.items() if name == "settings"] == [0]
    assert all(make(analysis).title for make in TABLES.values())


def test_these_studies_fill_all_tables_with_variable_columns() -> None:
    filled = {name for study in STUDIES for name, make in TABLES.items() if len(make(committed(study)).frame)}
    assert {"speed_up_weak", "settings", "interconnects", "ceiling", "transfer", "slowdown", "predictions"} <= filled


def test_columns_with_the_same_meaning_share_a_definition() -> None:
    columns = [Column(name, name, meaning) for name, meaning in (("a", "time."), ("b", "gain."), ("c", "time."))]
    frame = pd.DataFrame({"a": [1], "b": [2], "c": [3]})
    assert Table("", tuple(columns), frame).definitions() == [("a and c", "time."), ("b", "gain.")]


def test_a_column_without_a_value_is_only_in_the_csv() -> None:
    columns = (Column("a", "A", "first."), Column("b", "B", "second."), Column("c", "C", "third."))
    table = Table("", columns, pd.DataFrame({"a": [1, 2], "b": [None, float("nan")], "c": ["", "x"]}))
    assert list(table.cells()) == ["A", "C"]
    assert table.definitions() == [("A", "first."), ("C", "third.")]
    assert ">B<" not in table.to_html("t")
    assert table.to_csv().splitlines()[0] == "a,b,c"


def test_shares_of_phases_refer_to_the_step_of_their_row() -> None:
    """Medians of parts add up to less than the step if steps vary: here to 9.3 ms of 10.7 ms."""
    analysis = committed("hpml-lab4-h200")
    phases = TABLES["phases"](analysis)
    [row] = phases.frame.query("parallel == 'ddp' and batch_per_gpu == 128 and world_size == 2").to_dict("records")
    parts = [column for column in phases.columns if column.share and row[column.name] == row[column.name]]
    assert row["backward_s_share"] == row["backward_s"] / row["phases_step_s"]
    assert sum(row[column.name] for column in parts) == pytest.approx(9.31e-3, abs=1e-5)
    assert sum(row[column.share] for column in parts if column.share) == pytest.approx(9.31 / 10.68, abs=1e-3)
    assert "only nearly" in phases.note


def test_causes_of_a_slowdown_that_cancel_each_other_have_no_shares() -> None:
    parts = pd.DataFrame({"wait_s": [0.2, 8.639], "host_s": [0.1, -8.298], "load_s": [None, 0.03]})
    shares = shares_of(parts, pd.Series([0.3, 0.371]))
    assert shares["wait_s"].iloc[0] == pytest.approx(2 / 3)
    assert shares.iloc[1].isna().all()


def test_held_out_error_notes_that_nothing_of_the_held_out_size_weighs_the_laws(tmp_path: Path) -> None:
    trials = grid({}, world_size=[1, 2, 4], repeat=range(2))
    analysis = with_models(
        analyse(load_reduced(write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1})))
    )
    for table, column in (("predictions", "held-out error (%)"), ("laws", "held out")):
        meaning = dict(TABLES[table](analysis).definitions())[column]
        assert "fitted and weighted without the largest number of ranks" in meaning


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("+a", "'+a"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("--amp", "'--amp"),
        ("-0.5", "-0.5"),
        ("a=b", "a=b"),
    ],
)
def test_a_text_that_a_spreadsheet_would_run_is_quoted_in_csv(value: str, shown: str) -> None:
    text = as_csv(pd.DataFrame({value: ["x"], "other": [value], "number": [-1.5]}))
    assert text.splitlines() == [f"{shown},other,number", f"x,{shown},-1.5"]


@pytest.mark.parametrize(
    "text",
    ["![t](http://x/p.png)", "[a](http://x)", "[a]: http://x", "[a][b]", "# head", "- item", "1. item", "> quote"],
)
def test_prose_of_a_folder_is_no_markup_in_markdown(text: str) -> None:
    shown = as_prose(text)
    assert "\\" in shown
    assert shown.replace("\\", "") == text
    assert "\n" not in as_prose(f"a\n{text}")


def test_intervals_remain_as_they_are_in_markdown() -> None:
    assert as_prose("12.3 [11.9, 12.8], -5 of 3") == "12.3 [11.9, 12.8], -5 of 3"
