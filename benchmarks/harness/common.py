"""Functions that all benchmarks share: the interval of a ratio from interleaved runs, and writing results."""

import json
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from study.store.environment import git_state, measuring_code, node_facts, variables, versions

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).resolve().parent.parent / "results")
Interval = tuple[float, float]


def ratio_interval(log_ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, Interval]:
    """Return the geometric mean of ratios, given as logarithms, and its Student-t interval. Needs two or more."""
    mean = statistics.fmean(log_ratios)
    half = (
        stats.t.ppf(0.5 + confidence / 2, len(log_ratios) - 1)
        * statistics.stdev(log_ratios)
        / math.sqrt(len(log_ratios))
    )
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def abba_ratio(ours: Sequence[float], theirs: Sequence[float], together: int = 1) -> tuple[float, Interval]:
    """Return the ratio ours / theirs of runs interleaved as ABBA ABBA ... Linear drift cancels within each quadruple.

    ours, theirs: two values per quadruple, in running order. together: quadruples per sample. Quadruples of the same
    processes should form one sample if processes differ, for example in their memory layout or cores.
    """
    logs = [
        (math.log(ours[i]) + math.log(ours[i + 1]) - math.log(theirs[i]) - math.log(theirs[i + 1])) / 2
        for i in range(0, len(ours) - 1, 2)
    ]
    return ratio_interval([statistics.fmean(logs[k : k + together]) for k in range(0, len(logs), together)])


def figure(
    name: str, value: float, interval: Interval | None, unit: str, goal: str, holds: bool | None
) -> dict[str, Any]:
    """Print one figure and return it for the summary. `holds` is None if the figure has no goal."""
    print(
        f"{name}: {value:.4g} {unit}"
        + (f" [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else "")
        + f"  goal {goal}: {holds}"
    )
    return {"name": name, "value": value, "interval": interval, "unit": unit, "goal": goal, "holds": holds}


def failure_line(error: Exception) -> str:
    """Return why a part of a benchmark has no result, in one line."""
    return f"failed: {(str(error) or type(error).__name__).splitlines()[0]}"


def command() -> str:
    """Return the command line of this benchmark."""
    return shlex.join(
        ["python", "-m", f"benchmarks.{Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    )


def kept_samples(name: str) -> list[dict[str, Any]]:
    """Return the raw samples that `write_summary` wrote to `results/<name>`. Empty if it never ran."""
    file = RESULTS / name / "summary.json"
    return list(json.loads(file.read_text())["samples"]) if file.exists() else []


def environment_here() -> dict[str, Any]:
    """Return the environment of this machine for a summary."""
    node = {name: value for name, value in node_facts("").items() if name != "node_id"}
    facts = {"node": node, "versions": versions(), "variables": variables(), "git": git_state()}
    return facts | {"measuring_code": measuring_code()}


def write_summary(
    name: str,
    figures: Sequence[dict[str, Any]],
    samples: Sequence[dict[str, Any]],
    environment: dict[str, Any] | None = None,
) -> Path:
    """Write `results/<name>/summary.json`, with one line per raw sample. Return the folder.

    environment: that of the measurement; None for the current machine.
    """
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    if environment is None:
        environment = environment_here()
    summary = {"environment": environment, "command": command(), "figures": list(figures)}
    (folder / "summary.json").write_text(summary_text(summary, samples))
    return folder


def summary_text(summary: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """Return the content of summary.json. It is long with many samples, so each of them is one line.

    Paths of temporary files, in commands and messages, are relative to their folder.
    """
    rows = ",\n".join(f"  {json.dumps(sample)}" for sample in samples)
    text = f'{json.dumps(summary, indent=1)[:-2]},\n "samples": [\n{rows}\n ]\n}}\n'
    return text.replace(f"{tempfile.gettempdir()}/", "")
