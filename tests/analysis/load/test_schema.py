"""The one list of columns agrees with what ranks measure."""

from analysis.load.schema import PHASES, REQUIRED, SCHEMAS, frame_schema
from trainables.step import timing


def test_the_phases_are_those_that_ranks_measure() -> None:
    assert PHASES == timing.PHASES


def test_every_required_column_is_read() -> None:
    for name, required in REQUIRED.items():
        assert set(required) <= set(frame_schema(name).names) <= {"trial_id", *SCHEMAS[name].names}
