"""Scaling series as laws are fitted to them: measured points, their spread, and the all-reduce on their link."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.scaling import STRONG, WEAK, one_rank
from analysis.measure.configurations import LAYOUT, trial_fields
from analysis.measure.measures import configuration_of
from analysis.predict.fit import Spread, pool
from analysis.predict.laws import (
    Array,
    Link,
    Points,
    exposed_transfers_s,
    ring_factor,
    ring_s,
    two_level_s,
    wait_growth,
)
from analysis.study import Analysis

_POINTS = [
    "configuration", "world_size", "nodes", "batch_per_gpu", "log_step", "step_s", "throughput_samples_per_s", "n",
    "variance", "degrees", "host_bound",
]  # fmt: skip

SOCKET = "socket"
"""Interconnect on which the host moves the gradients."""


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
class Breakdown:
    """Cost per step of communication on `world_size` ranks of `nodes` nodes, whose step takes `step_s`. In seconds.

    host_s: host work, and contention on the device. wait_s, wire_s: wait for the slowest rank and exposed transfer.
    late_rank: the rank that the others wait for in most steps; None if it varies.
    """

    world_size: int
    nodes: int
    step_s: float
    host_s: float
    wait_s: float
    wire_s: float
    late_rank: int | None


@dataclass(frozen=True)
class ScalingSeries:
    """Configurations that differ only in their number of ranks and, in strong scaling, in the batch per rank.

    fields: the trial fields that they share. points: one row per number of ranks, in order (with the fewest nodes):
    configuration, world_size, nodes, batch_per_gpu, log_step (mean log of seconds), step_s, throughput_samples_per_s,
    n, variance (of one run's log step) with its degrees, and host_bound (None if unknown). gradient_bytes, buckets: NaN
    without a communication breakdown. fits: fitted all-reduce sweeps of its interconnect, see `allreduce.fits`.
    exposed: wire_s and wait_s after the last gradient, and late_rank, one row per world_size with a breakdown.
    transfers: buckets of these numbers of ranks with world_size and nodes, see `communication.bucket_utilisation`.
    """

    scaling: str
    fields: dict[str, Any]
    points: pd.DataFrame
    base_batch: float
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

    @property
    def is_small(self) -> pd.Series:
        """True for the points on 1 or 2 ranks."""
        return self.points["world_size"] <= 2

    @property
    def host_bound(self) -> bool:
        """Return True if the host bounds the step on 1 or 2 ranks, so that the step tells little about the ranks."""
        return any(value is True for value in self.points.loc[self.is_small, "host_bound"])

    @property
    def spreads_with_host(self) -> bool:
        """Return True if runs spread as the host does, see `run_spreads`."""
        return self.host_bound or self.fields.get("device") == "cpu" or self.interconnect == SOCKET

    @property
    def knows_network(self) -> bool:
        """Return True if steps or all-reduces over several nodes were measured."""
        return self.links.between is not None or bool(self.points["nodes"].max() > 1)

    def nodes_of(self, size: int, ranks_per_node: int | None) -> int:
        """Return the number of nodes for `size` ranks: with as many per node as measured, else `ranks_per_node`."""
        several = self.points[self.points["nodes"] > 1]
        if len(several):
            return math.ceil(size / int((several["world_size"] / several["nodes"]).max()))
        return math.ceil(size / ranks_per_node) if ranks_per_node else 1

    def only(self, sizes: Sequence[int]) -> "ScalingSeries":
        """Return the series as if only these numbers of ranks had trained.

        Sweeps on more ranks are dropped, except those over more nodes: they train nothing, and without them no law
        knows the interconnect between nodes.
        """
        points = self.points[self.points["world_size"].isin(sizes)]
        is_kept = (self.fits["world_size"] <= max(sizes)) | (self.fits["nodes"] > points["nodes"].max())
        exposed = self.exposed[self.exposed["world_size"].isin(sizes)]
        transfers = self.transfers[self.transfers["world_size"].isin(sizes)]
        return replace(self, points=points, fits=self.fits[is_kept], exposed=exposed, transfers=transfers)

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
        growth = self._growth(sizes, nodes, links)
        return Points(np.array(sizes), np.array(batch), base, np.array(wire_s), growth, np.array(nodes))

    @cached_property
    def measured(self) -> Points:
        """Return the measured points."""
        return self.at(self.sizes, [int(count) for count in self.points["nodes"]])

    @cached_property
    def breakdown(self) -> Breakdown | None:
        """Return the communication breakdown on most ranks; None without one, or without a measurement on one rank.

        It is measured in a window of its own. Transfer and wait are therefore scaled down if they exceed the growth of
        the plain step; host is the remainder, which includes contention.
        """
        if self.exposed.empty or self.sizes[0] != 1:
            return None
        row = self.exposed.iloc[-1]
        size = int(row["world_size"])
        points = self.points.set_index("world_size")
        step_s = points["step_s"].astype(float)
        growth_s = max(0.0, float(step_s[size] - step_s[1] * self.batch(size) / self.base_batch))
        wire_s, wait_s = max(0.0, float(row["wire_s"])), max(0.0, float(row["wait_s"]))
        scale = min(1.0, growth_s / (wire_s + wait_s)) if wire_s + wait_s > 0 else 1.0
        wire_s, wait_s = wire_s * scale, wait_s * scale
        late_rank = None if pd.isna(row["late_rank"]) else int(row["late_rank"])
        nodes = int(points["nodes"][size])
        return Breakdown(size, nodes, float(step_s[size]), growth_s - wire_s - wait_s, wait_s, wire_s, late_rank)

    def _growth(self, sizes: Sequence[int], nodes: Sequence[int], links: Interconnects) -> Array:
        """Return the cost of communication relative to that on the ranks of the breakdown."""
        if self.breakdown is None:
            return np.full(len(sizes), np.nan)
        parts = self.breakdown
        several = (np.array(sizes) > 1).astype(float)
        total_s = parts.host_s + parts.wait_s + parts.wire_s
        if total_s <= 0:
            return several
        exposed = [self._exposed_growth(size, count, links) for size, count in zip(sizes, nodes, strict=True)]
        wait = wait_growth(np.array(sizes), parts.late_rank) / wait_growth(
            np.array([parts.world_size]), parts.late_rank
        )
        return (parts.host_s * several + parts.wait_s * wait + parts.wire_s * np.array(exposed)) / total_s

    def _exposed_growth(self, size: int, nodes: int, links: Interconnects) -> float:
        """Return the exposed transfers on `size` ranks relative to those of the breakdown.

        Every bucket grows like an all-reduce of its bytes over these links, or like a ring without latency if no sweep
        measured them. A smaller batch leaves less time before the last gradient.
        """
        assert self.breakdown is not None
        measured_size, measured_nodes = self.breakdown.world_size, self.breakdown.nodes
        measured_s = self._replayed_s(measured_size, measured_nodes, self.links)
        if measured_s > 0:
            return self._replayed_s(size, nodes, links) / measured_s
        return float(ring_factor(size) / ring_factor(measured_size))

    def _replayed_s(self, size: int, nodes: int, links: Interconnects) -> float:
        transfers = self.transfers
        if transfers.empty or size == 1:
            return 0.0
        transfers = transfers[transfers["world_size"] == transfers["world_size"].max()]
        measured_size, measured_nodes = (int(transfers[name].iloc[0]) for name in ("world_size", "nodes"))
        before_s = transfers["ready_before_s"].to_numpy(dtype=float) * self.batch(size) / self.batch(measured_size)
        growth = np.array(
            [
                links.all_reduce_s(size, nodes, size_bytes, 1)
                / self.links.all_reduce_s(measured_size, measured_nodes, size_bytes, 1)
                for size_bytes in transfers["bytes"].astype(float)
            ]
        )
        without_sweep = float(ring_factor(size) / ring_factor(measured_size))
        wire_s = transfers["wire_s"].to_numpy(dtype=float) * np.where(np.isfinite(growth), growth, without_sweep)
        return exposed_transfers_s(before_s, wire_s, bool(transfers["in_order"].iloc[0]))

    def batch(self, world_size: int) -> float:
        """Return the samples per rank and step, a fraction if the ranks do not divide the global batch.

        In weak scaling, a step that accumulates gradients has this many samples several times.
        """
        return self.base_batch if self.scaling == WEAK else self.base_batch / world_size

    def global_batch(self, world_size: int) -> float:
        """Return the samples of all ranks per step."""
        accumulated = self.fields.get("accumulation_steps") if self.scaling == WEAK else None
        return self.batch(world_size) * world_size * (1 if pd.isna(accumulated) else float(accumulated))

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
    return pool(
        *(Spread(float(variance), float(degrees)) for variance, degrees in known[["variance", "degrees"]].values)
    )


def series_of(analysis: Analysis) -> list[ScalingSeries]:
    """Return every series with at least two numbers of ranks: all weak ones, and strong ones disjoint from them.

    A series without one rank starts with the configuration of `scaling.one_rank`, if there is one.
    """
    points = _points(analysis).dropna(subset="batch_per_gpu")  # no law without the work of a step
    if points.empty:
        return []
    fields = [
        name for name in trial_fields(analysis.results.trials) if name in points and name not in (*LAYOUT, "repeat")
    ]
    but_for_batch = [name for name in fields if name not in ("batch_per_gpu", "global_batch")]
    groups = points.groupby(but_for_batch, dropna=False, sort=False).ngroup() if but_for_batch else points["nodes"] * 0
    series: list[ScalingSeries] = []
    used: set[int] = set()
    without_batch = [name for name in fields if name != "batch_per_gpu"]
    for scaling, keys in ((WEAK, fields), (STRONG, [*without_batch, "global_batch"])):
        for _, rows in points.groupby(keys, dropna=False, sort=False):
            if scaling == STRONG and used & set(rows["configuration"]):
                continue
            same_model = points[groups == groups[rows.index[0]]]
            if (single := one_rank(rows, points, keys, analysis.fields)) is not None:
                rows = pd.concat([points.loc[[single]], rows])
            rows = rows.sort_values(list(LAYOUT), kind="stable").drop_duplicates("world_size")
            if len(rows) < 2:
                continue
            used |= set(rows["configuration"])
            shared = {name: rows[name].iloc[-1] for name in keys}
            base = float(rows["batch_per_gpu" if scaling == WEAK else "global_batch"].iloc[-1])
            link_data = *_gradients(analysis, same_model), _fits(analysis, shared)
            breakdown = _exposed(analysis, rows), _transfers(analysis, rows)
            series.append(ScalingSeries(scaling, shared, rows[_POINTS], base, *link_data, *breakdown))
    return series


def _points(analysis: Analysis) -> pd.DataFrame:
    configurations = analysis.configurations
    by_trial = configuration_of(configurations)
    throughput = analysis.measured.set_index("trial_id")["throughput_samples_per_s"].reindex(by_trial.index)
    runs = throughput.astype(float).map(np.log).groupby(by_trial)
    return configurations.assign(
        configuration=configurations.index,
        # Throughput and step time both come from the slowest rank's window, so they are equivalent.
        log_step=np.log(configurations["global_batch"].astype(float))
        - configurations["throughput_log_mean"].astype(float),
        variance=runs.var(),
        degrees=runs.count() - 1.0,
    )


def run_spreads(analysis: Analysis) -> dict[bool, Spread]:
    """Return the spread of one run's log step, pooled over the configurations that spread as the host does, and others.

    True: the host bounds the step, computes it (CPU ranks), or moves its gradients (`SOCKET`).
    """
    points = _points(analysis)
    of_host = points["host_bound"].map(lambda value: value is True).astype(bool)
    for name, value in (("device", "cpu"), ("interconnect", SOCKET)):
        if name in points:
            of_host |= points[name] == value
    return {is_of_host: pooled(points[of_host == is_of_host]) for is_of_host in (False, True)}


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
            "late_rank": exposed["waited_for_rank"].astype(float).to_numpy(),
        }
    )
    return frame[frame["world_size"] > 1].dropna(subset=["wire_s", "wait_s"], ignore_index=True)


def _transfers(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the buckets, in order, of each configuration whose breakdown includes the last local gradient."""
    buckets = analysis.communication.buckets
    buckets = buckets[buckets["configuration"].isin(rows["configuration"])].dropna(subset=["wire_s", "ready_before_s"])
    layout = rows.set_index("configuration")[["world_size", "nodes"]].astype(int)
    return buckets.join(layout, on="configuration").sort_values(["world_size", "bucket"])


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
