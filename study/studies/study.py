"""A study as a value: a question, and the grid of trials that answers it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from study.capacity import Capacity, cpus, gpus
from study.errors import ConfigurationError
from trainables.registry import MODELS

Fields = Mapping[str, Any]
"""Values of a trial's fields, by name, plus optionally the names in `PLAN_ONLY_FIELDS`."""

PLAN_ONLY_FIELDS = ("global_batch", "tokens_per_step", "most_per_gpu", "epoch_steps")
"""Names in `Fields` that are not fields of a trial; the plan resolves them.

global_batch: samples per step of all ranks, instead of `batch_per_gpu`. tokens_per_step: tokens per optimizer step of
all ranks, from which `accumulation_steps` follows. most_per_gpu: the largest batch per GPU; larger
ones are accumulated. epoch_steps: the warm-up lasts one epoch, and the timed window as
many as give it enough steps.
"""

TYPE_OF_PLAN_FIELD = {"global_batch": "batch_per_gpu", "tokens_per_step": "batch_per_gpu"}
"""options that are not fields of a trial -> a field with the same type and limits"""

GPU_WINDOW: dict[str, Any] = {"warmup_steps": 11, "steps": 50, "window_limit_s": 6.0}
"""Timing of published studies on GPUs: the largest batches, whose steps take a second, would take hours otherwise.

A window has 50 steps, or lasts 5 s: plain steps take up to a sixth less than the warm-up steps that its length is from.
"""

_BATCH_FIELDS = {"batch_per_gpu", "global_batch"}


@dataclass(frozen=True)
class Study:
    """A question and the grid that answers it: every combination of `axes` on top of `base`, `repeats` times."""

    name: str
    question: str
    base: Fields
    axes: Mapping[str, tuple[Any, ...]]
    repeats: int
    skip: tuple[Callable[[Fields], str | None], ...] = ()
    """Rules that take one combination and return the reason to skip it, or None."""
    cases: Mapping[str, Fields] = field(default_factory=dict)
    """Named sets of fields. Each overrides `base` and is crossed with the axes, except those whose field it sets."""
    ladder: bool = False
    """True if each case is a step of a ladder and is compared with the one before."""
    simplify: Callable[[Fields], Fields] = dict
    """Returns the simplest fields with the same effect as a combination's, so that equal combinations merge."""
    extra_trials: Mapping[str, Fields] = field(default_factory=dict)
    """Complete, named trials outside the grid. They are not crossed with the axes, and overrides do not change them."""
    extra_follow: tuple[str, ...] = ()
    """Fields whose overrides change the extra trials too, such as the data set."""
    evidence: tuple[str, ...] = ()
    """A module and its options. Called with a file after the trials, it writes numbers that no trial gives as JSON."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """Entries of study.json for the report, such as report_epoch (see `analysis.read.study_record.StudyRecord`)."""

    def with_overrides(self, axes: Mapping[str, tuple[Any, ...]], repeats: int | None = None) -> "Study":
        """Return this study with other values on some axes.

        The batch is either per GPU or global: overriding one removes the other. A user's workload replaces model and
        data of the study. A model with a sequence length of its own does not take that of the study.
        """
        removed = set(axes)
        if _BATCH_FIELDS & set(axes):
            removed |= _BATCH_FIELDS
        if "steps" in axes:
            removed |= {"epoch_steps", "window_limit_s"}
        if any(axes.get("workload", ())):
            removed |= {"model", "dataset", "image_size", "sequence_length"}

        def remaining(fields: Fields) -> Fields:
            return {name: value for name, value in fields.items() if name not in removed}

        base = dict(remaining(self.base))
        if any(MODELS[name].sequence_length for name in axes.get("model", ()) if name in MODELS):
            base.pop("sequence_length", None)
        reordered = {name: axes.get(name, v) for name, v in self.axes.items() if name in axes or name not in removed}
        return dataclasses.replace(
            self,
            base=base,
            axes=reordered | dict(axes),
            repeats=repeats or self.repeats,
            cases={case: remaining(fields) for case, fields in self.cases.items()},
            extra_trials={
                name: dict(fields) | {key: axes[key][0] for key in self.extra_follow if axes.get(key)}
                for name, fields in self.extra_trials.items()
            },
        )

    def only(self, names: Sequence[str]) -> "Study":
        """Return this study with some of its cases, no extra trials and no evidence; without names, all of it.

        Raises ConfigurationError for an unknown name.
        """
        if not names:
            return self
        if unknown := [name for name in names if name not in self.cases]:
            cases = f"its cases are {', '.join(map(repr, self.cases))}" if self.cases else "leave --case out"
            raise ConfigurationError(f"--case: {unknown[0]!r} is no case of the study {self.name!r}; {cases}")
        chosen = {name: fields for name, fields in self.cases.items() if name in names}
        return dataclasses.replace(self, cases=chosen, extra_trials={}, evidence=())

    def combinations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield case name and fields of every combination once, without repeats, then the extra trials."""
        seen: set[frozenset[tuple[str, Any]]] = set()
        for case, case_fields in (self.cases or {"": {}}).items():
            for values in itertools.product(*self.axes.values()):
                crossed = dict(zip(self.axes, values, strict=True))
                fields = dict(self.simplify(dict(self.base) | crossed | dict(case_fields)))
                key = frozenset(fields.items())
                if key not in seen:
                    seen.add(key)
                    yield case, fields
        yield from ((name, dict(fields)) for name, fields in self.extra_trials.items())

    @property
    def varying(self) -> list[str]:
        """Fields in which combinations differ."""
        in_cases = dict.fromkeys(name for fields in self.cases.values() for name in fields)
        return [*(name for name in self.axes if len(self.axes[name]) > 1), *in_cases]


def small_form(on_gpus: bool) -> dict[str, str]:
    """Return the entry of study.json that marks the form of a GPU study that CPU ranks finish in minutes."""
    text = "this study is made for GPUs; on CPU ranks it takes minutes, with smaller models, images and batches."
    return {} if on_gpus else {"small_form": text}


def world_sizes(capacity: Capacity) -> tuple[int, ...]:
    """Return the powers of two up to the number of GPUs; without GPUs, up to two CPU ranks."""
    largest = gpus(capacity) or min(2, cpus(capacity))
    return tuple(2**power for power in range(max(1, largest).bit_length()))
