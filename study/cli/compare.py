"""The `compare` command: parse its options, print a comparison of two results folders, and choose the exit code."""

import json
import re
from typing import Any

from rich.table import Table

from analysis.compare.folders import (
    COMPARED_MEASURES,
    FASTER,
    NO_REGRESSION,
    REGRESSION,
    SLOWER,
    UNDECIDED,
    UNKNOWN,
    Comparison,
)
from analysis.read.schema import PHASES
from analysis.text import number, percent, with_interval
from study.cli.terminal import print_summary, print_table, print_wrapped
from study.errors import DOES_NOT_FIT, DONE, SOME_FAILED, ConfigurationError, counted, shown

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
_LOW, _HIGH, _MORE = (f"throughput_samples_per_s_{end}" for end in ("low", "high", "more"))
_MAX_LISTED, _MAX_ROWS = 10, 8


def share(text: str) -> float:
    """Convert a percentage such as "5%" to a fraction. Raises ConfigurationError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", text, flags=re.ASCII)
    if not match or float(match[1]) >= 100:
        raise ConfigurationError(
            f"--fail-above: {shown(text)} is not a percentage; allowed: from 0% to below 100%, such as 5%"
        )
    return float(match[1]) / 100


def exit_code(comparison: Comparison, threshold: float | None, allow_missing: bool) -> int:
    """Return the exit code of a comparison; `DONE` without a threshold.

    `SOME_FAILED`: a configuration lost more than the threshold, or failed in B. Otherwise `DOES_NOT_FIT`: a
    configuration is missing in B (unless allowed), none can be judged, or one that cannot be judged has an estimate
    beyond the threshold.
    """
    if threshold is None:
        return DONE
    judgements = comparison.judgements(threshold)
    if comparison.failed or (judgements["judgement"] == REGRESSION).any():
        return SOME_FAILED
    if comparison.only_a and not allow_missing:
        return DOES_NOT_FIT
    is_judged = (judgements["judgement"] == NO_REGRESSION).any()
    return DONE if is_judged and not judgements["is_suspected"].any() else DOES_NOT_FIT


def as_json(comparison: Comparison, threshold: float | None) -> dict[str, Any]:
    """Return a comparison as JSON values. Unknown values are null."""
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
    return {
        "configurations": configurations,
        "failed": [failure.__dict__ for failure in comparison.failed],
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "environments": [{"name": name, "a": a, "b": b} for name, a, b in comparison.environments],
        "assumed": comparison.assumed,
        "left_out": comparison.left_out,
        "judged": comparison.judged,
        "fail_above": threshold,
        "regressions": 0 if threshold is None else int(is_regression.sum()),
    }


def show(comparison: Comparison, before: str, after: str, threshold: float | None, table: bool) -> None:
    """Print the answer, the largest losses and the findings. table: all rows, and the parts of a step."""
    print_wrapped(answer(comparison, threshold))
    print(f"A: {before}\nB: {after}\n")
    cells = _throughput_cells(comparison)
    if table and cells:
        columns = ["", "configuration", "A samples/s", "B samples/s", "B / A [95 %]", "result"]
        print_summary(columns, [(str(i), *of_row) for i, of_row in enumerate(cells, 1)])
        if comparison.rows[[f"{name}_ratio" for name in _PART_HEADERS]].notna().any(axis=None):
            print_wrapped("\nTime of a step and of its parts, B / A (* = significantly different, wide = not resolved)")
            print_table(_parts(comparison))
    elif cells:
        print_summary(
            ["configuration", "B / A [95 %]", "result"],
            [(label, ratio, verdict) for label, _, _, ratio, verdict in cells[:_MAX_ROWS]],
        )
        print_wrapped(f"\n{more_rows(len(cells) - _MAX_ROWS)}--table shows the throughputs and the parts of a step.")
    print()
    for line in (*findings(comparison, threshold), *_context(comparison)):
        print_wrapped(line)


def more_rows(count: int) -> str:
    return f"{counted(count, 'more row')}: " if count > 0 else ""


def answer(comparison: Comparison, threshold: float | None) -> str:
    """Return what the comparison found, in one sentence."""
    rows = comparison.rows
    failed = f"{counted(len(comparison.failed), 'configuration')} failed in B only" if comparison.failed else ""
    if threshold is not None:
        code = exit_code(comparison, threshold, allow_missing=True)
        lost = len(comparison.regressions(threshold))
        loss = f"{lost} of {counted(len(rows), 'configuration')} lost more than {percent(threshold, 1)} of throughput"
        undecided = int(comparison.judgements(threshold)["judgement"].isin([UNDECIDED, UNKNOWN]).sum())
        loss += f"; {undecided} cannot be judged" if undecided else ""
        start = {SOME_FAILED: "Regression", DONE: "No regression"}.get(code, "Cannot be judged")
        return f"{start}: {', and '.join(filter(None, [failed, loss]))}."
    if rows.empty:
        return f"No configuration is done in both: {failed}."
    counts = rows["verdict"].value_counts()
    parts = [f"{name} in {counts[name]}" for name in (SLOWER, FASTER) if name in counts]
    of_all = f"of {counted(len(rows), 'configuration')}"
    text = f"B is {' and '.join(parts)} {of_all}" if parts else f"No significant difference in any {of_all}"
    if parts and len(rows) > counts.get(SLOWER, 0) + counts.get(FASTER, 0):
        text += "; the others do not differ significantly"
    return f"{text}{f'; {failed}' if failed else ''}."


def markdown(comparison: Comparison, before: str, after: str, threshold: float | None) -> str:
    """Return a comparison as Markdown, for a comment on a pull request: findings first, then the throughputs."""
    lines = [f"**Throughput of `{after}` (B) compared with `{before}` (A)**", ""]
    lines += [f"- {_escaped(line)}" for line in (*findings(comparison, threshold), *_context(comparison))]
    if len(comparison.rows):
        lines += ["", "| configuration | A samples/s | B samples/s | B / A [95 %] | |", "|---|---:|---:|---:|---|"]
        lines += [f"| {' | '.join(map(_escaped, cells))} |" for cells in _throughput_cells(comparison)]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text.replace("\n", " "))


def _context(comparison: Comparison) -> list[str]:
    """Return the differences between the environments, assumptions, and excluded trials, one line each."""
    differences = [f"different {name}: {a} in A, {b} in B" for name, a, b in comparison.environments]
    return [*differences, *comparison.assumed, *comparison.left_out]


def findings(comparison: Comparison, threshold: float | None) -> list[str]:
    """Return what was found, one line each: failures and regressions first, then missing and undecided ones."""
    lines = _listed(
        "failed in B, done in A",
        [f"{failure.label}: {failure.status.replace('_', ' ')}: {failure.reason}" for failure in comparison.failed],
    )
    lines += _listed("only in A", list(comparison.only_a)) + _listed("only in B", list(comparison.only_b))
    counts = comparison.rows["verdict"].value_counts()
    lines.append(
        f"{len(comparison.rows)} configurations: {', '.join(f'{count} {name}' for name, count in counts.items())}"
        if len(comparison.rows)
        else "no configuration is done in both"
    )
    if without_interval := len(comparison.rows) - comparison.judged:
        lines.append(
            f"no interval for {without_interval} of {len(comparison.rows)} configurations: one side has a single "
            "repeat; run both with --repeats 3 or more"
        )
    if threshold is None:
        return lines
    judgements = comparison.judgements(threshold)
    if comparison.judged:
        failing = int((judgements["judgement"] == REGRESSION).sum())
        lines.append(
            f"throughput loss above {percent(threshold, 1)} (entire 95 % interval): {failing} of {comparison.judged}"
        )
    undecided = comparison.rows.join(judgements)[judgements["judgement"] == UNDECIDED]
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


def _throughput_cells(comparison: Comparison) -> list[tuple[str, str, str, str, str]]:
    """Return label, throughput in A and B, their ratio, and the verdict of each row."""
    cells = []
    for _, row in comparison.rows.iterrows():
        a, b = (float(row[f"throughput_samples_per_s_{side}"]) for side in "ab")
        decimals = 0 if min(a, b) >= 100 else 2
        ratio = with_interval(float(row[_RATIO]), float(row[_LOW]), float(row[_HIGH]), 3, more=float(row[_MORE]))
        cells.append((str(row["label"]), number(a, decimals), number(b, decimals), ratio, str(row["verdict"])))
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
