"""A study as a value: a question, and the grid of trials that answers it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from study.capacity import Capacity

Fields = Mapping[str, Any]
"""values of a trial's fields, by name; `global_batch` may stand in place of `batch_per_gpu`, `most_per_gpu` beside it for
the batch above which it is accumulated, and `epoch_steps` for a warm-up and timed windows that last an epoch each"""


NO_FIELDS = ("global_batch", "most_per_gpu", "epoch_steps")
"""names in `Fields` that are no fields of a trial"""


@dataclass(frozen=True)
class Study:
    """A question and the grid that answers it: every combination of `axes` over `base`, `repeats` times.

    cases: named sets of fields, each laid over `base` and crossed with the axes, for studies that are no plain grid; an
    axis whose field a case has is not crossed with it; none: `base` alone. simplify: fields that stand in place of a
    combination's, where it comes to the same as a simpler one. ladder: the cases are rungs, each compared with the one before. A skip rule looks at one
    combination and gives the reason why it means nothing, or None. beside: named sets of all fields that matter to a
    trial, which answer a part of the question that the axes do not: they are not crossed, and asking changes none.
    report: entries that study.json keeps for the report, such as report_epoch (see `analysis.load.study_record.StudyRecord`).
    """

    name: str
    question: str
    base: Fields
    axes: Mapping[str, tuple[Any, ...]]
    repeats: int
    skip: tuple[Callable[[Fields], str | None], ...] = ()
    cases: Mapping[str, Fields] = field(default_factory=dict)
    ladder: bool = False
    simplify: Callable[[Fields], Fields] = dict
    beside: Mapping[str, Fields] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)

    def asking(self, axes: Mapping[str, tuple[Any, ...]], repeats: int | None = None) -> "Study":
        """This study with other values on some axes. The batch is per GPU or global: asking for one drops the other."""
        gone = set(axes) | (_BATCH if _BATCH & set(axes) else set()) | ({"epoch_steps"} if "steps" in axes else set())
        kept = {name: axes.get(name, values) for name, values in self.axes.items() if name in axes or name not in gone}
        base = {name: value for name, value in self.base.items() if name not in gone}
        cases = {
            case: {name: value for name, value in fields.items() if name not in gone}
            for case, fields in self.cases.items()
        }
        return dataclasses.replace(
            self, base=base, axes=kept | dict(axes), repeats=repeats or self.repeats, cases=cases
        )

    def combinations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name of the case and fields of every combination, each once, without repeats; cases that have become equal
        are one."""
        seen: set[frozenset[tuple[str, Any]]] = set()
        for case, of_case in (self.cases or {"": {}}).items():
            for values in itertools.product(*self.axes.values()):
                crossed = dict(zip(self.axes, values, strict=True))
                fields = dict(self.simplify(dict(self.base) | crossed | dict(of_case)))
                key = frozenset(fields.items())
                if key not in seen:
                    seen.add(key)
                    yield case, fields
        yield from ((name, dict(fields)) for name, fields in self.beside.items())

    @property
    def varying(self) -> list[str]:
        """Fields in which combinations differ."""
        in_cases = dict.fromkeys(name for fields in self.cases.values() for name in fields)
        return [*(name for name in self.axes if len(self.axes[name]) > 1), *in_cases]


_BATCH = {"batch_per_gpu", "global_batch"}


def gpus(capacity: Capacity) -> int:
    return sum(node.gpus for node in capacity)


def world_sizes(capacity: Capacity) -> tuple[int, ...]:
    """Powers of two up to all GPUs; without GPUs up to two CPU ranks, which is enough to show the whole path."""
    most = gpus(capacity) or min(2, sum(node.cpus for node in capacity))
    return tuple(2**power for power in range(max(1, most).bit_length()))
