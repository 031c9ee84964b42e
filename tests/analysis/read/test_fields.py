"""Fields of trials, from their declaration through study.json to the analysis."""

import json

import pytest

from analysis.read.fields import fields_of
from analysis.read.results import ResultsError
from study.options import STUDY_OPTIONS, recorded_fields
from study.studies.study import TYPE_OF_PLAN_FIELD
from tests.support.frames import DECLARED
from trainables.trial import Trial


def test_every_field_is_recorded_with_its_default_and_survives_json() -> None:
    recorded = recorded_fields()
    assert json.loads(json.dumps(recorded)) == recorded
    assert {name: facts["default"] for name, facts in recorded.items()} == Trial().model_dump()


def test_the_analysis_reads_kinds_and_orders() -> None:
    assert DECLARED.of_kind("layout") == ("world_size", "nodes")
    assert {*DECLARED.timing} == {
        "steps", "warmup_steps", "communication_steps", "sweep_bytes", "profile_ranks", "window_limit_s",
        "median_width",
    }  # fmt: skip
    assert DECLARED.compared_in("own") == ("storage", "precision", "parallel", "execution", "interconnect")
    assert DECLARED["parallel"].order[0] == "ddp"
    assert DECLARED["loader_workers"].order == ()
    assert "mlstm64" in DECLARED.sequence_models and "mlp" not in DECLARED.sequence_models


def test_a_label_has_only_fields_with_an_effect() -> None:
    names = ["model", "dataset", "image_size", "sequence_length"]
    assert DECLARED.with_effect(names, {"model": "mlp"}) == ["model", "dataset", "image_size"]
    assert DECLARED.with_effect(names, {"model": "mlstm64"}) == ["model", "dataset", "sequence_length"]
    assert DECLARED.with_effect(names, {"model": "mlp", "workload": "w.py:f"}) == ["image_size"]


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("world_size", "gpus"),
        ("epochs", "epochs"),
        ("data_dir", "data-dir"),
        ("learning_rate", "set"),
        ("repeat", None),
        ("workload_digest", None),
    ],
)
def test_a_field_knows_the_option_that_sets_it(field: str, option: str | None) -> None:
    assert DECLARED[field].option == option


def test_options_set_fields_that_exist() -> None:
    fields = {option.field for option in STUDY_OPTIONS if option.field} - set(TYPE_OF_PLAN_FIELD)
    assert fields <= set(Trial.model_fields)


def test_a_field_has_an_effect_only_with_certain_strategies() -> None:
    views = DECLARED["gradient_as_bucket_view"]
    assert views.has_effect({}, DECLARED.facts)
    assert views.has_effect({"parallel": "zero1"}, DECLARED.facts)
    assert not views.has_effect({"parallel": "none"}, DECLARED.facts)


def test_an_undescribed_field_has_default_facts() -> None:
    assert DECLARED["of_a_newer_version"].kind == ""
    assert DECLARED["of_a_newer_version"].option == "set"


@pytest.mark.parametrize("study", [{}, {"fields": None}, {"fields": {"steps": 3}}])
def test_a_study_without_described_fields_is_refused(study: dict[str, object]) -> None:
    with pytest.raises(ResultsError, match="does not describe the fields"):
        fields_of(study)
