"""What bounds a step: its parts by region, each with what removing it would bring at most, and what would shrink it."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from analysis.compare.communication import Communication, step_of_account_s
from analysis.load.schema import PHASES
from analysis.text import join

BOUND_SHARE = 0.2
"""Share of a step from which load and transfer together, or wire and wait, are called a bound (TraceML's critical
threshold)."""


REGIONS = ("host", "load", "transfer", "wire", "wait", "idle", "compute")


@dataclass(frozen=True)
class Region:
    """What a region is called as a bound, what it takes of a step, and the change that shrinks it."""

    label: str
    takes: str
    change: str


WORDS: Mapping[str, Region] = {
    "host": Region("the host", "the device waiting for the host to issue work", "a larger batch, compilation or CUDA graphs"),
    "load": Region("loading", "waiting for a batch", "more loader workers, or a format that is read and decoded faster"),
    "transfer": Region("the copy to the device", "copying the batch to the device", "pinned memory, copies ahead of the step (copy_ahead), or smaller samples"),
    "wire": Region("the wire", "exposed transfer of gradients", "a larger batch per rank, smaller gradients or a faster interconnect"),
    "wait": Region("waiting for the slowest rank", "waiting for the slowest rank", "ranks of equal speed and equal work"),
    "idle": Region("something unmeasured", "idling of the device for which no reason was measured", "a trace (--profile), which shows what it waits for"),
    "compute": Region("compute", "forward, loss, backward and optimizer", "lower precision, compilation or a faster device"),
}  # fmt: skip


def regions(found: pd.DataFrame, traffic: Communication) -> pd.DataFrame:
    """The share of a step that each of `REGIONS` takes, and the `bound`, a row a configuration; indexed like `found`.

    found: see `scaling.configurations`. Shares add up to 1; they are NaN, and bound is None, where phases are not known.

    load, transfer: of the phases. wire, wait: what the backward pass does not hide of the account of communication; 0
    on one rank, NaN where several have no account, and part of compute then. host: where the device waits for the host (`measures.host_bound`), the time of the step for which
    it has nothing to run and that none of these explains; NaN where its kernels' own time is not known, and part of compute
    then. compute: the rest, but no more than its kernels' own time where that is known. idle: what is left then.

    bound: "host" where the device waits for the host; else, where one of them takes at least `BOUND_SHARE`, the most of load
    and transfer together, wire and wait together, and idle (of a pair the larger); else "compute".
    """
    parts = found[list(PHASES)].astype(float)
    total = parts.sum(axis=1, min_count=1).where(found["phases_step_s"].astype(float).notna())
    total = total.where(total > 0)
    exposed = traffic.exposed.reindex(found.index)
    step_s, alone = found["step_s"].astype(float), found["world_size"] == 1
    in_account_s = step_of_account_s(exposed, step_s)
    shares = pd.DataFrame(
        {
            "load": parts["load_wait_s"].fillna(0.0) / total,
            "transfer": parts["host_to_device_s"].fillna(0.0) / total,
            "wire": (exposed["exposed_wire_s"].astype(float) / in_account_s).mask(alone, 0.0),
            "wait": (exposed["exposed_wait_s"].astype(float) / in_account_s).mask(alone, 0.0),
        }
    )
    host_bound = pd.Series([value is True for value in found["host_bound"]], index=found.index)
    busy = found["busy_s"].astype(float) / step_s
    idle = 1 - busy - shares.sum(axis=1)
    shares["host"] = idle.clip(lower=0.0).where(host_bound, 0.0)
    shares["idle"] = idle.clip(lower=0.0).fillna(0.0).mask(host_bound, 0.0)
    shares["compute"] = (1 - shares.sum(axis=1)).clip(lower=0.0)
    shares = shares.where(total.notna())[list(REGIONS)]
    load = pd.Series("load", index=found.index, dtype=object).where(shares["load"] >= shares["transfer"], "transfer")
    wire = pd.Series("wire", index=found.index, dtype=object).where(shares["wire"] >= shares["wait"], "wait")
    larger = {"load": load, "wire": wire, "idle": pd.Series("idle", index=found.index, dtype=object)}
    of = pd.DataFrame(
        {
            "load": shares["load"] + shares["transfer"],
            "wire": (shares["wire"] + shares["wait"]).fillna(0.0),
            "idle": shares["idle"],
        }
    )
    most = of.fillna(0.0).idxmax(axis=1)
    bound = pd.concat([names[most == kind] for kind, names in larger.items()]).reindex(found.index)
    bound = bound.where(of.max(axis=1) >= BOUND_SHARE, "compute")
    bound = bound.where(~host_bound, "host").astype(object)
    shares["bound"] = bound.where(total.notna() | host_bound, None)
    return shares


def at_most(share: float) -> float:
    """How many times as fast a step is without a part that takes this share of it (Amdahl, 1967): an upper bound."""
    return 1 / (1 - share) if share < 1 else float("inf")


def issue_ratio(found: pd.DataFrame) -> pd.Series:
    """Host time to issue a step / device time of its kernels, for each configuration; NaN where either is unknown.

    Above 1 the host is the slower of the two, and the ratio says how many times faster the step could be, at most, if
    issuing took no time and nothing else held it back.
    """
    return found["step_launch_s"].astype(float) / found["busy_s"].astype(float)


def fewer_launches(row: pd.Series) -> str:
    """What helps a configuration that the host limits, but for what its execution is already."""
    execution = str(row.get("execution", "eager"))
    changes = ["a larger batch"]
    changes += [] if "compile" in execution else ["compilation"]
    changes += [] if "graph" in execution else ["CUDA graphs"]
    return join(changes, "or")
