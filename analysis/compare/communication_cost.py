"""Bandwidth of the all-reduces of a step, and trials with a high measurement overhead."""

import pandas as pd

from analysis.compare.communication import Communication
from analysis.measure.allreduce import bus_factor

AUDIT_BUDGET = 0.02
"""A trial is flagged if its measurement overhead exceeds this share of its plain step."""


def flagged_trials(measured: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `measured` whose measurement overhead exceeds `AUDIT_BUDGET`, the largest first.

    measured: see `measures.summaries`.
    """
    columns = ["instruments_ratio", "communication_ratio"]
    overhead = measured[columns].astype(float).max(axis=1)
    order = overhead[overhead > 1 + AUDIT_BUDGET].sort_values(ascending=False, kind="stable").index
    return measured.loc[order].astype(dict.fromkeys(columns, float))


def bandwidth_rows(configurations: pd.DataFrame, traffic: Communication) -> pd.DataFrame:
    """Return the all-reduce bandwidth per configuration with a communication breakdown; indexed like `configurations`.

    configurations: see the function of that name.

    Bus bandwidth = S / t · 2(N-1)/N for S bytes on N ranks (NVIDIA nccl-tests, doc/PERFORMANCE.md), with three t:
    wire_s: the transfer of all buckets (see `communication.step_rows`), without other collectives.
    step_time_difference_s: the textbook estimate, step(N) - step(1). Its bandwidth is null if the step is not
    longer.
    ceiling_s: the same buckets one after another in the sweep of the same trials.
    utilisation = ceiling_s / wire_s, each summed over the buckets.
    """
    exposed, buckets = traffic.exposed.dropna(subset=["gradient_bytes"]), traffic.buckets
    columns = ["gradient_bytes", "buckets", "wire_s", "step_time_difference_s"]
    frame = exposed[columns].astype(float).join(configurations[["world_size", "n", "trial_ids"]])
    sums = buckets.groupby("configuration")[["wire_s", "ceiling_s"]].sum(min_count=1).astype(float)
    in_buckets_s = sums["wire_s"].reindex(frame.index)
    frame["wire_s"] = frame["wire_s"].mask(exposed["traced"].astype(float) == 1, in_buckets_s)
    complete = ~buckets["ceiling_s"].isna().groupby(buckets["configuration"]).any()
    sums["ceiling_s"] = sums["ceiling_s"].where(complete)
    sums = sums.reindex(frame.index)  # a column set on a frame without rows would add them
    frame["ceiling_s"] = sums["ceiling_s"]
    frame["utilisation"] = sums["ceiling_s"] / sums["wire_s"]
    bus_bytes = frame["gradient_bytes"] * bus_factor(frame["world_size"].astype(float))
    frame["algorithm_bytes_per_s"] = frame["gradient_bytes"] / frame["wire_s"]
    for name in ("wire", "ceiling", "step_time_difference"):
        frame[f"{name}_bus_bytes_per_s"] = bus_bytes / frame[f"{name}_s"].where(frame[f"{name}_s"] > 0)
    return frame
