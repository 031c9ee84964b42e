"""Scaling series as laws are fitted to them: measured points, their spread, and the all-reduce on their link."""

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
    cost_growth,
    expected_largest,
    exposed_transfers_s,
    ring_factor,
    ring_s,
    two_level_s,
)
from analysis.study import Analysis

_POINTS = [
    "configuration", "world_size", "nodes", "batch_per_gpu", "log_step", "step_s", "throughput_samples_per_s", "n",
    "variance", "degrees",
]  # fmt: skip


@dataclass(frozen=True)
class Interconnects:
    """The interconnects of a series: within a node, and between nodes; None if unknown.

    between_is_flat: `between` was measured by one ring over all ranks of several nodes, and applies to such rings.
    """

    inside: Link | None = None
    between: Link | None = None
    between_is_flat: bool = True

    def all_reduce_s(self, world_size: int, nodes: int, size_bytes: float, messages: float) -> float:
        """Return the seconds of the gradients' all-reduce; 0 for one rank, NaN if the link is unknown."""
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
class ScalingSeries:
    """Configurations that differ only in their number of ranks and, in strong scaling, in the batch per rank.

    fields: the trial fields that they share. points: one row per number of ranks, in order (with the fewest nodes):
    configuration, world_size, nodes, batch_per_gpu, log_step (mean log of seconds), step_s, throughput_samples_per_s,
    n, variance (of one run's log step) and degrees. group: number shared by series that differ at most in the batch.
    gradient_bytes, buckets: NaN without a communication breakdown. fits: fitted all-reduce sweeps of its interconnect,
    see `allreduce.fits`. exposed: wire_s and wait_s after the last gradient, one row per world_size with a
    communication breakdown. transfers: buckets of these numbers of ranks with their world_size, see
    `communication.bucket_utilisation`.
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

    def only(self, sizes: Sequence[int]) -> "ScalingSeries":
        """Return the series as if only these numbers of ranks had been measured, including its all-reduces."""
        points = self.points[self.points["world_size"].isin(sizes)]
        fits = self.fits[self.fits["world_size"] <= max(sizes)]
        exposed = self.exposed[self.exposed["world_size"].isin(sizes)]
        transfers = self.transfers[self.transfers["world_size"].isin(sizes)]
        return replace(self, points=points, fits=fits, exposed=exposed, transfers=transfers)

    @cached_property
    def links(self) -> Interconnects:
        """Return the measured links, each from the sweep on most ranks."""
        return Interconnects(_link(self.fits[self.fits["nodes"] == 1]), _link(self.fits[self.fits["nodes"] > 1]))

    def at(
        self, sizes: Sequence[int], nodes: Sequence[int] | None = None, links: Interconnects | None = None
    ) -> Points:
        """Return the points of a law on these numbers of ranks and nodes (default: 1 node)."""
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
        """Return the measured points."""
        return self.at(self.sizes, [int(count) for count in self.points["nodes"]])

    @cached_property
    def cost_parts(self) -> tuple[float, float, float] | None:
        """Return the cost per step of communication between 2 ranks: host, wait and exposed transfer, in seconds.

        host includes contention; wait is the wait for the slowest rank. The values come from the communication
        breakdown on most ranks, which is measured in a window of its own. Transfer and wait are therefore scaled down
        if they exceed the growth of the plain step; host is the remainder. None without a breakdown, or without a
        measurement on one rank.
        """
        if self.exposed.empty or self.sizes[0] != 1:
            return None
        breakdown = self.exposed.iloc[-1]
        size = int(breakdown["world_size"])
        step_s = self.points.set_index("world_size")["step_s"].astype(float)
        growth_s = max(0.0, float(step_s[size] - step_s[1] * self.batch(size) / self.base_batch))
        wire_s, wait_s = max(0.0, float(breakdown["wire_s"])), max(0.0, float(breakdown["wait_s"]))
        scale = min(1.0, growth_s / (wire_s + wait_s)) if wire_s + wait_s > 0 else 1.0
        wire_s, wait_s = wire_s * scale, wait_s * scale
        largest = expected_largest(np.array([2, size]))
        return (
            growth_s - wire_s - wait_s,
            wait_s * float(largest[0] / largest[1]),
            wire_s / float(self._exposed_growth(np.array([size]))[0]),
        )

    def _growth(self, sizes: Array) -> Array:
        if self.cost_parts is None:
            return np.full(len(sizes), np.nan)
        host_s, wait_s, wire_s = self.cost_parts
        return cost_growth(sizes, host_s, wait_s, wire_s * self._exposed_growth(sizes), wire_s)

    def _exposed_growth(self, sizes: Array) -> Array:
        """Return the exposed transfers on each number of ranks relative to 2 ranks.

        Every bucket grows like a ring. The buckets are those of the largest number of ranks with a breakdown. A smaller
        batch leaves less time before the last gradient.
        """
        on_two = self._replayed_s(2)
        return np.array([self._replayed_s(int(size)) / on_two for size in sizes]) if on_two > 0 else ring_factor(sizes)

    def _replayed_s(self, size: int) -> float:
        transfers = self.transfers
        if transfers.empty or size == 1:
            return 0.0
        transfers = transfers[transfers["world_size"] == transfers["world_size"].max()]
        measured_size = int(transfers["world_size"].iloc[0])
        work = self.batch(size) / self.batch(measured_size)
        wire_s = transfers["wire_s"].to_numpy(dtype=float) * float(ring_factor(size) / ring_factor(measured_size))
        before_s = transfers["ready_before_s"].to_numpy(dtype=float) * work
        return exposed_transfers_s(before_s, wire_s, bool(transfers["in_order"].iloc[0]))

    def batch(self, world_size: int) -> float:
        """Return the samples per rank and step; fractional if the ranks do not divide the global batch."""
        return self.base_batch if self.scaling == WEAK else self.base_batch / world_size

    def spread(self) -> Spread:
        """Return the spread of the repeats, pooled over the points."""
        return pooled(self.points)

    def log_step(self) -> Array:
        return self.points["log_step"].to_numpy(dtype=float)


def alike_but_for_timing(series: Sequence[ScalingSeries], timing: Sequence[str]) -> list[str]:
    """Return the fields in `timing` that are not needed to distinguish the series.

    Series that differ in such a field also differ in another one.
    """

    def other_key(one_series: ScalingSeries, name: str) -> str:
        other_fields = {key: value for key, value in one_series.fields.items() if key != name}
        return repr((one_series.scaling, one_series.base_batch, sorted(other_fields.items(), key=lambda item: item[0])))

    needed = set()
    for name in timing:
        values: dict[str, set[str]] = {}
        for one_series in series:
            values.setdefault(other_key(one_series, name), set()).add(repr(one_series.fields.get(name)))
        if any(len(distinct) > 1 for distinct in values.values()):
            needed.add(name)
    return [name for name in timing if name not in needed]


def pooled(points: pd.DataFrame) -> Spread:
    """Return the variance of one run's log step, pooled over all points with repeats by degrees of freedom."""
    known = points[points["variance"].notna() & (points["degrees"] > 0)]
    degrees = float(known["degrees"].sum())
    if not degrees:
        return Spread(float("nan"), 0.0)
    return Spread(float((known["variance"] * known["degrees"]).sum() / degrees), degrees)


def series_of(analysis: Analysis) -> list[ScalingSeries]:
    """Return every series with at least two numbers of ranks: all weak ones, and strong ones disjoint from them.

    A series without one rank starts with the configuration of `scaling.one_rank`, if there is one.
    """
    points = _points(analysis)
    if points.empty:
        return []
    fields = [
        name for name in trial_fields(analysis.results.trials) if name in points and name not in (*LAYOUT, "repeat")
    ]
    groups = _group_numbers(points, [name for name in fields if name not in ("batch_per_gpu", "global_batch")])
    series: list[ScalingSeries] = []
    used: set[int] = set()
    without_batch = [name for name in fields if name != "batch_per_gpu"]
    for scaling, keys in ((WEAK, fields), (STRONG, [*without_batch, "global_batch"])):
        for _, rows in points.groupby(keys, dropna=False, sort=False):
            if scaling == STRONG and used & set(rows["configuration"]):
                continue
            group = int(groups[rows.index[0]])
            if (single := one_rank(rows, points, keys, analysis.fields)) is not None:
                rows = pd.concat([points.loc[[single]], rows])
            rows = rows.sort_values(list(LAYOUT), kind="stable").drop_duplicates("world_size")
            if len(rows) < 2:
                continue
            used |= set(rows["configuration"])
            shared = {name: rows[name].iloc[-1] for name in keys}
            base = float(rows["batch_per_gpu" if scaling == WEAK else "global_batch"].iloc[-1])
            link_data = *_gradients(analysis, points[groups == group]), _fits(analysis, shared)
            breakdown = _exposed(analysis, rows), _transfers(analysis, rows)
            series.append(ScalingSeries(scaling, shared, rows[_POINTS], base, group, *link_data, *breakdown))
    return series


def _points(analysis: Analysis) -> pd.DataFrame:
    configurations = analysis.configurations
    return configurations.assign(
        configuration=configurations.index,
        # Throughput and step time both come from the slowest rank's window, so they are equivalent.
        log_step=np.log(configurations["global_batch"].astype(float))
        - configurations["throughput_log_mean"].astype(float),
        variance=configurations["throughput_own_variance"].astype(float),
        degrees=configurations["throughput_own_degrees"].astype(float),
    )


def _group_numbers(frame: pd.DataFrame, keys: list[str]) -> pd.Series:
    if not keys:
        return pd.Series(0, index=frame.index)
    return frame.groupby(keys, dropna=False, sort=False).ngroup()


def _gradients(analysis: Analysis, rows: pd.DataFrame) -> tuple[float, float]:
    """Return bytes and number of buckets of a step's gradients; NaN without a communication breakdown."""
    exposed = analysis.communication.exposed
    exposed = exposed[exposed.index.isin(rows["configuration"])]
    return (
        (float(exposed["gradient_bytes"].median()), float(exposed["buckets"].median()))
        if len(exposed)
        else (np.nan, np.nan)
    )


def _exposed(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """Return exposed transfer and wait of each configuration with a breakdown."""
    exposed = analysis.communication.exposed.reindex(rows["configuration"])
    frame = pd.DataFrame(
        {
            "world_size": rows["world_size"].to_numpy(dtype=int),
            "wire_s": exposed["exposed_wire_s"].to_numpy(dtype=float),
            "wait_s": exposed["exposed_wait_s"].to_numpy(dtype=float),
        }
    )
    return frame[frame["world_size"] > 1].dropna(ignore_index=True)


def _transfers(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the buckets, in order, of each configuration whose breakdown includes the last local gradient."""
    buckets = analysis.communication.buckets
    buckets = buckets[buckets["configuration"].isin(rows["configuration"])].dropna(subset=["wire_s", "ready_before_s"])
    sizes = rows.set_index("configuration")["world_size"].astype(int)
    return buckets.assign(world_size=buckets["configuration"].map(sizes)).sort_values(["world_size", "bucket"])


def _fits(analysis: Analysis, fields: dict[str, Any]) -> pd.DataFrame:
    fits = analysis.communication.fits
    fits = fits[fits["interconnect"] == (fields.get("interconnect") or "auto")]
    return fits[fits["cpus_per_rank"] == fields["cpus_per_rank"]] if "cpus_per_rank" in fields else fits


def _link(fits: pd.DataFrame) -> Link | None:
    """Return the link measured by the sweep on most ranks; the median if it ran on several groups of devices."""
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
