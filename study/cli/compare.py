"""The `compare` command: parse its options, print a comparison of two results folders, and choose the exit code."""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.table import Table

from analysis.compare.folders import (
    BETTER,
    COMPARED_MEASURES,
    FASTER,
    NO_REGRESSION,
    REGRESSION,
    SLOWER,
    UNDECIDED,
    UNKNOWN,
    WORSE,
    Comparison,
    NothingInCommon,
    compare,
)
from analysis.read.schema import PHASES
from analysis.text import number, percent, with_interval
from study.cli.inputs import existing_results
from study.cli.terminal import print_summary, print_table, print_wrapped
from study.errors import DOES_NOT_FIT, DONE, SOME_FAILED, ConfigurationError, counted, shown
from study.references import REFERENCES, RESULTS, WINDOWS

_PART_HEADERS = {
    "step_s": "step",
    "load_wait_s": "load",
    "host_to_device_s": "copy",
    "forward_s": "forward",
    "loss_s": "loss",
    "backward_s": "backward",
    "optimizer_s": "optim.",
}
_THROUGHPUT_HEADERS = ("configuration", "A samples/s", "B samples/s", "B / A [95 %]", "result")
_EFFICIENCY_HEADERS = ("configuration", "A (%)", "B (%)", "B / A [95 %]", "result")
_EFFICIENCY_NOTE = "A (%), B (%): scaling efficiency, the throughput per rank relative to that on the fewest ranks."
_RATIO = "throughput_samples_per_s_ratio"
_LOW, _HIGH, _MORE = (f"throughput_samples_per_s_{end}" for end in ("low", "high", "more"))
_MAX_LISTED, _MAX_ROWS = 10, 8


@dataclass(frozen=True)
class Gate:
    """What a comparison has to pass. threshold: largest allowed loss, a share; None for no gate.

    of_scaling: of scaling efficiency instead of throughput. allow_missing: configurations that B lacks are accepted.
    """

    threshold: float | None = None
    of_scaling: bool = False
    allow_missing: bool = False

    @property
    def measure(self) -> str:
        return "scaling efficiency" if self.of_scaling else "throughput"

    def rows_of(self, comparison: Comparison) -> pd.DataFrame:
        """Return the rows of the comparison that are judged."""
        return comparison.scaling if self.of_scaling else comparison.rows


def gate(fail_above: str | None, of_scaling: bool, allow_missing: bool, form: str) -> Gate:
    """Return the gate that the options describe. Raises ConfigurationError, also for an unknown form of output."""
    if form not in ("text", "markdown"):
        raise ConfigurationError(f"--format: unknown format {shown(form)}; allowed: text, markdown")
    return Gate(None if fail_above is None else share(fail_above), of_scaling, allow_missing)


def compared(before: str, after: str) -> tuple[str, str, Comparison]:
    """Return the names of baseline and other side, and their comparison. `after` may be a reference.

    Raises ConfigurationError for an unknown reference, a missing folder, or a reference of other configurations, and
    ResultsError.
    """
    baseline, other, may_differ = folders(before, after)
    try:
        comparison = compare(existing_results(baseline), existing_results(other), may_differ)
    except NothingInCommon as error:
        if not may_differ:
            raise
        fix = f"fix: measure those of the reference: python -m study.scaling {REFERENCES[after[1:]].command}"
        raise ConfigurationError(f"{error}; {fix}") from None
    return (after, before, without_missing(comparison)) if may_differ else (before, after, comparison)


def folders(before: str, after: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the baseline, the folder to compare with it, and the fields that may differ.

    after: may be `@NAME` of a reference, which then is the baseline. Raises ConfigurationError for an unknown name.
    """
    if not after.startswith("@"):
        return before, after, ()
    if after[1:] not in REFERENCES:
        allowed = ", ".join(f"@{name}" for name in REFERENCES)
        raise ConfigurationError(f"unknown reference {shown(after)}; allowed: {allowed}")
    return str(RESULTS / REFERENCES[after[1:]].folder), before, WINDOWS


def share(text: str) -> float:
    """Convert a percentage such as "5%" to a fraction. Raises ConfigurationError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", text, flags=re.ASCII)
    if not match or float(match[1]) >= 100:
        raise ConfigurationError(
            f"--fail-above: {shown(text)} is not a percentage; allowed: from 0% to below 100%, such as 5%"
        )
    return float(match[1]) / 100


def without_missing(comparison: Comparison) -> Comparison:
    """Return a comparison with a reference, of which other results may cover a part, without what they lack."""
    return replace(comparison, only_a=())


def exit_code(comparison: Comparison, gate: Gate) -> int:
    """Return the exit code of a comparison; `DONE` without a threshold.

    `SOME_FAILED`: a configuration lost more than the threshold, or failed in B. Otherwise `DOES_NOT_FIT`: a
    configuration is missing in B (unless allowed), none can be judged, or one that cannot be judged has an estimate
    beyond the threshold.
    """
    if gate.threshold is None:
        return DONE
    judgements = comparison.judgements(gate.threshold, of_scaling=gate.of_scaling)
    if comparison.failed or (judgements["judgement"] == REGRESSION).any():
        return SOME_FAILED
    if comparison.only_a and not gate.allow_missing:
        return DOES_NOT_FIT
    is_judged = (judgements["judgement"] == NO_REGRESSION).any()
    return DONE if is_judged and not judgements["is_suspected"].any() else DOES_NOT_FIT


def as_json(comparison: Comparison, gate: Gate) -> dict[str, Any]:
    """Return a comparison as JSON values. Unknown values are null."""
    threshold = gate.threshold
    rows = json.loads(comparison.rows.to_json(orient="records", double_precision=15))
    judgements = comparison.judgements(threshold or 0.0)
    detectable = judgements["detectable"].astype(object).where(judgements["detectable"].notna(), None)
    is_regression = judgements["judgement"] == REGRESSION
    configurations = [
        {
            "label": row["label"],
            "fields": {name: row[name] for name in comparison.axes},
            "repeats": [int(row["n_a"]), int(row["n_b"])],
            "verdict": row["verdict"],
            "beyond_threshold": None if threshold is None else bool(is_regression[i]),
            "judgement": None if threshold is None else judgements.loc[i, "judgement"],
            "detectable_loss": None if threshold is None else detectable[i],
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
    scaling = json.loads(comparison.scaling.to_json(orient="records", double_precision=15))
    of_scaling = comparison.judgements(threshold or 0.0, of_scaling=True)["judgement"]
    for i, row in enumerate(scaling):
        row["efficiency_interval"] = [row.pop("efficiency_low"), row.pop("efficiency_high")]
        row["judgement"] = None if threshold is None else of_scaling[i]
    regressions = of_scaling == REGRESSION if gate.of_scaling else is_regression
    return {
        "configurations": configurations,
        "scaling": scaling,
        "failed": [failure.__dict__ for failure in comparison.failed],
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "environments": [{"name": name, "a": a, "b": b} for name, a, b in comparison.environments],
        "assumed": comparison.assumed,
        "left_out": comparison.left_out,
        "judged": comparison.judged,
        "fail_above": threshold,
        "measure": gate.measure,
        "regressions": 0 if threshold is None else int(regressions.sum()),
    }


def show_as(form: str, comparison: Comparison, before: str, after: str, gate: Gate, table: bool) -> None:
    """Print a comparison as json, markdown or text. table: see `show`."""
    if form == "json":
        print(json.dumps(as_json(comparison, gate), indent=1))
    elif form == "markdown":
        print(markdown(comparison, before, after, gate))
    else:
        show(comparison, before, after, gate, table)


def show(comparison: Comparison, before: str, after: str, gate: Gate, table: bool) -> None:
    """Print the answer, the largest losses and the findings. table: all rows, and the parts of a step."""
    is_reference = before.startswith("@")
    scaling = scaling_answer(comparison, is_reference)
    print_wrapped(scaling if scaling and is_reference else answer(comparison, gate))
    print(f"A: {before}\nB: {after}\n")
    if gate.of_scaling and len(comparison.scaling):
        efficiencies = _efficiency_cells(comparison)
        print_summary(_EFFICIENCY_HEADERS, efficiencies if table else efficiencies[:_MAX_ROWS])
        print_wrapped(_EFFICIENCY_NOTE)
        if table:
            print()
        else:
            print_wrapped(f"\n{more_rows(len(efficiencies) - _MAX_ROWS)}--table shows the throughputs too.")
    cells = _throughput_cells(comparison) if table or not gate.of_scaling else []
    if table and cells:
        print_summary(["", *_THROUGHPUT_HEADERS], [(str(i), *of_row) for i, of_row in enumerate(cells, 1)])
        if comparison.rows[[f"{name}_ratio" for name in _PART_HEADERS]].notna().any(axis=None):
            print_wrapped("\nTime of a step and of its parts, B / A (* = significantly different, wide = not resolved)")
            print_table(_parts(comparison))
    elif cells:
        print_summary(
            ["configuration", "B / A [95 %]", "result"],
            [(label, ratio, result) for label, _, _, ratio, result in cells[:_MAX_ROWS]],
        )
        print_wrapped(f"\n{more_rows(len(cells) - _MAX_ROWS)}--table shows the throughputs and the parts of a step.")
    print()
    more = [answer(comparison, gate) if is_reference else scaling] if scaling else []
    for line in (*more, *findings(comparison, gate), *_context(comparison)):
        print_wrapped(line)


def more_rows(count: int) -> str:
    return f"{counted(count, 'more row')}: " if count > 0 else ""


def scaling_answer(comparison: Comparison, is_reference: bool = False) -> str:
    """Return how B's rate on the fewest ranks and its scaling to the most compare with A's; empty without scaling.

    is_reference: A is a reference, and B is the user's.
    """
    rows = comparison.scaling
    if rows.empty:
        return ""
    rows = rows[rows["reference_world_size"] == rows["reference_world_size"].min()]
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    fewest, most = int(rows["reference_world_size"].min()), int(rows["world_size"].max())
    scaling = _range(rows["efficiency_ratio"])
    if len(rows) == 1:
        row = rows.iloc[0]
        ends = (float(row[f"efficiency_{end}"]) for end in ("ratio", "low", "high", "more"))
        value, low, high, more = ends
        scaling = with_interval(value, low, high, 2, more=more)
    of_b, of_a = ("Your", "the reference's") if is_reference else ("B's", "A's")
    return (
        f"{of_b} rate on {counted(fewest, 'rank')} is {_range(rows['rate_ratio'])} times {of_a}, "
        f"and {of_b.replace('Y', 'y')} scaling to {counted(most, 'rank')} is {scaling} times {of_a}."
    )


def _range(values: pd.Series) -> str:
    least, most = (number(float(end), 2) for end in (values.min(), values.max()))
    return least if least == most else f"{least} to {most}"


def answer(comparison: Comparison, gate: Gate) -> str:
    """Return what the comparison found, in one sentence."""
    rows, threshold = gate.rows_of(comparison), gate.threshold
    failed = f"{counted(len(comparison.failed), 'configuration')} failed in B only" if comparison.failed else ""
    if threshold is not None:
        code = exit_code(comparison, replace(gate, allow_missing=True))
        judgements = comparison.judgements(threshold, of_scaling=gate.of_scaling)["judgement"]
        lost = int((judgements == REGRESSION).sum())
        loss = (
            f"{lost} of {counted(len(rows), 'configuration')} lost more than {percent(threshold, 1)} of {gate.measure}"
        )
        undecided = int(judgements.isin([UNDECIDED, UNKNOWN]).sum())
        loss += f"; {undecided} cannot be judged" if undecided else ""
        start = {SOME_FAILED: "Regression", DONE: "No regression"}.get(code, "Cannot be judged")
        return f"{start}: {', and '.join(filter(None, [failed, loss]))}."
    if rows.empty:
        return f"No configuration is done in both: {failed}."
    counts = rows["verdict"].value_counts()
    if counts.get(UNKNOWN, 0) == len(rows):
        return f"No interval for any of {counted(len(rows), 'configuration')}: one side has a single repeat."
    names = (WORSE, BETTER) if gate.of_scaling else (SLOWER, FASTER)
    parts = [f"{name if gate.of_scaling else f'is {name}'} in {counts[name]}" for name in names if name in counts]
    of_all = f"of {counted(len(rows), 'configuration')}"
    text = f"B {' and '.join(parts)} {of_all}" if parts else f"No significant difference in any {of_all}"
    if parts and len(rows) > sum(counts.get(name, 0) for name in names):
        text += "; the others do not differ significantly"
    return f"{text}{f'; {failed}' if failed else ''}."


def markdown(comparison: Comparison, before: str, after: str, gate: Gate) -> str:
    """Return a comparison as Markdown, for a comment on a pull request: findings first, then the throughputs."""
    lines = [f"**{gate.measure.capitalize()} of `{after}` (B) compared with `{before}` (A)**", ""]
    scaling = [scaling_answer(comparison, before.startswith("@"))] if len(comparison.scaling) else []
    lines += [f"- {_escaped(line)}" for line in (*scaling, *findings(comparison, gate), *_context(comparison))]
    headers, cells = _THROUGHPUT_HEADERS, _throughput_cells(comparison)
    if gate.of_scaling and len(comparison.scaling):
        headers, cells = _EFFICIENCY_HEADERS, _efficiency_cells(comparison)
    if cells:
        lines += ["", f"| {' | '.join(headers)} |", "|---|---:|---:|---:|---|"]
        lines += [f"| {' | '.join(map(_escaped, row))} |" for row in cells]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text.replace("\n", " "))


def _context(comparison: Comparison) -> list[str]:
    """Return the differences between the environments, assumptions, and excluded trials, one line each."""
    differences = [f"different {name}: {a} in A, {b} in B" for name, a, b in comparison.environments]
    return [*differences, *comparison.assumed, *comparison.left_out]


def findings(comparison: Comparison, gate: Gate) -> list[str]:
    """Return what was found, one line each: failures and regressions first, then missing and undecided ones."""
    lines = _listed(
        "failed in B, done in A",
        [f"{failure.label}: {failure.status.replace('_', ' ')}: {failure.reason}" for failure in comparison.failed],
    )
    lines += _listed("only in A", list(comparison.only_a)) + _listed("only in B", list(comparison.only_b))
    rows = gate.rows_of(comparison)
    counts = rows["verdict"].value_counts()
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    nothing = (
        "no configuration ran on several numbers of ranks" if gate.of_scaling else "no configuration is done in both"
    )
    lines.append(f"{counted(len(rows), 'configuration')}: {listed}" if len(rows) else nothing)
    if without_interval := counts.get(UNKNOWN, 0):
        lines.append(
            f"no interval for {without_interval} of {counted(len(rows), 'configuration')}: one side has a single "
            "repeat; run both with --repeats 3 or more"
        )
    if gate.threshold is None:
        return lines
    judgements = comparison.judgements(gate.threshold, of_scaling=gate.of_scaling)
    if judged := int((judgements["judgement"] != UNKNOWN).sum()):
        failing = int((judgements["judgement"] == REGRESSION).sum())
        loss = f"{gate.measure} loss above {percent(gate.threshold, 1)}"
        lines.append(f"{loss} (entire 95 % interval): {failing} of {judged}")
    undecided = gate.rows_of(comparison).join(judgements)[judgements["judgement"] == UNDECIDED]
    return lines + _listed(
        "cannot be judged",
        [
            f"{row['label']} (would detect a loss of {percent(row['detectable'])} or more)"
            for _, row in undecided.iterrows()
        ],
    )


def _listed(start: str, items: list[str]) -> list[str]:
    """Return one line with at most `_MAX_LISTED` items; none without items."""
    more = f"; and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return [f"{start}: {'; '.join(items[:_MAX_LISTED])}{more}"] if items else []


def _throughput_cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return label, throughput in A and B, their ratio, and the verdict of each row."""
    cells: list[tuple[str, ...]] = []
    for _, row in comparison.rows.iterrows():
        a, b = (float(row[f"throughput_samples_per_s_{side}"]) for side in "ab")
        decimals = 0 if min(a, b) >= 100 else 2
        ratio = with_interval(float(row[_RATIO]), float(row[_LOW]), float(row[_HIGH]), 3, more=float(row[_MORE]))
        cells.append((str(row["label"]), number(a, decimals), number(b, decimals), ratio, str(row["verdict"])))
    return cells


def _efficiency_cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return label, scaling efficiency in A and B, their ratio, and the verdict of each row."""
    cells: list[tuple[str, ...]] = []
    for _, row in comparison.scaling.iterrows():
        ratio, low, high, more = (float(row[f"efficiency_{end}"]) for end in ("ratio", "low", "high", "more"))
        shares = (number(100 * float(row[f"efficiency_{side}"]), 1) for side in "ab")
        cells.append((str(row["label"]), *shares, with_interval(ratio, low, high, 3, more=more), str(row["verdict"])))
    return cells


def _parts(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("", justify="right")
    shown_parts = [name for name in ("step_s", *PHASES) if comparison.rows[f"{name}_ratio"].notna().any()]
    for name in shown_parts:
        table.add_column(_PART_HEADERS.get(name, name.removesuffix("_s")), justify="right")
    for i, row in comparison.rows.iterrows():
        cells = []
        for name in shown_parts:
            ratio, low, high, more = (row[f"{name}_{end}"] for end in ("ratio", "low", "high", "more"))
            cells.append("wide " if more > 0 else f"{number(ratio, 3)}{'*' if low > 1 or high < 1 else ' '}")
        table.add_row(str(int(str(i)) + 1), *cells)
    return table
