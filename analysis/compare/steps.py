"""What one step consists of on each rank, and the losses over the steps of a configuration."""

import pandas as pd

from analysis.load.results import Results
from analysis.measure.communication import WINDOW, bucket_rows
from analysis.measure.measures import configuration_of

TIMELINE_COLUMNS = ["trial_id", "step", "rank", "lane", "bucket", "kind", "begin_s", "end_s"]


def timeline_rows(results: Results, found: pd.DataFrame, exposed: pd.DataFrame) -> pd.DataFrame:
    """What one step of each rank is made of: `TIMELINE_COLUMNS`, seconds from the start of the rank's own step.

    found: see `scaling.configurations`. exposed: see `communication.Communication`.

    The step is the one of median length of rank 0 in the communication window of the first trial of the fastest
    configuration with the most ranks. lane: "compute" (to the last local gradient, then from the last all-reduce to the
    end of the step) or "all-reduce", whose kinds are wait, hidden and exposed: a bucket waits first and transfers last.
    """
    empty = pd.DataFrame(columns=TIMELINE_COLUMNS)
    if exposed.empty:
        return empty
    best = found.loc[exposed.index].sort_values(["world_size", "throughput_samples_per_s"]).iloc[-1]
    trial = results.trials[results.trials["trial_id"] == best["trial_ids"][0]]
    own = results.steps[(results.steps["trial_id"] == best["trial_ids"][0]) & (results.steps["window"] == WINDOW)]
    buckets = bucket_rows(results.buckets, own, trial)
    of_first = own[own["rank"] == own["rank"].min()].sort_values("step_s")
    if buckets.empty or of_first.empty or own["last_gradient_s"].isna().all():
        return empty
    step = of_first.iloc[(len(of_first) - 1) // 2]["step"]
    rows: list[dict[str, object]] = []
    buckets = buckets[buckets["step"] == step]
    for row in own[own["step"] == step].sort_values("rank").itertuples():
        mine = buckets[buckets["rank"] == row.rank]
        common = {"trial_id": row.trial_id, "step": step, "rank": row.rank}
        end_s = max([row.last_gradient_s, *mine["end_s"]])
        rows.append(common | {"lane": "compute", "kind": "compute", "begin_s": 0.0, "end_s": row.last_gradient_s})
        rows.append(common | {"lane": "compute", "kind": "optimizer", "begin_s": end_s, "end_s": row.step_s})
        for bucket in mine.itertuples():
            wire_from_s = bucket.end_s - bucket.wire_s
            cut_s = min(max(wire_from_s, row.last_gradient_s), bucket.end_s)
            parts = (
                ("wait", bucket.start_s, wire_from_s),
                ("hidden", wire_from_s, cut_s),
                ("exposed", cut_s, bucket.end_s),
            )
            rows += [
                common | {"lane": "all-reduce", "bucket": bucket.bucket, "kind": kind, "begin_s": begin, "end_s": end}
                for kind, begin, end in parts
                if end > begin
            ]
    return pd.DataFrame(rows, columns=TIMELINE_COLUMNS)


def loss_rows(found: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """Loss over the steps of the warm-up, plain and phases windows: columns configuration, step and loss.

    found: see `scaling.configurations`. losses: of `Results`. Mean over ranks, null where one's is not finite; median over repeats.
    """
    configuration = configuration_of(found)
    mean = losses.loc[losses["trial_id"].isin(configuration.index), ["trial_id", "step", "loss"]]
    if mean["loss"].isna().all():
        return pd.DataFrame(columns=["configuration", "step", "loss"])
    each = mean.groupby(mean["trial_id"].map(configuration).astype(int))  # by both at once needs more memory
    curves = {index: part.groupby("step")["loss"].median() for index, part in each}
    return pd.concat(curves, names=["configuration"]).reset_index()
