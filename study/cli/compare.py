"""The `compare` command: parse its options and print a comparison of two results folders."""

import json
import re
from typing import Any

from rich.table import Table

from analysis.compare.folders import COMPARED_MEASURES, SLOWER, Comparison
from analysis.read.schema import PHASES
from analysis.text import number, percent, with_interval
from study.cli.terminal import terminal
from study.errors import ConfigurationError, shown

_PART_HEADERS = {
    "step_s": "step",
    "load_wait_s": "load",
    "host_to_device_s": "copy",
    "forward_s": "forward",
    "loss_s": "loss",
    "backward_s": "backward",
    "optimizer_s": "optim.",
}
_RATIO = "throughput_samples_per_s_ratio"
_LOW, _HIGH = "throughput_samples_per_s_low", "throughput_samples_per_s_high"
_MAX_LISTED = 10


def share(text: str) -> float:
    """Convert a percentage such as "5%" to a fraction. Raises ConfigurationError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", text, flags=re.ASCII)
    if not match or float(match[1]) >= 100:
        raise ConfigurationError(
            f"--fail-above: {shown(text)} is not a percentage; allowed: from 0% to below 100%, such as 5%"
        )
    return float(match[1]) / 100


def as_json(comparison: Comparison, threshold: float | None) -> dict[str, Any]:
    """Return a comparison as JSON values. Unknown values are null."""
    rows = json.loads(comparison.rows.to_json(orient="records", double_precision=15))
    failing = set() if threshold is None else set(comparison.regressions(threshold).index)
    configurations = [
        {
            "label": row["label"],
            "fields": {name: row[name] for name in comparison.axes},
            "repeats": [int(row["n_a"]), int(row["n_b"])],
            "verdict": row["verdict"],
            "beyond_threshold": None if threshold is None else i in failing,
            **{
                name: {
                    "a": row[f"{name}_a"],
                    "b": row[f"{name}_b"],
                    "ratio": row[f"{name}_ratio"],
                    "interval": [row[f"{name}_low"], row[f"{name}_high"]],
                }
                for name in COMPARED_MEASURES
            },
        }
        for i, row in enumerate(rows)
    ]
    return {
        "configurations": configurations,
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "environments": [{"name": name, "a": a, "b": b} for name, a, b in comparison.environments],
        "assumed": comparison.assumed,
        "left_out": comparison.left_out,
        "judged": comparison.judged,
        "fail_above": threshold,
        "regressions": len(failing),
    }


def show(comparison: Comparison, before: str, after: str, threshold: float | None) -> None:
    """Print a comparison: differing environments, throughput, the parts of a step, and counts."""
    out = terminal()
    out.print(f"A  {before}\nB  {after}\n", soft_wrap=True)
    for name, a, b in comparison.environments:
        out.print(f"different {name}: {a} in A, {b} in B")
    for line in (*comparison.assumed, *comparison.left_out):
        out.print(line)
    if comparison.environments or comparison.assumed or comparison.left_out:
        out.print()
    out.print(_throughput(comparison))
    if comparison.rows[[f"{name}_ratio" for name in _PART_HEADERS]].notna().any(axis=None):
        out.print("\nTime of a step and of its parts, B / A; * = significantly different (95 %)")
        out.print(_parts(comparison))
    out.print()
    for label, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            more = f"; and {len(only) - _MAX_LISTED} more" if len(only) > _MAX_LISTED else ""
            out.print(f"only in {label}: {'; '.join(only[:_MAX_LISTED])}{more}")
    counts = comparison.rows["verdict"].value_counts()
    out.print(
        f"{len(comparison.rows)} configurations: {', '.join(f'{count} {name}' for name, count in counts.items())}"
    )
    if comparison.judged < len(comparison.rows):
        without_interval = len(comparison.rows) - comparison.judged
        out.print(
            f"no interval for {without_interval} of {len(comparison.rows)} configurations: one side has a single "
            "repeat; run both with --repeats 3 or more",
            soft_wrap=True,
        )
    if threshold is not None and comparison.judged:
        failing = len(comparison.regressions(threshold))
        out.print(
            f"throughput loss above {percent(threshold, 1)} (whole 95 % interval): {failing} of {comparison.judged}"
        )


def _throughput(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", padding=(0, 1))
    table.add_column("", justify="right")
    table.add_column("configuration", overflow="fold", ratio=1)
    for header in ("A samples/s", "B samples/s", "B / A [95 %]"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for i, row in comparison.rows.iterrows():
        a, b = (float(row[f"throughput_samples_per_s_{side}"]) for side in "ab")
        decimals = 0 if min(a, b) >= 100 else 2
        ratio = with_interval(float(row[_RATIO]), float(row[_LOW]), float(row[_HIGH]), 3)
        style = "bold red" if row["verdict"] == SLOWER else ""
        cells = (str(row["label"]), number(a, decimals), number(b, decimals), ratio, str(row["verdict"]))
        table.add_row(str(int(str(i)) + 1), *cells, style=style)
    return table


def _parts(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("", justify="right")
    shown_parts = [name for name in ("step_s", *PHASES) if comparison.rows[f"{name}_ratio"].notna().any()]
    for name in shown_parts:
        table.add_column(_PART_HEADERS.get(name, name.removesuffix("_s")), justify="right")
    for i, row in comparison.rows.iterrows():
        cells = []
        for name in shown_parts:
            ratio, low, high = (row[f"{name}_{end}"] for end in ("ratio", "low", "high"))
            cells.append(f"{number(ratio, 3)}{'*' if low > 1 or high < 1 else ' '}")
        table.add_row(str(int(str(i)) + 1), *cells)
    return table
