"""Figures of docs/evidence.md: comparison with other people's tools, and of the four entries with each other."""

import re

from scripts.claims.sources import (
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


DOORS = ("doors-1gpu-256", "doors-1gpu", "doors", "doors-vit")
PHASES = {name: figures(name, r"(forward|backward|optimizer) of .*") for name in DOORS}


def _script_ms(case: str, name: str) -> Value:
    """Return a measure of the only run of a script with this delay, in ms."""
    (run,) = (row for row in samples("doors-vit") if row["case"] == case)
    return number(1e3 * run[name])


ENTRIES: Entries = [
    shows("others", ("compared with", *CASES, "goals met"), [*(_tool_row(*tool) for tool in TOOLS), _sweep_row()]),
    stated(
        "goal: steps and all-reduces within 5 %, exposed time within 10 % or 0.2 ms of the Logger's and within 5 %",
        "goal",
    ),
    stated("or 0.1 ms of the profiler's, HTA's share within 2 percentage points", "goal"),
    *(shows(name, ("what", "ratio or share", "goal met"), _door_rows(name)) for name in PHASES),
    says("All {} phases of script, loop and", count([value for value in PHASES["doors-1gpu-256"] if value.holds])),
    says(
        "of the {} phases, {} meet the goal and the others miss it",
        count(PHASES["doors-1gpu"]),
        count([value for value in PHASES["doors-1gpu"] if value.holds]),
    ),
    stated("On one H200 with ViT-B/16 in bf16, batch 256", "setting"),
    stated("At batch 64 the\nhost bounds", "setting"),
    stated("ResNet-50, batch 256, bf16 (`benchmarks/results/doors`", "setting"),
    says(
        "{} of the {} phases of script, loop and train function meet their goal. Two",
        count([value for value in PHASES["doors"] if value.holds]),
        count(PHASES["doors"]),
    ),
    says(
        "Of the {} phases of script and loop, {} meet that goal and the others miss it",
        count(PHASES["doors-vit"]),
        count([value for value in PHASES["doors-vit"] if value.holds]),
    ),
    says(
        "finds {} ms of waiting in steps of {} ms, {} ms with the delay",
        _script_ms("none", "exposed_wait_s"),
        _script_ms("none", "step_s"),
        _script_ms("late rank", "step_s"),
    ),
    stated("within 5 % or 0.2 ms of the factory's", "goal"),
    stated("Goals: throughputs within 1 % of each other, shares from 0.8 to 1.2", "goal"),
    stated("the injected delay of 20 ms", "setting"),
    stated("batch 64 on two H100, VGG-19 at batch 32", "setting"),
    says("the injected delay of 20 ms lengthened the step by {} ms", figure("doors", "late rank: growth of the step")),
    says("batch 64) found a share of {}, which misses the goal", figures("doors-late", "late rank: share .*")[0]),
    says(
        "so that most of the injected delay is hidden: the step grows by {} ms",
        figure("doors-late", "late rank: growth of the step"),
    ),
    says(
        "it grows by {} ms, and a share of {} is found",
        figure("doors-late-vit", "late rank: growth of the step"),
        figures("doors-late-vit", "late rank: share .*")[0],
    ),
]
