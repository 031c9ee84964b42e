"""Reading study.json for the report, including files written by other programs."""

from typing import Any

import pytest

from analysis.read.study_record import ReferenceLadder, StudyRecord
from study.studies.basic import STUDIES
from study.studies.published import acceleration_ladder
from tests.study.studies.test_studies import GPU_HOST

EMPTY = StudyRecord("study", "", "", None, None, None, (), (), None, "", ())


@pytest.mark.parametrize(
    "study", [{}, {"configuration": None}, {"configuration": []}, {"name": None, "question": None, "configuration": {}}]
)
def test_an_empty_study_has_an_empty_record(study: dict[str, Any]) -> None:
    assert StudyRecord.of(study) == EMPTY


@pytest.mark.parametrize(
    "configuration",
    [
        {"goal": "speed"},
        {"price-per-gpu-hour": True},
        {"price-per-gpu-hour": "3"},
        {"planned_trials": "a"},
        {"ladder_steps": [3, {"name": "x"}, {"trial_ids": []}]},
        {"report_epoch": True},
        {"report_epoch": "5"},
        {"reference_ladders": [{"samples": 8}, {"samples": 8, "batches_s": [1.0, 0.0]}, {"batches_s": [1.0]}, 3]},
    ],
)
def test_a_malformed_entry_counts_as_missing(configuration: dict[str, Any]) -> None:
    assert StudyRecord.of({"configuration": configuration}) == EMPTY


def test_every_entry_is_read() -> None:
    configuration = {
        "goal": "cost",
        "price-per-gpu-hour": 3,
        "planned_trials": ["a", 3, "b"],
        "ladder_steps": [{"name": "plain", "trial_ids": ["a"]}],
        "report_epoch": 5,
        "small_form": "on CPUs",
        "reference_ladders": [{"machine": "m", "samples": 8, "batches_s": [2, 1.0], "source": "s"}],
    }
    study = {"name": "n", "question": "q", "command": "c", "configuration": configuration, "notes": ["n", 3]}
    ladder = ReferenceLadder("m", 8.0, (2.0, 1.0), "s")
    assert StudyRecord.of(study) == StudyRecord(
        "n", "q", "c", "cost", 3.0, ("a", "b"), (("plain", ("a",)),), (ladder,), 5, "on CPUs", ("n",)
    )


def test_the_report_reads_what_studies_write() -> None:
    records = {name: StudyRecord.of({"configuration": make(GPU_HOST).report}) for name, make in STUDIES.items()}
    assert {name: record.report_epoch for name, record in records.items() if record.report_epoch} == {
        "fifth-epoch": 5,
        "hpml-lab4": 5,
        "vgg-case-study": 5,
    }
    listed = acceleration_ladder(GPU_HOST).report["reference_ladders"]
    assert [len(ladder.batches_s) for ladder in records["acceleration-ladder"].reference_ladders] == [
        len(ladder["batches_s"]) for ladder in listed
    ]
