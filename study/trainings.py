"""What a plan says of its trials: how many trainings run side by side, and what to know before anyone trusts them."""

from collections.abc import Container, Sequence

from study.grid import Capacity
from study.layout import can_share_host, concurrent_slots
from trainables.schedule import warning
from trainables.trial import Trial


def side_by_side(asked: int, trials: Sequence[Trial], nodes: Capacity) -> int:
    """How many trainings run at a time: as many as were asked for, as far as they fit."""
    trainings = [trial for trial in trials if can_share_host(trial)]
    return max(1, min(asked, len(concurrent_slots(trainings, nodes)))) if asked > 1 and trainings else 1


def warnings(asked: int, running: int, trials: Sequence[Trial]) -> list[str]:
    """Lines for people, each once; `running` of the `asked` trainings run at a time."""
    lines = [f"warning: {line}" for trial in trials if trial.epochs and (line := warning(trial))]
    if running < asked and any(map(can_share_host, trials)):
        lines.append(f"--max-concurrent {asked}: no more than {running} fit here, so that many train side by side")
    return list(dict.fromkeys(lines))


def replaced_by_workload(asked: Container[str], trials: Sequence[Trial]) -> list[str]:
    """Lines for people on fields in place of which a user's workload stands, where they were asked for or differ."""
    lines = []
    for field in ("model", "dataset"):
        values = list(dict.fromkeys(getattr(trial, field) for trial in trials if trial.workload))
        if len(values) > 1 or (values and field in asked):
            lines.append(
                f"warning: a workload brings its own {field}; {field} {', '.join(values)} only reaches its function, as "
                f"trial.{field}" + (", and where that does not use it, all are the same" if len(values) > 1 else "")
            )
    return lines
