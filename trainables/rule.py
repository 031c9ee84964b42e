"""A rule on combinations of a trial's fields, and how rules of one kind are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainables.facts import Kind
from trainables.fields import TrialFields, only_with
from trainables.registry import DATASETS, MODELS, SEQUENCE_MODELS, datasets_of, names_with


@dataclass(frozen=True)
class Rule:
    """A combination of field values that is not allowed.

    fields: the fields that conflict. message: the problem, what is allowed and the fix, a format string of the fields.
    """

    fields: tuple[str, ...]
    broken: Callable[[TrialFields], bool]
    message: str

    def explain(self, trial: TrialFields) -> str:
        """Return the message for a trial that breaks this rule."""
        what = f"workload {trial.workload!r}" if trial.workload else f"model {trial.model!r}"
        return self.message.format(what=what, **trial.model_dump())


class RuleError(ValueError):
    def __init__(self, rule: Rule, trial: TrialFields):
        super().__init__(rule.explain(trial))
        self.rule = rule


def listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def reads_sequences(trial: TrialFields) -> bool:
    return not trial.workload and trial.model in SEQUENCE_MODELS


def data(trial: TrialFields, fact: str) -> bool:
    """Return a property of the trial's data set. False for a user's workload, which has data of its own."""
    return not trial.workload and bool(getattr(DATASETS[trial.dataset], fact))


def differs(name: str) -> Callable[[TrialFields], bool]:
    default = TrialFields.model_fields[name].default
    return lambda trial: bool(getattr(trial, name) != default)


def on_cpu(field: str, *values: Any) -> Callable[[TrialFields], bool]:
    return lambda trial: trial.device == "cpu" and getattr(trial, field) in values


def strategy_option(name: str) -> Rule:
    strategies, changed = only_with(name)["parallel"], differs(name)
    return Rule(
        (name, "parallel"),
        lambda trial: trial.parallel not in strategies and changed(trial),
        f"{name} has no effect with parallel {{parallel!r}}; use parallel {listed(strategies)}, or omit {name}",
    )


def image_folder_field(name: str) -> Rule:
    changed = differs(name)

    def broken(trial: TrialFields) -> bool:
        if trial.workload or DATASETS[trial.dataset].image_folder or not changed(trial):
            return False
        return not (name == "augment" and trial.augment == "device" and DATASETS[trial.dataset].in_memory)

    default = TrialFields.model_fields[name].default
    also = " ('device' also with data sets in memory: {})".format(listed(names_with(DATASETS, "in_memory")))
    return Rule(
        (name, "dataset"),
        broken,
        f"{name} {{{name}!r}} requires an image folder ({listed(names_with(DATASETS, 'image_folder'))})"
        f"{also if name == 'augment' else ''}; with dataset {{dataset!r}} use {name} {default!r}",
    )


def epoch_order_field(name: str) -> Rule:
    changed = differs(name)
    return Rule(
        (name, "dataset"),
        lambda trial: (reads_sequences(trial) or data(trial, "on_device")) and changed(trial),
        f"{name} requires a data set with epochs, but dataset {{dataset!r}} has none (one resident batch, or "
        f"continuous text); omit {name}",
    )


def training_field(name: str) -> Rule:
    changed = differs(name)
    return Rule(
        (name, "epochs"),
        lambda trial: not trial.epochs and changed(trial),
        f"{name} {{{name}!r}} requires training by epochs, but epochs is 0 (timed windows); set epochs, or omit {name}",
    )


def wrong_data(reads: Kind) -> Rule:
    return Rule(
        ("model", "dataset"),
        lambda trial: (
            not trial.workload and MODELS[trial.model].reads == reads and not getattr(DATASETS[trial.dataset], reads)
        ),
        f"model {{model!r}} requires {reads}, which dataset {{dataset!r}} does not contain; use dataset "
        f"{listed(datasets_of(reads))}, or another model",
    )


def too_small(size: int) -> Rule:
    return Rule(
        ("image_size", "model"),
        lambda trial: not trial.workload and MODELS[trial.model].smallest_image == size and trial.image_size < size,
        f"image_size {{image_size}} is too small for model {{model!r}}; it must be >= {size}",
    )


def factory_field(name: str) -> Rule:
    """Return the rule for a field that only the project's own loop reads."""
    changed = differs(name)
    return Rule(
        (name, "script", "train_function"),
        lambda trial: trial.door != "factory" and changed(trial) and name not in trial.bound_fields,
        f"{name} {{{name}!r}} is not read by a script or train function; pass it on with --bind {name}=FLAG, or vary "
        "one of its own flags with --vary=FLAG=a,b",
    )
