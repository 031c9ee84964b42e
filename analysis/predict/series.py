"""Scaling series as laws are fitted to them: the measured points, their spread, and the all-reduce on their link."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.scaling import STRONG, WEAK, one_rank
from analysis.measure.configurations import LAYOUT, trial_fields
from analysis.predict.fit import Spread
from analysis.predict.laws import (
    Array,
    Link,
    Points,
    account_growth,
    expected_largest,
    exposed_transfers_s,
    ring_factor,
    ring_s,
    two_level_s,
)
from analysis.study import Analysis

_POINTS = [
    "configuration", "world_size", "nodes", "batch_per_gpu", "log_step", "step_s", "throughput_samples_per_s", "n", "variance",
    "degrees",
]  # fmt: skip


@dataclass(frozen=True)
class Links:
    """The interconnects that a series runs over: inside a node, and between nodes; None where they are not known.

    between_is_flat: `between` was measured by a ring over all ranks of several nodes, and is asked in the same way.
    """

    inside: Link | None = None
    between: Link | None = None
    between_is_flat: bool = True

    def all_reduce_s(self, world_size: int, nodes: int, size_bytes: float, messages: float) -> float:
        """Seconds of the gradients' all-reduce alone; 0 for one rank, NaN where the link is not known."""
        if world_size == 1:
            return 0.0
        if nodes == 1:
            link = self.inside
        else:
            link = self.between if self.between_is_flat else None
            if not self.between_is_flat and self.between and self.inside:
                return float(two_level_s(world_size, nodes, size_bytes, self.inside, self.between, messages))
        return float(ring_s(world_size, size_bytes, link, messages)) if link else float("nan")


@dataclass(frozen=True)
class Series:
    """Configurations that differ only in their number of ranks, and in the batch that a held global batch leaves each.

    fields: what they share. points: a row for each number of ranks, in order (the fewest nodes of each): configuration,
    world_size, nodes, batch_per_gpu, log_step (mean log of seconds), step_s, throughput_samples_per_s, n, variance (of
    one run's log) and degrees. group: number of the series that differ from it in the batch at most. gradient_bytes,
    buckets: NaN where no account was kept. fits: the ceilings of its interconnect, see `ceiling.fits`. exposed: world_size,
    wire_s and wait_s of the account after the last gradient (`communication.account`), a row a number of ranks with one.
    transfers: the buckets of those numbers of ranks, see `communication.bucket_utilisation`, with their world_size.
    """

    scaling: str
    fields: dict[str, Any]
    points: pd.DataFrame
    base_batch: float
    group: int
    gradient_bytes: float
    buckets: float
    fits: pd.DataFrame
    exposed: pd.DataFrame
    transfers: pd.DataFrame

    @cached_property
    def sizes(self) -> list[int]:
        return [int(size) for size in self.points["world_size"]]

    @property
    def interconnect(self) -> str:
        return str(self.fields.get("interconnect") or "auto")

    def only(self, sizes: Sequence[int]) -> "Series":
        """The series as if it had been measured on these numbers of ranks only, its all-reduces too."""
        points = self.points[self.points["world_size"].isin(sizes)]
        fits = self.fits[self.fits["world_size"] <= max(sizes)]
        exposed = self.exposed[self.exposed["world_size"].isin(sizes)]
        transfers = self.transfers[self.transfers["world_size"].isin(sizes)]
        return replace(self, points=points, fits=fits, exposed=exposed, transfers=transfers)

    @cached_property
    def links(self) -> Links:
        """The links that were measured, each by the sweep on most ranks."""
        return Links(_link(self.fits[self.fits["nodes"] == 1]), _link(self.fits[self.fits["nodes"] > 1]))

    def at(self, sizes: Sequence[int], nodes: Sequence[int] | None = None, links: Links | None = None) -> Points:
        """The points of a law for this series on so many ranks (and nodes, left out: 1)."""
        nodes = nodes if nodes is not None else [1] * len(sizes)
        links = links or self.links
        batch = [self.batch(size) for size in sizes]
        wire_s = [
            links.all_reduce_s(size, count, self.gradient_bytes, self.buckets)
            for size, count in zip(sizes, nodes, strict=True)
        ]
        base = np.full(len(sizes), self.base_batch)
        return Points(np.array(sizes), np.array(batch), base, np.array(wire_s), self._growth(np.array(sizes)))

    @cached_property
    def measured(self) -> Points:
        """The points that were measured."""
        return self.at(self.sizes, [int(count) for count in self.points["nodes"]])

    @cached_property
    def cost_parts(self) -> tuple[float, float, float] | None:
        """What 2 ranks cost each other a step, in seconds: host and contention, wait for the slowest, exposed transfers.

        From the account on most ranks. It was kept in a window of its own, so transfers and wait that are longer than what
        the plain step takes longer are scaled down to that, and the first part is what they leave of it. None without an
        account, or where one rank was not measured.
        """
        if self.exposed.empty or self.sizes[0] != 1:
            return None
        kept = self.exposed.iloc[-1]
        size = int(kept["world_size"])
        step_s = self.points.set_index("world_size")["step_s"].astype(float)
        longer_s = max(0.0, float(step_s[size] - step_s[1] * self.batch(size) / self.base_batch))
        wire_s, wait_s = max(0.0, float(kept["wire_s"])), max(0.0, float(kept["wait_s"]))
        scale = min(1.0, longer_s / (wire_s + wait_s)) if wire_s + wait_s > 0 else 1.0
        wire_s, wait_s = wire_s * scale, wait_s * scale
        as_on_two = expected_largest(np.array([2, size]))
        return (
            longer_s - wire_s - wait_s,
            wait_s * float(as_on_two[0] / as_on_two[1]),
            wire_s / float(self._exposed_growth(np.array([size]))[0]),
        )

    def _growth(self, sizes: Array) -> Array:
        if self.cost_parts is None:
            return np.full(len(sizes), np.nan)
        host_s, wait_s, wire_s = self.cost_parts
        return account_growth(sizes, host_s, wait_s, wire_s * self._exposed_growth(sizes), wire_s)

    def _exposed_growth(self, sizes: Array) -> Array:
        """Exposed transfers on each number of ranks in units of those on 2, where each bucket grows as a ring's do.

        The buckets are those of most ranks with an account. A smaller batch leaves less time before the last gradient.
        """
        on_two = self._replayed_s(2)
        return np.array([self._replayed_s(int(size)) / on_two for size in sizes]) if on_two > 0 else ring_factor(sizes)

    def _replayed_s(self, size: int) -> float:
        kept = self.transfers
        if kept.empty or size == 1:
            return 0.0
        kept = kept[kept["world_size"] == kept["world_size"].max()]
        seen = int(kept["world_size"].iloc[0])
        work = self.batch(size) / self.batch(seen)
        wire_s = kept["wire_s"].to_numpy(dtype=float) * float(ring_factor(size) / ring_factor(seen))
        before_s = kept["ready_before_s"].to_numpy(dtype=float) * work
        return exposed_transfers_s(before_s, wire_s, bool(kept["in_order"].iloc[0]))

    def batch(self, world_size: int) -> float:
        """Samples a rank and step on so many ranks; not whole where a global batch does not divide."""
        return self.base_batch if self.scaling == WEAK else self.base_batch / world_size

    def spread(self) -> Spread:
        """Spread of the repeats, pooled over the points."""
        return pooled(self.points)

    def log_step(self) -> Array:
        return self.points["log_step"].to_numpy(dtype=float)


def alike_but_for_timing(series: Sequence[Series], timing: Sequence[str]) -> list[str]:
    """Those of the fields `timing` that no series needs to be told from the others: all that differ in them differ in more."""

    def rest(each: Series, name: str) -> str:
        kept = {key: value for key, value in each.fields.items() if key != name}
        return repr((each.scaling, each.base_batch, sorted(kept.items(), key=lambda item: item[0])))

    needed = set()
    for name in timing:
        values: dict[str, set[str]] = {}
        for each in series:
            values.setdefault(rest(each, name), set()).add(repr(each.fields.get(name)))
        if any(len(seen) > 1 for seen in values.values()):
            needed.add(name)
    return [name for name in timing if name not in needed]


def pooled(points: pd.DataFrame) -> Spread:
    """Variance of one run's log step, from all points that have repeats, each by its degrees of freedom."""
    known = points[points["variance"].notna() & (points["degrees"] > 0)]
    degrees = float(known["degrees"].sum())
    if not degrees:
        return Spread(float("nan"), 0.0)
    return Spread(float((known["variance"] * known["degrees"]).sum() / degrees), degrees)


def series_of(analysis: Analysis) -> list[Series]:
    """Every series with two numbers of ranks or more: weak ones, and strong ones of which no weak one has a part.

    A series without one rank begins with that of `scaling.one_rank`, where there is one.
    """
    found = _points(analysis)
    if found.empty:
        return []
    fields = [
        name for name in trial_fields(analysis.results.trials) if name in found and name not in (*LAYOUT, "repeat")
    ]
    groups = _numbers(found, [name for name in fields if name not in ("batch_per_gpu", "global_batch")])
    series: list[Series] = []
    seen: set[int] = set()
    without_batch = [name for name in fields if name != "batch_per_gpu"]
    for scaling, keys in ((WEAK, fields), (STRONG, [*without_batch, "global_batch"])):
        for _, rows in found.groupby(keys, dropna=False, sort=False):
            if scaling == STRONG and seen & set(rows["configuration"]):
                continue
            group = int(groups[rows.index[0]])
            if (one := one_rank(rows, found, keys, analysis.fields)) is not None:
                rows = pd.concat([found.loc[[one]], rows])
            rows = rows.sort_values(list(LAYOUT), kind="stable").drop_duplicates("world_size")
            if len(rows) < 2:
                continue
            seen |= set(rows["configuration"])
            shared = {name: rows[name].iloc[-1] for name in keys}
            base = float(rows["batch_per_gpu" if scaling == WEAK else "global_batch"].iloc[-1])
            of_link = *_gradients(analysis, found[groups == group]), _fits(analysis, shared)
            of_account = _exposed(analysis, rows), _transfers(analysis, rows)
            series.append(Series(scaling, shared, rows[_POINTS], base, group, *of_link, *of_account))
    return series


def _points(analysis: Analysis) -> pd.DataFrame:
    found = analysis.configurations
    return found.assign(
        configuration=found.index,
        # Both are of the slowest rank's window, so throughput and step tell the same.
        log_step=np.log(found["global_batch"].astype(float)) - found["throughput_log_mean"].astype(float),
        variance=found["throughput_log_variance"].astype(float) * found["n"].astype(float),
        degrees=found["throughput_degrees"].astype(float),
    )


def _numbers(frame: pd.DataFrame, keys: list[str]) -> pd.Series:
    if not keys:
        return pd.Series(0, index=frame.index)
    return frame.groupby(keys, dropna=False, sort=False).ngroup()


def _gradients(analysis: Analysis, rows: pd.DataFrame) -> tuple[float, float]:
    """Bytes of a step's gradients and the buckets that hold them; NaN where no trial kept account."""
    kept = analysis.communication.exposed
    kept = kept[kept.index.isin(rows["configuration"])]
    return (float(kept["gradient_bytes"].median()), float(kept["buckets"].median())) if len(kept) else (np.nan, np.nan)


def _exposed(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """Exposed transfers and wait of each configuration with an account, on the rank that waits most."""
    kept = analysis.communication.exposed.reindex(rows["configuration"])
    frame = pd.DataFrame(
        {
            "world_size": rows["world_size"].to_numpy(dtype=int),
            "wire_s": kept["seen_exposed_wire_s"].to_numpy(dtype=float),
            "wait_s": kept["seen_exposed_wait_s"].to_numpy(dtype=float),
        }
    )
    return frame[frame["world_size"] > 1].dropna(ignore_index=True)


def _transfers(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """The buckets of each configuration with an account that knows the last local gradient, in their order."""
    kept = analysis.communication.buckets
    kept = kept[kept["configuration"].isin(rows["configuration"])].dropna(subset=["wire_s", "ready_before_s"])
    sizes = rows.set_index("configuration")["world_size"].astype(int)
    return kept.assign(world_size=kept["configuration"].map(sizes)).sort_values(["world_size", "bucket"])


def _fits(analysis: Analysis, fields: dict[str, Any]) -> pd.DataFrame:
    fits = analysis.communication.fits
    fits = fits[fits["interconnect"] == (fields.get("interconnect") or "auto")]
    return fits[fits["cpus_per_rank"] == fields["cpus_per_rank"]] if "cpus_per_rank" in fields else fits


def _link(fits: pd.DataFrame) -> Link | None:
    """The link that the sweep on most ranks saw, the median where it ran at several places."""
    if fits.empty:
        return None
    size = int(fits["world_size"].max())
    fits = fits[fits["world_size"] == size]
    hops = 2 * (size - 1)
    return Link(
        float(fits["latency_s"].median()) / hops,
        float(fits["bus_bytes_per_s"].median()),
        f"measured by an all-reduce sweep on {size} ranks",
    )
