"""The timeline of one step on each rank, and the loss over the steps of a configuration."""

import pandas as pd

from analysis.measure.communication import WINDOW, bucket_rows
from analysis.measure.measures import configuration_of
from analysis.read.results import Results

TIMELINE_COLUMNS = ["trial_id", "step", "rank", "lane", "bucket", "kind", "begin_s", "end_s"]


def timeline_rows(results: Results, configurations: pd.DataFrame, exposed: pd.DataFrame) -> pd.DataFrame:
    """Return the parts of one step on each rank: `TIMELINE_COLUMNS`, in seconds from the start of the rank's step.

    configurations: see the function of that name. exposed: see `communication.Communication`.

    The configuration is the fastest with most ranks and with gradient buckets. The step has the median length on rank 0
    in the communication window of its first trial. lane: "compute" (until the last local gradient, then from the last
    all-reduce to the end of the step) or "all-reduce" with kinds wait, hidden and exposed: a bucket first waits, then
    transfers.
    """
    empty = pd.DataFrame(columns=TIMELINE_COLUMNS)
    with_buckets = exposed.index[exposed["buckets"].notna()]
    if with_buckets.empty:
        return empty
    best = configurations.loc[with_buckets].sort_values(["world_size", "throughput_samples_per_s"]).iloc[-1]
    trial = results.trials[results.trials["trial_id"] == best["trial_ids"][0]]
    trial_steps = results.steps[
        (results.steps["trial_id"] == best["trial_ids"][0]) & (results.steps["window"] == WINDOW)
    ]
    buckets = bucket_rows(results.buckets, trial_steps, trial)
    first_rank_steps = trial_steps[trial_steps["rank"] == trial_steps["rank"].min()].sort_values("step_s")
    if buckets.empty or first_rank_steps.empty or trial_steps["last_gradient_s"].isna().all():
        return empty
    step = first_rank_steps.iloc[(len(first_rank_steps) - 1) // 2]["step"]
    rows: list[dict[str, object]] = []
    buckets = buckets[buckets["step"] == step]
    for row in trial_steps[trial_steps["step"] == step].sort_values("rank").itertuples():
        rank_buckets = buckets[buckets["rank"] == row.rank]
        common = {"trial_id": row.trial_id, "step": step, "rank": row.rank}
        end_s = max([row.last_gradient_s, *rank_buckets["end_s"]])
        rows.append(common | {"lane": "compute", "kind": "compute", "begin_s": 0.0, "end_s": row.last_gradient_s})
        rows.append(common | {"lane": "compute", "kind": "optimizer", "begin_s": end_s, "end_s": row.step_s})
        for bucket in rank_buckets.itertuples():
            wire_start_s = bucket.end_s - bucket.wire_s
            exposed_start_s = min(max(wire_start_s, row.last_gradient_s), bucket.end_s)
            parts = (
                ("wait", bucket.start_s, wire_start_s),
                ("hidden", wire_start_s, exposed_start_s),
                ("exposed", exposed_start_s, bucket.end_s),
            )
            rows += [
                common | {"lane": "all-reduce", "bucket": bucket.bucket, "kind": kind, "begin_s": begin, "end_s": end}
                for kind, begin, end in parts
                if end > begin
            ]
    return pd.DataFrame(rows, columns=TIMELINE_COLUMNS)


def loss_rows(configurations: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """Return loss over the steps of the warm-up, plain and phases windows: columns configuration, step and loss.

    configurations: see the function of that name. losses: of `Results`. Mean over ranks, null if one is not finite;
    median over repeats.
    """
    configuration = configuration_of(configurations)
    mean = losses.loc[losses["trial_id"].isin(configuration.index), ["trial_id", "step", "loss"]]
    if mean["loss"].isna().all():
        return pd.DataFrame(columns=["configuration", "step", "loss"])
    # Grouping by both at once needs more memory.
    by_configuration = mean.groupby(mean["trial_id"].map(configuration).astype(int))
    curves = {index: part.groupby("step")["loss"].median() for index, part in by_configuration}
    return pd.concat(curves, names=["configuration"]).reset_index()
