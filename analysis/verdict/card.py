"""The summary card: the answer of a study, computed once and rendered in the terminal, the report, JSON and SVG."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.compare.best import MAX_LISTED_WORKLOADS
from analysis.compare.ladder import OURS
from analysis.predict.inputs import ReportInputs
from analysis.read.own_code import COMMAND_COLUMN
from analysis.read.results import COUNTABLE, UNCOUNTED
from analysis.study import Analysis, study_ranks
from analysis.text import join, number, value_label
from analysis.verdict.facts import own_program, trained_workload
from analysis.verdict.lines.improve import improve_lines, trust_in_improvement
from analysis.verdict.lines.scaling import lost, more_ranks, scales
from analysis.verdict.lines.step import batch, bound_by, bounds_of_many, do_next, speed, unit_speed
from analysis.verdict.lines.subject import Subject, subject_of, subjects
from analysis.verdict.lines.training import accuracy_in_one_line, ladder_lines, training_lines
from analysis.verdict.lines.trust import POOR, trust_in, trust_in_accuracy
from analysis.verdict.lines.value import Card, CardLine, Quantity, Trust
from analysis.verdict.reasons import common_reasons

__all__ = ["Card", "CardLine", "Quantity", "Trust", "card_of"]

SCALING, ONE_SIZE, LADDER, TRAINING, NOTHING = "scaling", "one_size", "ladder", "training", "nothing"
IMPROVE = "improve"
"""Forms of the card. NOTHING: no trial is done."""

MOST_LINES = 6
"""Maximum lines below the title and above trust."""


def card_of(analysis: ReportInputs, others: Sequence[Analysis] = ()) -> Card:
    """Compute the card of a study. others: the study's trials under other environments, which it only counts.

    The card is about one configuration, see `lines.subject.subjects`; in a study of several workloads, about the one
    that scales worst, and the line `scales` lists the others. Forms and their lines:
    scaling: scales, speed (of models that read text), lost, bound_by, do_next, more_gpus.
    one_size (no two configurations differ only in the number of ranks): speed, batch, bound_by, do_next, more_gpus.
    ladder: ladder, largest_step, slower_steps, bound_by, do_next.
    training: accuracy, report_epoch, accuracy_lost, largest_lossless_batch, time_to_target, scales,
    do_next.
    improve: gain, kept, not_kept, bound_by, loss, bounds.
    nothing: failed, do_next.
    A line that has nothing to say is left out. Studies that time and train add `accuracy`, which then also
    has loss, lossless batch and target; a partial study's do_next is the command that resumes it.
    """
    chosen = subjects(analysis)
    chosen = [subject for subject in chosen if subject.scaling is not None] or chosen
    if (searched := analysis.record.search) and searched.baseline:
        chosen = subject_of(analysis, searched.baseline.trial_ids) or chosen
    record = analysis.record
    recorded = {trial for part in (analysis, *others) for trial in part.results.trials["trial_id"]}
    missing = len(set(record.planned_trials or ()) - recorded)
    form, lines, trust = _content(analysis, chosen, others)
    if missing:
        text = f"finish the study: {record.command}" if record.command else "finish the study"
        lines = [*(line for line in lines if line.key != "do_next"), CardLine("do_next", "do next", text)]
    facts = _facts(analysis, chosen)
    return Card(
        study=record.name,
        question=record.question,
        form=form,
        title=_title(analysis, chosen, facts),
        facts=facts,
        trust=trust,
        lines=tuple(lines),
        missing_trials=missing,
        planned_trials=None if record.planned_trials is None else len(recorded.union(record.planned_trials)),
        resume_command=record.command if missing else "",
    )


def _content(
    analysis: ReportInputs, chosen: list[Subject], others: Sequence[Analysis]
) -> tuple[str, list[CardLine], Trust]:
    """Return the form of the card, its lines and trust. chosen: subjects that the card names."""
    if not chosen and analysis.accuracy is None:
        return NOTHING, *_nothing(analysis)
    if (searched := analysis.record.search) is not None:
        return IMPROVE, improve_lines(searched), trust_in_improvement(searched)
    if not chosen:
        return TRAINING, _with_failures(analysis, training_lines(analysis)), trust_in_accuracy(analysis, others)
    subject, accuracy = chosen[0], accuracy_in_one_line(analysis)
    step = [bound_by(analysis, subject), accuracy, do_next(analysis, subject)]
    if (analysis.ladder["machine"] == OURS).sum() > 1:
        form, candidates = LADDER, [*ladder_lines(analysis), *step]
    elif subject.scaling is not None:
        # with an accuracy, the card is full
        rate = unit_speed(analysis, chosen) if accuracy is None else None
        form, candidates = SCALING, [scales(analysis, chosen), rate, lost(analysis, subject), *step]
        candidates.append(more_ranks(analysis, subject))
    elif len(chosen) > MAX_LISTED_WORKLOADS:
        form, candidates = ONE_SIZE, [speed(analysis, chosen), *bounds_of_many(analysis), accuracy]
    else:
        form, candidates = ONE_SIZE, [speed(analysis, chosen), batch(analysis, subject), *step]
        candidates.append(more_ranks(analysis, subject))
    lines = [line for line in candidates if line is not None]
    shown = [s.configuration for s in chosen]
    shown += [int(s.scaling["reference"]) for s in chosen if s.scaling is not None]
    first = next((quantity for line in lines[:1] for quantity in line.quantities), None)
    trust = trust_in(analysis, list(dict.fromkeys(shown)), first, others)
    return form, _with_failures(analysis, lines), trust


def _with_failures(analysis: Analysis, lines: list[CardLine]) -> list[CardLine]:
    """Add a line on failed trials if there is space; trust has its own."""
    failures = _failed(analysis)
    return [*lines, failures] if failures is not None and len(lines) < MOST_LINES else lines


def _failed(analysis: Analysis) -> CardLine | None:
    """State how many trials failed or ran out of time, and the most frequent reasons; None if none did."""
    trials = analysis.results.trials
    failed = trials[trials["status"].isin(["failed", "timeout"])]
    return _without_result("failed", failed, len(trials)) if len(failed) else None


def _without_result(label: str, rows: pd.DataFrame, total: int) -> CardLine:
    text = f"{len(rows)} of {total} trials: {common_reasons(rows)}"
    return CardLine("failed", label, text, (Quantity("failed_trials", float(len(rows)), "trials"),))


def _nothing(analysis: Analysis) -> tuple[list[CardLine], Trust]:
    """Say why there is no result, and what to do."""
    trials, none_done = analysis.results.trials, Trust(POOR, "no trial is done")
    if trials.empty:
        return [CardLine("do_next", "do next", f"run the study: {analysis.record.command}")], none_done
    if "done" in set(trials["status"]):
        lines = [CardLine("failed", "no result", UNCOUNTED), CardLine("do_next", "do next", COUNTABLE)]
        return lines, Trust(POOR, "nothing to judge")
    status = trials["status"].iloc[0]
    label = "failed" if set(trials["status"]) & {"failed", "timeout"} else "no result"
    advice = {
        "out_of_memory": "a smaller batch: --batch-per-gpu",
        "infeasible": "a layout that fits: python -m study.scaling plan shows it",
    }
    text = advice.get(status, "fix the cause, then run the study again: only these trials repeat")
    return [_without_result(label, trials, len(trials)), CardLine("do_next", "do next", text)], none_done


def _facts(analysis: Analysis, chosen: list[Subject]) -> dict[str, str | int | float]:
    """Return what was measured. Ranks, batch and device are those of the configuration that the card is about."""
    if chosen:
        row = chosen[0].row
    elif analysis.accuracy is not None:
        row = analysis.accuracy.runs.iloc[0]
    elif len(analysis.results.trials):
        row = analysis.results.trials.iloc[0]
    else:
        return {}
    read = analysis.fields.with_effect([name for name in _FACTS if name in row], row.to_dict())
    known = {name: _plain(row[name]) for name in read if not _is_empty(row[name])}
    facts: dict[str, str | int | float] = {"workload": _workload(_fields_of(analysis, row)), **known}
    facts["device_kind"] = "GPU" if row["device"] == "cuda" else "CPU"
    if device := analysis.environment.get("device"):
        facts["device_name"] = device
    started_at = analysis.results.trials["started_at"].dropna()
    if len(started_at):
        facts["date"] = pd.Timestamp(float(started_at.max()), unit="s").strftime("%Y-%m-%d")
    return facts | {name: analysis.environment[name] for name in _VERSIONS if name in analysis.environment}


_FACTS = ("model", "dataset", "image_size", "precision", "batch_per_gpu", "global_batch", "world_size", "nodes")
_VERSIONS = ("torch", "cuda", "nccl", "driver", "ray")


def _fields_of(analysis: Analysis, row: pd.Series) -> pd.Series:
    """Return the row of the first trial of a configuration, which also has the user's own command."""
    trials = analysis.results.trials
    ids = row["trial_ids"] if "trial_ids" in row else (row["trial_id"],)
    return trials[trials["trial_id"] == ids[0]].iloc[0]


def _workload(row: pd.Series) -> str:
    """Return what was trained: the user's script or function, else the model."""
    if program := own_program(row.get(COMMAND_COLUMN), with_arguments=True):
        return program
    workload = row.get("workload")
    if isinstance(workload, str) and workload:
        return workload.rpartition("/")[2]
    return str(row.get("model") or "own code")


def _plain(value: Any) -> str | int | float:
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or bool(pd.isna(value))


def _title(analysis: Analysis, chosen: list[Subject], facts: dict[str, str | int | float]) -> str:
    """Return the facts in one line: model, precision, batch, and number and kind of GPUs."""
    if not facts:
        return analysis.record.name
    if not chosen and analysis.accuracy is None:
        return _title_of_all(analysis, str(facts["workload"]))
    ranks = study_ranks(analysis)
    of_training = not chosen and analysis.accuracy is not None
    workload = trained_workload(analysis.accuracy) if of_training and analysis.accuracy else str(facts["workload"])
    parts = [_several([subject.label for subject in chosen]) if len(chosen) > 1 else workload]
    if "precision" in facts and not of_training and _is_same("precision", chosen):
        parts[0] += f" {facts['precision']}"
    if not of_training:
        parts[0] += "".join(f" {chosen[0].row[name]}" for name in _USUAL if _is_unusual(name, chosen))
    if "batch_per_gpu" in facts and not of_training and _is_same("batch_per_gpu", chosen):
        parts.append(value_label("batch_per_gpu", facts["batch_per_gpu"], ranks))
    return ", ".join([*parts, _devices(analysis, facts, of_training)])


def _title_of_all(analysis: Analysis, workload: str) -> str:
    """Return the facts that all trials share, and their numbers of ranks, for a study without a result."""
    trials, ranks = analysis.results.trials, study_ranks(analysis)
    shared = [name for name in ("precision", "batch_per_gpu") if name in trials and trials[name].nunique() == 1]
    labels = [value_label(name, _plain(trials[name].dropna().iloc[0]), ranks) for name in shared]
    several = trials["model"].nunique() if "model" in trials else 1
    sizes = sorted(trials["world_size"].astype(int).unique())
    of_ranks = f"{join([str(size) for size in sizes])} {ranks[0] if sizes == [1] else ranks[1]}"
    return ", ".join([f"{several} models" if several > 1 else workload, *labels, of_ranks])


_USUAL = {"parallel": ("ddp", "none"), "execution": ("eager",)}
"""Values of fields that a title leaves out."""


def _is_unusual(field: str, chosen: list[Subject]) -> bool:
    """Return True if all subjects have the same value of a field of `_USUAL`, and a title names it."""
    value = chosen[0].row.get(field) if chosen else None
    return isinstance(value, str) and _is_same(field, chosen) and value not in ("", *_USUAL[field])


def _is_same(field: str, chosen: list[Subject]) -> bool:
    return len({subject.row[field] for subject in chosen}) <= 1


def _several(labels: list[str]) -> str:
    return join(labels) if len(labels) <= 3 else f"{len(labels)} workloads"


def _devices(analysis: Analysis, facts: dict[str, str | int | float], of_training: bool) -> str:
    name = str(facts.get("device_name", "")).replace("NVIDIA ", "").replace("(R)", "").replace("(TM)", "")
    nodes = f" on {facts['nodes']} nodes" if int(facts.get("nodes", 1)) > 1 else ""
    fewest = most = int(facts.get("world_size", 1))
    if of_training and analysis.accuracy is not None:
        sizes = analysis.accuracy.runs["world_size"].astype(int)
        fewest, most = sizes.min(), sizes.max()
    count = number(most, 0) if fewest == most else f"{number(fewest, 0)} to {number(most, 0)}"
    if facts["device_kind"] == "GPU":
        return f"{count} x {name or 'GPU'}{nodes}"
    ranks = "1 CPU rank" if most == 1 else f"{count} CPU ranks"
    return f"{ranks}{nodes} ({name})" if name else f"{ranks}{nodes}"
