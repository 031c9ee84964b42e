"""What communication and its instruments cost: bandwidth of a step's all-reduces, and trials whose windows cost too much."""

import pandas as pd

from analysis.compare.communication import Communication
from analysis.measure.allreduce import bus_factor

AUDIT_BUDGET = 0.02
"""Cost of a trial's instruments, as a share of its plain step, from which the trial is flagged."""


def flagged_trials(measured: pd.DataFrame) -> pd.DataFrame:
    """The rows of `measured` (see `measures.summaries`) whose instruments cost more than `AUDIT_BUDGET`, the dearest first."""
    columns = ["instruments_ratio", "communication_ratio"]
    worst = measured[columns].astype(float).max(axis=1)
    order = worst[worst > 1 + AUDIT_BUDGET].sort_values(ascending=False, kind="stable").index
    return measured.loc[order].astype(dict.fromkeys(columns, float))


def bandwidth_rows(found: pd.DataFrame, traffic: Communication) -> pd.DataFrame:
    """A row for each configuration with an account of its all-reduces, indexed like `found`.

    found: see `scaling.configurations`.

    Bus bandwidth = S / t · 2(N-1)/N for S bytes on N ranks (NVIDIA nccl-tests, doc/PERFORMANCE.md), with three t:
    wire_s, the transfer of all buckets (see `communication.step_rows`); course_s, what the step takes longer than on one
    rank; ceiling_s, the same buckets one after another in the same trials' sweep. course_bus_bytes_per_s is null where the
    step did not take longer. utilisation = ceiling_s / wire_s summed over the buckets.
    """
    exposed, buckets = traffic.exposed, traffic.buckets
    columns = ["gradient_bytes", "buckets", "wire_s", "course_s"]
    frame = exposed[columns].astype(float).join(found[["world_size", "n", "trial_ids"]])
    sums = buckets.groupby("configuration")[["wire_s", "ceiling_s"]].sum(min_count=1).astype(float)
    complete = ~buckets["ceiling_s"].isna().groupby(buckets["configuration"]).any()
    sums["ceiling_s"] = sums["ceiling_s"].where(complete)
    frame["ceiling_s"] = sums["ceiling_s"]
    frame["utilisation"] = sums["ceiling_s"] / sums["wire_s"]
    moved = frame["gradient_bytes"] * bus_factor(frame["world_size"].astype(float))
    frame["algorithm_bytes_per_s"] = frame["gradient_bytes"] / frame["wire_s"]
    for name in ("wire", "ceiling", "course"):
        frame[f"{name}_bus_bytes_per_s"] = moved / frame[f"{name}_s"].where(frame[f"{name}_s"] > 0)
    return frame
