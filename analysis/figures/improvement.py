"""The waterfall of `improve`: what each change that is kept adds to the throughput."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis.figures.style import COLOURS, GRID, INK, NARROW_INCHES, STYLE, TEXT, is_narrow, wrapped
from analysis.study import Analysis
from analysis.text import number

_BAR_INCHES = 0.38


def improvement(analysis: Analysis) -> Figure | None:
    """Gain over the baseline: each change added, and the result verified in fresh worker groups."""
    rows = improvement_rows(analysis)
    if len(rows) < 3:
        return None
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        size = (NARROW_INCHES if is_narrow() else 7.2, 0.9 + _BAR_INCHES * len(rows))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        is_step = rows["kind"] == "step"
        starts = rows["start"].where(is_step, 0.0)
        colours = [
            GRID if kind == "baseline" else COLOURS[2] if kind == "step" else COLOURS[0] for kind in rows["kind"]
        ]
        axis.barh(range(len(rows)), rows["end"] - starts, left=starts, height=0.68, color=colours, linewidth=0)
        for i, ends in enumerate(rows[["start", "end", "low", "high"]].to_numpy(dtype=float)):
            _, end_of_bar, low, high = (float(value) for value in ends)
            if not math.isnan(low):
                axis.hlines(i, low, high, color=INK, linewidth=1.2)
            end = float(np.nanmax(ends))
            axis.annotate(f"{number(end_of_bar, 2)}x", (end, i), xytext=(5, 0), textcoords="offset points", va="center")
        axis.set_xlim(0, 1.12 * float(rows[["start", "end", "high"]].max().max()))
        axis.set_yticks(range(len(rows)), [wrapped(text, 4 if is_narrow() else 2) for text in rows["change"]])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlabel(f"{rows['goal'].iloc[0]}, relative to the baseline")
    return figure


def improvement_rows(analysis: Analysis) -> pd.DataFrame:
    """Return the bars: change, kind (baseline, step or verified), start, end, low, high and goal."""
    columns = ["change", "kind", "start", "end", "low", "high", "goal"]
    found = analysis.record.search
    if found is None or found.gain is None or not found.kept:
        return pd.DataFrame(columns=columns)
    rows: list[dict[str, object]] = [{"change": "baseline", "kind": "baseline", "start": 0.0, "end": 1.0}]
    end = 1.0
    for lever, gain in found.steps:
        if lever in found.kept:
            rows.append({"change": f"+ {lever}", "kind": "step", "start": end, "end": end * gain.value})
            end *= gain.value
    gain = found.gain
    rows.append(
        {"change": "verified", "kind": "verified", "start": 0.0, "end": gain.value, "low": gain.low, "high": gain.high}
    )
    return pd.DataFrame(rows, columns=columns).assign(goal=found.raised).astype({"low": float, "high": float})
