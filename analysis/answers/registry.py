"""The functions that answer questions, by the key that study.json gives with a question's text."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from analysis.answers import forum, lab, lab_evidence, ladder, loading, mlstm, strategies, threads, trainings, vgg
from analysis.answers.reply import Missing, Reply
from analysis.predict.inputs import ReportInputs

Function = Callable[[ReportInputs], Reply | Missing]

ANSWERS: Mapping[str, Function] = {
    "forum.parts": forum.parts,
    "forum.per_rank": forum.per_rank,
    "forum.non_blocking": forum.non_blocking,
    "forum.hidden": forum.hidden,
    "forum.pageable": forum.pageable,
    "lab.epoch_time": lab.epoch_time,
    "lab.scaling_kind": lab.scaling_kind,
    "lab.separated": lab.separated,
    "lab.bandwidth": lab.bandwidth,
    "lab.fifth_epoch": lab.fifth_epoch,
    "lab.recipes": lab.recipes,
    "lab.set_epoch": lab_evidence.set_epoch,
    "lab.sent": lab_evidence.sent,
    "lab.gradients_only": lab_evidence.gradients_only,
    "ladder.steps": ladder.steps,
    "ladder.total": ladder.total,
    "ladder.precision": ladder.precision,
    "formats.cost": trainings.cost,
    "loader.workers": loading.workers,
    "storage.cost": loading.storage,
    "averaging.ways": strategies.ways,
    "averaging.held": strategies.held,
    "sharding.cost": strategies.sharding,
    "sharding.fits": strategies.largest_model,
    "ranks.divided": trainings.divided,
    "vgg.accuracy": vgg.accuracy,
    "vgg.best_batch": vgg.best_batch,
    "vgg.one_is_better": vgg.one_is_better,
    "vgg.memory": vgg.memory,
    "mlstm.linear": mlstm.linear,
    "mlstm.interconnects": mlstm.interconnects,
    "mlstm.larger_model": mlstm.larger_model,
    "mlstm.predicted": mlstm.predicted,
    "threads.gil": threads.gil,
}


@dataclass(frozen=True)
class Answer:
    """A question of the study and its answer in sentences. numbers, reason: see `Reply`."""

    key: str
    question: str
    text: str
    is_answered: bool
    numbers: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


def answers(inputs: ReportInputs) -> list[Answer]:
    """Answer the questions of the study in their order. A question that results cannot answer names the command."""
    return [_answer(inputs, key, question) for key, question in inputs.record.questions if key in ANSWERS]


def _answer(inputs: ReportInputs, key: str, question: str) -> Answer:
    nothing = inputs.configurations.empty and inputs.accuracy is None
    found = Missing("no trial is done") if nothing else ANSWERS[key](inputs)
    if isinstance(found, Reply):
        return Answer(key, question, found.text, True, found.numbers, found.reason)
    run = found.command or shlex.join(["python", "-m", "study.scaling", "run", inputs.record.name])
    command = f"{run} {found.options}".rstrip()
    known = f"{found.known} " if found.known else ""
    open_part = "the rest of the question" if known else "the question"
    text = f"{known}These results do not answer {open_part}, because {found.why}. This would: `{command}`."
    return Answer(key, question, text, False)
