"""Figures of docs/evidence.md: comparison with other people's tools, and of the four entries with each other."""

import re
import statistics

import pandas as pd

from scripts.claims.sources import (
    RESULTS,
    Cell,
    Entries,
    Value,
    cell,
    count,
    figure,
    figures,
    number,
    on_page,
    samples,
    summary,
    yes_no,
)
from study.errors import counted

says, stated, shows = on_page("docs/evidence.md")

CASES = ("ResNet-50 batch 32", "VGG-19 batch 32 without P2P")
TOOLS = (
    ("step, wall clock", "step, ours / wall clock"),
    ("step without communication, wall clock", "no_sync_step, ours / wall clock"),
    ("exposed communication, DDP's Logger", "exposed, ours / Logger"),
    ("exposed communication, torch's profiler", "exposed, ours / profiler"),
    ("share of communication that overlaps with computation, HTA", "overlap, ours / HTA"),
)


def _tool_row(label: str, name: str) -> tuple[str | Cell, ...]:
    values = [figure("others", f"{case}: {name}") for case in CASES]
    return label, *(cell("{:2}", value) for value in values), yes_no(*values)


def _sweep_row() -> tuple[str | Cell, ...]:
    cells, all_values = [], []
    for case in CASES:
        values = figures("others", re.escape(f"{case}: all-reduce of ") + r".*, ours / bare sweep")
        cells.append(cell("{:2v} to {:2v}", min(values, key=lambda v: v.value), max(values, key=lambda v: v.value)))
        all_values += values
    return "time of an all-reduce of 16 MiB or more, bare sweep", *cells, yes_no(*all_values)


def _gpus(found: re.Match[str]) -> str:
    return f", {found[1]} GPU" + "s" * (found[1] != "1")


def _door_rows(folder: str) -> list[tuple[str | Cell, ...]]:
    rows: list[tuple[str | Cell, ...]] = []
    for name, row in summary(folder).items():
        if row["goal"].startswith(("0.", ">=")):
            value = figure(folder, name)
            label = re.sub(r" on (\d+), (\d+) rounds?$", _gpus, re.sub(r" \([^)]*\)", "", name))
            decimals = "2v" if "share" in name else "3" if value.interval else "3v"
            rows.append((label, cell(f"{{:{decimals}}}", value), yes_no(value)))
    return rows


DOORS = ("doors-1gpu-256", "doors-1gpu", "doors-2gpu", "doors")
PHASES = {name: figures(name, r"(forward|backward|optimizer) of .*") for name in DOORS}


def _late_ms(name: str) -> Value:
    """Return by how much a measure of the delayed scripts grows, in ms, mean over rounds."""
    by_case = {
        case: statistics.fmean(row[name] for row in samples("doors-2gpu") if row["case"] == case)
        for case in ("none", "late rank")
    }
    return number(1e3 * (by_case["late rank"] - by_case["none"]))


def _buckets() -> tuple[Value, Value, Value]:
    """Return the time between buckets on rank 0 and on rank 1, and how late rank 1 is at its first bucket, in ms.

    Of the first round with the late rank, medians over steps and the buckets of equal size.
    """
    (trial,) = (row["trial_id"] for row in samples("doors-2gpu") if row["case"] == "late rank" and row["round"] == 0)
    rows = pd.read_parquet(RESULTS / "doors-2gpu" / "study" / "buckets.parquet")
    rows = rows[(rows["trial_id"] == trial) & (rows["window"] == "communication")]
    ready_ms = 1e3 * rows.groupby(["bucket", "rank"])["ready_s"].median().unstack()
    between_ms = ready_ms.diff().iloc[2:-1].median()
    return number(between_ms[0]), number(between_ms[1]), number(ready_ms[1].iloc[0] - ready_ms[0].iloc[0])


def _accepted_rows() -> list[tuple[str | Cell, ...]]:
    """Return what was measured of each script on 1 and on 2 GPUs: its plain steps, and ms of step and phases."""
    rows: list[tuple[str | Cell, ...]] = []
    for row in [*samples("accepted-1gpu"), *samples("accepted-2gpu")]:
        steps = figure(f"accepted-{row['size']}gpu", f"{row['script']}, {counted(row['size'], 'rank')}: plain steps")
        times = [number(1e3 * row[f"{name}_s"]) for name in ("step", "forward", "backward", "optimizer")]
        arguments = f"`{row['arguments']}`" if row["arguments"] else "none"
        measured = (cell("{:0v}", steps), *(cell("{:1v}", each) for each in times), yes_no(steps))
        rows.append((row["script"], str(row["size"]), arguments, *measured))
    return rows


ENTRIES: Entries = [
    shows(
        "accepted",
        ("script", "GPUs", "arguments", "plain steps", "step, ms", "forward", "backward", "optimizer", "goal met"),
        _accepted_rows(),
    ),
    stated("none of the 20 plain steps asked for", "setting"),
    shows("others", ("compared with", *CASES, "goals met"), [*(_tool_row(*tool) for tool in TOOLS), _sweep_row()]),
    stated(
        "goal: steps and all-reduces within 5 %, exposed time within 10 % or 0.2 ms of the Logger's and within 5 %",
        "goal",
    ),
    stated("or 0.1 ms of the profiler's, HTA's share within 2 percentage points", "goal"),
    *(shows(name, ("what", "ratio or share", "goal met"), _door_rows(name)) for name in PHASES),
    says(
        "All {} phases of script, loop and train function meet their goal too",
        count([value for value in PHASES["doors-1gpu-256"] if value.holds]),
    ),
    says(
        "of the {} phases, {} meet the goal and the others miss it",
        count(PHASES["doors-1gpu"]),
        count([value for value in PHASES["doors-1gpu"] if value.holds]),
    ),
    stated("On one H200 with ViT-B/16 in bf16, batch 256", "setting"),
    stated("At batch 64 the\nhost bounds", "setting"),
    stated("slow link is that of VGG-19 at batch 32", "setting"),
    says(
        "All {} phases of script, loop and train function meet their goal. The",
        count([value for value in PHASES["doors-2gpu"] if value.holds]),
    ),
    stated("is delayed by 20 ms", "setting"),
    says("which takes {} ms longer", figure("doors-2gpu", "late rank: growth of the step")),
    says("waits only {} ms longer after its last", _late_ms("exposed_wait_s")),
    says("it needs {} ms where the late rank needs {} ms. So the lead of {} ms", *_buckets()),
    says("the first part alone is {} of the cost", number(_late_ms("exposed_wait_s").value / _late_ms("step_s").value)),
    says("computed, it is {} (", figures("doors-late-vit", "late rank: share .*")[0]),
    stated("At batch 64, where less", "setting"),
    stated("ResNet-50, batch 256 (`benchmarks/results/doors`", "setting"),
    says(
        "{} of the {} phases meet their goal. Two attributions",
        count([value for value in PHASES["doors"] if value.holds]),
        count(PHASES["doors"]),
    ),
    says("The delay of 20 ms lengthened the step by {} ms", figure("doors", "late rank: growth of the step")),
    stated("The delay of 20 ms", "setting"),
    stated("within 5 % or 0.2 ms of the factory's", "goal"),
    stated("Goals: throughputs within 1 % of each other, shares from 0.8 to 1.2", "goal"),
]
