"""Communication breakdown of strategies that communicate not only in DDP's buckets, from traces of all ranks.

ZeRO-1 also sends updated weights. Sharded weights are gathered before use, and their gradients reduced and scattered.
What a collective hides behind is all computation, not only the backward pass.
"""

import numpy as np
import pandas as pd

from analysis.measure.collectives import MATCHED, matched
from analysis.measure.communication import WAIT_MATTERS_SHARE, largest_excess, least, others, rank_medians
from analysis.read.reduce import TRACED_WINDOWS

WINDOW = "profile"
"""The window of steps that strategies of this project trace."""

TRACED_COLUMNS = [
    "communication_s", "wire_s", "wait_s", "hidden_s", "exposed_s", "exposed_wire_s", "exposed_wait_s",
    "waited_for_rank", "lateness_s", "hidden_lateness_s", "late_by_load_s", "communication_step_s", "kernel_s",
    "traced",
]  # fmt: skip

_RANK = ["trial_id", "rank"]


def traced_breakdown(collectives: pd.DataFrame, window_rows: pd.DataFrame) -> pd.DataFrame:
    """Return `TRACED_COLUMNS` per trial whose traced steps have totals of their collectives, indexed by trial_id.

    collectives: in the layout of collectives.parquet. window_rows: see `reduce.windows`.

    The columns have the meaning of those of `communication_breakdown`, but for all collectives. communication_s: time
    with at least one collective in progress. hidden_s, exposed_s: its parts with and without computation. wire_s,
    wait_s: its parts by the share of transfer and wait in the sum over collectives, which may overlap; see `matched`.
    exposed_wire_s, exposed_wait_s: parts of exposed_s, likewise. A rank waits at one collective and is late at another,
    so each collective is divided by itself, and the parts are added up per step. The rank that usually arrives last is
    that with the shortest exposed wait; values are medians over the other ranks. lateness_s: by how much its exposed
    wait is shorter. hidden_lateness_s: how much longer than that the others wait for it at one collective, usually
    behind computation. kernel_s: time with computation on the GPU; null on CPU ranks. traced: 1.
    """
    totals = window_rows[window_rows["window"].isin(TRACED_WINDOWS) & window_rows["collectives_s"].notna()]
    rows = matched(collectives.merge(totals[["trial_id", "window"]].drop_duplicates()))
    if rows.empty:
        return pd.DataFrame(columns=TRACED_COLUMNS, index=pd.Index([], name="trial_id"), dtype=float)
    sums = rows.groupby([*_RANK, "step"])[["duration_s", "transfer_s", "exposed_s", "exposed_transfer_s"]].sum()
    shares = pd.DataFrame(
        {
            "transfer": sums["transfer_s"] / sums["duration_s"].where(sums["duration_s"] > 0),
            "exposed_transfer": sums["exposed_transfer_s"] / sums["exposed_s"].where(sums["exposed_s"] > 0),
        }
    )
    shares = shares.groupby(level=_RANK).median().fillna(0.0)
    names = ["collectives_s", "exposed_collectives_s", "kernels_s", "step_s"]
    seen = totals.set_index(_RANK)[names].astype(float)
    ranks = seen.reindex(shares.index).rename(
        columns={"collectives_s": "communication_s", "exposed_collectives_s": "exposed_s", "kernels_s": "kernel_s"}
    )
    ranks["wire_s"] = ranks["communication_s"] * shares["transfer"]
    ranks["exposed_wire_s"] = ranks["exposed_s"] * shares["exposed_transfer"]
    ranks["exposed_wait_s"] = ranks["exposed_s"] - ranks["exposed_wire_s"]
    usual_last = least(ranks["exposed_wait_s"].fillna(np.inf))
    result = pd.DataFrame(
        {
            name: others(ranks[name], usual_last)
            for name in ("communication_s", "wire_s", "exposed_wire_s", "exposed_wait_s", "kernel_s")
        }
    )
    result["exposed_s"] = result["exposed_wire_s"] + result["exposed_wait_s"]
    result["communication_s"] = result[["communication_s", "exposed_s"]].max(axis=1)
    result["hidden_s"] = result["communication_s"] - result["exposed_s"]
    result["wait_s"] = result["communication_s"] - result["wire_s"]
    result["communication_step_s"] = others(ranks["step_s"], usual_last)
    result["lateness_s"] = result["exposed_wait_s"] - ranks["exposed_wait_s"].loc[usual_last].droplevel("rank")
    calls = [name for name in MATCHED if name not in ("trial_id", "step")]
    less_wait_s = largest_excess(rows.assign(lead_s=-rows["wait_s"]), usual_last, calls, "lead_s")
    result["hidden_lateness_s"] = (less_wait_s - result["lateness_s"]).clip(lower=0.0)
    load_wait_s = rank_medians(window_rows, "phases", ["load_wait_s"]).reindex(ranks.index)
    result["late_by_load_s"] = load_wait_s.loc[usual_last].droplevel("rank") - others(load_wait_s, usual_last)
    is_relevant = result["lateness_s"] >= WAIT_MATTERS_SHARE * result["communication_step_s"]
    late = usual_last.get_level_values("rank").to_series(result.index)
    result["waited_for_rank"] = late.where(is_relevant).astype("Int64")
    result["traced"] = 1.0
    return result[TRACED_COLUMNS]
