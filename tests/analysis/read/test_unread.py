"""Trials that differ only in a field that the user's workload never reads count as repeats."""

from pathlib import Path
from typing import Any

from analysis.read.results import load
from analysis.read.unread import unread_axes
from analysis.study import Analysis, analyse
from analysis.verdict.trust import unread_fields
from tests.support.frames import FIELDS, grid, record, steps, trial_id, write_study, write_trial

OWN = {"workload": "/home/me/mine.py:build", "world_size": 1}


def analysed(directory: Path, unread: list[str] | None, **axes: Any) -> Analysis:
    write_study(directory)
    for fields in grid(OWN, **axes, repeat=[0, 1]):
        trial = record(fields)
        trial["trial_id"] += f"-{fields['image_size']}-{fields['optimizer']}"
        for rank in trial["environment"]["ranks"]:
            rank["unread_fields"] = unread
        write_trial(directory, trial, steps(fields, 0.1 + 0.01 * fields["repeat"]))
    return analyse(load(directory))


def test_an_axis_that_nobody_read_is_no_axis_and_its_trials_are_repeats(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, ["image_size", "optimizer"], image_size=[28, 64], batch_per_gpu=[8, 16])
    assert analysis.axes == ("batch_per_gpu",)
    assert list(analysis.configurations["n"]) == [4, 4]
    assert dict(analysis.unread) == {"image_size": (28, 64)}
    [sentence] = unread_fields(analysis)
    assert "image_size 28 and 64" in sentence


def test_a_field_that_was_read_stays_an_axis(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, ["optimizer"], image_size=[28, 64])
    assert analysis.axes == ("image_size",)
    assert list(analysis.configurations["n"]) == [2, 2]
    assert not analysis.unread


def test_without_a_record_of_what_was_read_every_field_counts(tmp_path: Path) -> None:
    assert analysed(tmp_path, None, image_size=[28, 64]).axes == ("image_size",)


def test_models_of_the_registry_have_no_unread_fields(tmp_path: Path) -> None:
    write_study(tmp_path)
    for fields in grid(FIELDS, image_size=[28, 64]):
        write_trial(
            tmp_path, record(fields) | {"trial_id": f"{trial_id(fields)}-{fields['image_size']}"}, steps(fields, 0.1)
        )
    assert unread_axes(load(tmp_path).trials) == {}
