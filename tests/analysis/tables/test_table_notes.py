"""Notes of tables: whoever reads a table finds below it what each column is."""

from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from analysis.load.results import load_reduced
from analysis.predict.inputs import ReportInputs, with_models
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.tables.table import Column, Table
from analysis.verdict.trust import trust
from tests.support.frames import grid, write_results, write_study

RESULTS = Path(__file__).parent.parent.parent.parent / "benchmarks" / "results"
STUDIES = ("account", "hpml-lab4", "large-batch", "acceleration-ladder-1gpu", "everything-1gpu")


@cache
def committed(study: str) -> ReportInputs:
    return with_models(analyse(load_reduced(RESULTS / study)))


def undefined(table: Table, analysis: ReportInputs) -> list[str]:
    """Columns that neither are an axis of the study nor have a definition; those of optional columns without a value too."""
    axes = {*analysis.axes, "world_size"}
    compared = (
        () if len(table.frame) else (*analysis.fields.compared_in("own"), "batch_per_gpu")
    )  # a table of axes, were they varied
    return [c.name for c in table.columns if not c.meaning and c.name not in {*axes, *compared}]


@pytest.mark.parametrize("study", STUDIES)
def test_every_column_that_is_no_axis_of_the_study_is_defined_in_the_table_s_note(study: str) -> None:
    analysis = committed(study)
    found = {name: undefined(make(analysis), analysis) for name, make in TABLES.items()}
    assert not {name: columns for name, columns in found.items() if columns}


def test_these_studies_fill_all_tables_whose_columns_depend_on_what_was_measured() -> None:
    filled = {name for study in STUDIES for name, make in TABLES.items() if len(make(committed(study)).frame)}
    assert {"speed_up_weak", "settings", "interconnects", "ceiling", "transfer", "slowdown", "predictions"} <= filled


def test_columns_that_mean_the_same_are_defined_together() -> None:
    columns = [Column(name, name, meaning) for name, meaning in (("a", "time."), ("b", "gain."), ("c", "time."))]
    assert Table("", tuple(columns), pd.DataFrame()).definitions() == [("a and c", "time."), ("b", "gain.")]


def test_shares_of_phases_are_of_the_step_that_stands_beside_them() -> None:
    """Medians of parts add up to less where steps differ: here to 9.2 ms of 10.6."""
    analysis = committed("hpml-lab4")
    phases = TABLES["phases"](analysis)
    [row] = phases.frame.query("parallel == 'ddp' and batch_per_gpu == 128 and world_size == 2").to_dict("records")
    parts = [column for column in phases.columns if column.share and row[column.name] == row[column.name]]
    assert row["backward_s_share"] == row["backward_s"] / row["phases_step_s"]
    assert sum(row[column.name] for column in parts) == pytest.approx(9.24e-3, abs=1e-5)
    assert sum(row[column.share] for column in parts if column.share) == pytest.approx(9.24 / 10.61, abs=1e-3)
    for name in ("phases", "communication"):
        assert "only nearly" in TABLES[name](analysis).note, name


def test_the_held_out_error_says_that_the_law_was_chosen_by_it(tmp_path: Path) -> None:
    trials = grid({}, world_size=[1, 2, 4], repeat=range(2))
    analysis = with_models(
        analyse(load_reduced(write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1})))
    )
    for table, column in (("predictions", "held-out error (%)"), ("laws", "mean error (%)")):
        assert "The law is chosen by this very error" in dict(TABLES[table](analysis).definitions())[column]


def test_notes_of_the_study_come_first_where_the_numbers_are_judged(tmp_path: Path) -> None:
    directory = write_results(tmp_path / "results", grid({}, world_size=[1, 2]), lambda fields: {"step_s": 0.1})
    write_study(directory, notes=["Clocks were locked at 1.4 GHz.", 3])
    found = analyse(load_reduced(directory))
    assert trust(found)[0] == "Clocks were locked at 1.4 GHz."
    write_study(directory, notes="none")
    assert analyse(load_reduced(directory)).record.notes == ()
