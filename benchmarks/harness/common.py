"""What all benchmarks share: the interval of a ratio from interleaved runs, and how a result is written."""

import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from study.store.environment import git_state, measuring_code, node_facts, variables, versions

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).resolve().parent.parent / "results")
Interval = tuple[float, float]


def ratio_interval(log_ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, Interval]:
    """Geometric mean of ratios given as logarithms, and its Student-t interval. Needs two or more."""
    mean = statistics.fmean(log_ratios)
    half = (
        stats.t.ppf(0.5 + confidence / 2, len(log_ratios) - 1)
        * statistics.stdev(log_ratios)
        / math.sqrt(len(log_ratios))
    )
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def abba_ratio(ours: Sequence[float], theirs: Sequence[float], together: int = 1) -> tuple[float, Interval]:
    """Ratio ours / theirs of runs interleaved as ABBA ABBA ...: drift that is linear in time cancels in each quadruple.

    `ours` and `theirs` hold two values a quadruple, in the order of running. So many quadruples `together` are one sample:
    those of the same processes, where processes differ (by where they lie in memory, and on which cores).
    """
    logs = [
        (math.log(ours[i]) + math.log(ours[i + 1]) - math.log(theirs[i]) - math.log(theirs[i + 1])) / 2
        for i in range(0, len(ours) - 1, 2)
    ]
    return ratio_interval([statistics.fmean(logs[k : k + together]) for k in range(0, len(logs), together)])


def figure(
    name: str, value: float, interval: Interval | None, unit: str, goal: str, holds: bool | None
) -> dict[str, Any]:
    """One figure of a summary; `holds` None where there was nothing to judge."""
    print(
        f"{name}: {value:.4g} {unit}"
        + (f" [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else "")
        + f"  goal {goal}: {holds}"
    )
    return {"name": name, "value": value, "interval": interval, "unit": unit, "goal": goal, "holds": holds}


def command() -> str:
    """What was typed to run this benchmark."""
    return shlex.join(
        ["python", "-m", f"benchmarks.{Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    )


def kept_samples(name: str) -> list[dict[str, Any]]:
    """The raw samples that `write_summary` left in `results/<name>`; none where it never ran."""
    file = RESULTS / name / "samples.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_summary(
    name: str,
    figures: Sequence[dict[str, Any]],
    samples: Sequence[dict[str, Any]],
    environment: dict[str, Any] | None = None,
) -> Path:
    """Writes `results/<name>/summary.json` and the raw samples beside it; gives the folder.

    `environment` is that of the measurement; None: it was made here and now.
    """
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    if environment is None:
        environment = {"node": node_facts(""), "versions": versions(), "variables": variables(), "git": git_state()}
        environment["measuring_code"] = measuring_code()
        environment["node"].pop("node_id")
    summary = {"environment": environment, "command": command(), "figures": list(figures)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder
