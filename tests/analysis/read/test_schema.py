"""The results format agrees with what ranks measure."""

from analysis.read.schema import PHASES, REQUIRED, SCHEMAS, frame_schema
from trainables.step import timing


def test_phases_match_those_that_ranks_measure() -> None:
    assert PHASES == timing.PHASES


def test_every_required_column_is_read() -> None:
    for name, required in REQUIRED.items():
        assert set(required) <= set(frame_schema(name).names) <= {"trial_id", *SCHEMAS[name].names}
