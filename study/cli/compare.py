"""What `compare` asks for and how it shows it: `analysis.compare.folders` for the command line."""

import json
import re
from typing import Any

from rich.table import Table

from analysis.compare.folders import MEASURES, SLOWER, Comparison
from analysis.load.schema import PHASES
from analysis.text import number, percent, with_interval
from study.cli.terminal import terminal
from study.errors import ConfigurationError, shown

_PARTS = {
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
_MOST_LISTED = 10


def share(text: str) -> float:
    """The share that a percentage such as "5%" names. Raises ConfigurationError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", text, flags=re.ASCII)
    if not match or float(match[1]) >= 100:
        raise ConfigurationError(
            f"--fail-above: {shown(text)} is not a percentage; allowed: from 0% to below 100%, such as 5%"
        )
    return float(match[1]) / 100


def as_json(found: Comparison, threshold: float | None) -> dict[str, Any]:
    """Everything, with null where a value is unknown."""
    rows = json.loads(found.rows.to_json(orient="records", double_precision=15))
    failing = set() if threshold is None else set(found.regressions(threshold).index)
    configurations = [
        {
            "label": row["label"],
            "fields": {name: row[name] for name in found.axes},
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
                for name in MEASURES
            },
        }
        for i, row in enumerate(rows)
    ]
    return {
        "configurations": configurations,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "environments": [{"name": name, "a": a, "b": b} for name, a, b in found.environments],
        "assumed": found.assumed,
        "left_out": found.left_out,
        "judged": found.judged,
        "fail_above": threshold,
        "regressions": len(failing),
    }


def show(found: Comparison, before: str, after: str, threshold: float | None) -> None:
    """Two tables, throughput and the parts of a step, and what else there is to know, for a terminal."""
    out = terminal()
    out.print(f"A  {before}\nB  {after}\n", soft_wrap=True)
    for name, a, b in found.environments:
        out.print(f"unlike: {name}: {a} in A, {b} in B")
    for line in (*found.assumed, *found.left_out):
        out.print(line)
    if found.environments or found.assumed or found.left_out:
        out.print()
    out.print(_throughput(found))
    if found.rows[[f"{name}_ratio" for name in _PARTS]].notna().any(axis=None):
        out.print("\nTime of a step and of its parts, B / A; * beyond noise")
        out.print(_parts(found))
    out.print()
    for label, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            more = f"; and {len(only) - _MOST_LISTED} more" if len(only) > _MOST_LISTED else ""
            out.print(f"only in {label}: {'; '.join(only[:_MOST_LISTED])}{more}")
    counts = found.rows["verdict"].value_counts()
    out.print(f"{len(found.rows)} configurations: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    if found.judged < len(found.rows):
        left = len(found.rows) - found.judged
        count = f"{left} of {len(found.rows)} could not" if found.judged else f"0 of {len(found.rows)} could"
        out.print(
            f"{count} be judged: one side has a single repeat, and so no interval; run both with --repeats 3 or more",
            soft_wrap=True,
        )
    if threshold is not None and found.judged:
        failing = len(found.regressions(threshold))
        what = "have" if failing != 1 else "has"
        out.print(
            f"{failing or 'none'} {what} lost more than {percent(threshold, 1)} of throughput beyond noise (whole interval)"
        )


def _throughput(found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", padding=(0, 1))
    table.add_column("", justify="right")
    table.add_column("configuration", overflow="fold", ratio=1)
    for head in ("A samples/s", "B samples/s", "B / A [95 %]"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for i, row in found.rows.iterrows():
        a, b = (float(row[f"throughput_samples_per_s_{side}"]) for side in "ab")
        decimals = 0 if min(a, b) >= 100 else 2
        ratio = with_interval(float(row[_RATIO]), float(row[_LOW]), float(row[_HIGH]), 3)
        style = "bold red" if row["verdict"] == SLOWER else ""
        cells = (str(row["label"]), number(a, decimals), number(b, decimals), ratio, str(row["verdict"]))
        table.add_row(str(int(str(i)) + 1), *cells, style=style)
    return table


def _parts(found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("", justify="right")
    shown_parts = [name for name in ("step_s", *PHASES) if found.rows[f"{name}_ratio"].notna().any()]
    for name in shown_parts:
        table.add_column(_PARTS.get(name, name.removesuffix("_s")), justify="right")
    for i, row in found.rows.iterrows():
        cells = []
        for name in shown_parts:
            ratio, low, high = (row[f"{name}_{end}"] for end in ("ratio", "low", "high"))
            cells.append(f"{number(ratio, 3)}{'*' if low > 1 or high < 1 else ' '}")
        table.add_row(str(int(str(i)) + 1), *cells)
    return table
