"""The table of the acceleration ladder."""

from analysis.compare.accuracy import by_precision
from analysis.compare.ladder import BATCHES
from analysis.study import Analysis
from analysis.tables.table import N_COLUMN, Column, Table


def ladder(analysis: Analysis) -> Table:
    """What each rung of the acceleration ladder adds, and all of them together."""
    return Table(
        "Acceleration ladder",
        (
            Column("machine", "machine", "this study's rungs were measured here; another machine's are published numbers, and were not."),
            Column("rung", "rung", "one change after another, in the order of the study."),
            Column("samples", "samples a step", "of all ranks together.", decimals=0),
            Column("batches_s", f"{BATCHES} batches (s)", f"{BATCHES} plain steps, without instruments.", decimals=1),
            Column("throughput_samples_per_s", "throughput (samples/s)", "median of the repeats.", decimals=0),
            Column("step_ratio", "step speed-up", "throughput / that of the rung before [95 % interval, Welch's t on logarithms].", decimals=2, interval=True),
            Column("cumulative_ratio", "cumulative speed-up", "throughput / that of the first rung, same interval.", decimals=2, interval=True),
            Column("trained_percent", "trained to (%)", _trained_note(analysis), decimals=2, interval=True, optional=True),
            N_COLUMN,
        ),
        analysis.ladder,
        _source_note(analysis),
        blocks=("machine",),
    )  # fmt: skip


def _trained_note(analysis: Analysis) -> str:
    """What the accuracies of the rungs' number formats are."""
    reached = by_precision(analysis.accuracy)
    on = f": {reached['trained'].iloc[0]}" if len(reached) else ""
    return f"held-out accuracy of trainings in the rung's number format{on}, mean of the seeds [95 % interval]."


def _source_note(analysis: Analysis) -> str:
    """Where the reference ladders come from."""
    sources = dict.fromkeys(ladder.source for ladder in analysis.record.reference_ladders if ladder.source)
    if not sources:
        return ""
    return (
        f"Published rungs: {'; '.join(sources)}. Its seconds and these stand on different hardware; compare the speed-ups, "
        "not the seconds."
    )
