"""The questions that the visible part of the report answers, in order: one figure, one table and a few sentences each.

To answer a named study's own question first, add a `Question` to `OWN`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from analysis.answers.registry import Answer, answers
from analysis.compare.best import MAX_LISTED_WORKLOADS
from analysis.compare.ladder import OURS
from analysis.figures.accuracy import accuracy_batch, training_curves
from analysis.figures.batch_size import batch_size as batch_size_figure
from analysis.figures.batch_size import ladder as ladder_figure
from analysis.figures.improvement import improvement, improvement_rows
from analysis.figures.predictions import prediction_fan
from analysis.figures.scaling import phases as phases_figure
from analysis.figures.scaling import scaling_strong, scaling_weak
from analysis.predict.inputs import ReportInputs
from analysis.report import answer_tables as tables
from analysis.report import sentences
from analysis.report.sections import ANSWERS, Figure, curves
from analysis.tables.accuracy import accuracy_table, lossless_batch
from analysis.tables.batch_size import batch_size, ladder
from analysis.tables.one_field import levers, parallel
from analysis.tables.phases import unmeasured
from analysis.tables.scaling import speed_up_weak_table
from analysis.tables.table import Table
from analysis.verdict import accuracy as accuracy_verdict
from analysis.verdict import study as study_verdict
from analysis.verdict.next_steps import best


@dataclass(frozen=True)
class Question:
    """A question with its answer. figures: the first one that draws something is shown. table: None for none.

    is_collapsed: figure and table are shown on demand, because the study answers questions of its own.
    """

    key: str
    title: str
    sentences: Callable[[ReportInputs], list[str]]
    table: Callable[[ReportInputs], Table] | None
    figures: tuple[Figure, ...]
    replies: Callable[[ReportInputs], list[Answer]] = lambda inputs: []
    """Returns the answers to the questions of the study's source, one by one."""
    is_collapsed: bool = False


_WORK, _LOST, _GAINS = ANSWERS

OVERVIEW = (
    Figure(improvement, improvement_rows),
    _WORK,
    Figure(ladder_figure),
    Figure(scaling_weak),
    Figure(scaling_strong),
    Figure(accuracy_batch),
    Figure(batch_size_figure),
    Figure(training_curves, curves),
)
"""Figures next to the card; the first one that draws something is shown."""

QUESTIONS: tuple[Question, ...] = (
    Question("scale", "Does it scale?", sentences.scale, tables.scales, (Figure(scaling_weak), Figure(scaling_strong))),
    Question(
        "holds_back",
        "What holds it back?",
        sentences.holds_back,
        tables.holds_back,
        (_LOST, Figure(phases_figure)),
    ),
    Question(
        "change",
        "What should I change?",
        sentences.change,
        tables.changes,
        (_GAINS, Figure(batch_size_figure)),
    ),
    Question(
        "more",
        "What would more {ranks} bring?",
        sentences.more,
        tables.outlook,
        (Figure(prediction_fan),),
    ),
)


def _accuracy(inputs: ReportInputs) -> list[str]:
    first, more_ranks = accuracy_verdict.sentences(inputs)[:2], accuracy_verdict.more_ranks(inputs)
    return first if more_ranks is None or more_ranks in first else [*first, more_ranks]


def _accuracy_table(inputs: ReportInputs) -> Table:
    """Return the largest lossless batches without the estimates of critical batches, or the accuracies."""
    table = lossless_batch(inputs)
    measured = tuple(column for column in table.columns if not column.name.startswith("critical"))
    table = dataclasses.replace(table, columns=measured, note="")
    return tables.shortened(table if len(table.frame) else accuracy_table(inputs))


def _best(inputs: ReportInputs) -> list[str]:
    return [best(inputs, "throughput")]


def _ladder_table(inputs: ReportInputs) -> Table:
    table = ladder(inputs)
    return tables.largest_steps(table, table.frame[table.frame["machine"] == OURS])


def _said(*functions: Callable[[ReportInputs], str | None]) -> Callable[[ReportInputs], list[str]]:
    return lambda inputs: [text for function in functions if (text := function(inputs))]


def _short(make: Callable[[ReportInputs], Table]) -> Callable[[ReportInputs], Table]:
    return lambda inputs: tables.shortened(make(inputs))


def _fastest(title: str, *figures: Figure) -> Question:
    """Return a study's own question that the table of throughputs answers. Of a long one, each part has rows."""
    return Question("own", title, _best, tables.fastest, figures)


OWN: Mapping[str, Question] = {
    "forum-phases": Question(
        "own",
        "How long does each part of a step take?",
        _said(study_verdict.step_parts, study_verdict.comparisons),
        tables.phases_of_headline,
        (Figure(phases_figure),),
    ),
    "hpml-lab4": Question(
        "own",
        "How do several GPUs compare with one?",
        _said(study_verdict.comparisons),
        _short(speed_up_weak_table),
        (Figure(phases_figure),),
    ),
    "vgg-case-study": Question(
        "own",
        "How do step time and memory grow with the batch?",
        _said(study_verdict.memory, study_verdict.comparisons),
        _short(batch_size),
        (Figure(batch_size_figure),),
    ),
    "averaging": _fastest("What does each way to average gradients cost?", Figure(phases_figure)),
    "sharding": Question(
        "own",
        "What does sharding cost, and which model fits?",
        _best,
        _short(parallel),
        (Figure(phases_figure),),
    ),
    "storage-order": _fastest("What does storage cost?", Figure(phases_figure)),
    "loader-grid": _fastest("How many loader workers are enough?", Figure(phases_figure)),
    "mlstm-scaling": _fastest("How many characters per second?"),
    "gpt2-scaling": _fastest("How many tokens per second?"),
    "interconnect": Question(
        "own", "What does the network cost?", sentences.holds_back, tables.network_cost, (Figure(phases_figure),)
    ),
}
"""By name of the study. Ladders, trainings and users' code are recognised by their data."""

_IMPROVEMENT = Question(
    "improve",
    "What was tried, and what does it gain?",
    sentences.improvement,
    levers,
    (Figure(improvement, improvement_rows),),
)
_LADDER = Question(
    "largest_step", "Which step gains most?", _said(study_verdict.ladder), _ladder_table, (Figure(ladder_figure),)
)
_ACCURACY = Question(
    "training",
    "Which accuracy does it reach?",
    _accuracy,
    _accuracy_table,
    (Figure(accuracy_batch),),
)
_WORKLOADS = Question("workloads", "What ran, and how fast?", sentences.what_ran, tables.workloads, ())
_OWN_CODE = Question(
    "own_code",
    "What could not be measured in your code?",
    lambda inputs: [],
    _short(unmeasured),
    (),
)


def questions(inputs: ReportInputs) -> Iterator[Question]:
    """Yield the study's own questions, then those of `QUESTIONS` if any trial is timed.

    The question whose text is answered point by point (see `analysis.answers`) comes first.
    """
    if inputs.record.search is not None:
        yield _IMPROVEMENT
    own = [_LADDER] if not inputs.ladder.empty else []
    if inputs.record.name in OWN and not inputs.configurations.empty:
        own.append(OWN[inputs.record.name])
    if inputs.accuracy is not None:
        own.insert(min(1, len(own)) if inputs.record.questions or not inputs.ladder.empty else 0, _ACCURACY)
    if (
        not own
        and len(inputs.headlines) > MAX_LISTED_WORKLOADS
        and all(each.scaling is None for each in inputs.headlines)
    ):
        own = [_WORKLOADS]
    if inputs.record.questions and own:
        own[0] = dataclasses.replace(own[0], sentences=lambda inputs: [], replies=answers)
    yield from own
    if inputs.configurations.empty:
        return
    is_secondary = bool(inputs.record.questions and own)
    yield from (dataclasses.replace(question, is_collapsed=is_secondary) for question in QUESTIONS)
    if len(unmeasured(inputs).frame):
        yield _OWN_CODE
