"""Scaling laws: step time as a function of the number of ranks, the batch per rank and the interconnect.

Every law is an entry of `LAWS`: a formula with its parameters. `predict.fit` fits them to measured steps, and
`predict.model` evaluates them at other numbers of ranks. Times are in seconds, sizes in bytes.

Speed-up laws of the number of ranks alone (Amdahl, Gustafson, universal scalability) are not among them. They know
nothing of the interconnect, its latency, or which part of the step grows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.integrate import quad
from scipy.special import ndtr

Array = np.ndarray

LARGEST_GAMMA = 10.0
"""Exponent at which computation and communication count as fully overlapped (the same bound as in Pollux)."""


@dataclass(frozen=True)
class Link:
    """An interconnect.

    latency_s: latency of one hop of a ring. bus_bytes_per_s: bus bandwidth (busbw of nccl-tests). label: its origin.
    """

    latency_s: float
    bus_bytes_per_s: float
    label: str


@dataclass(frozen=True)
class Points:
    """The points at which a law is evaluated: arrays of equal length.

    base_batch: samples per step of one rank alone. It is the batch per rank in weak scaling, and the global batch in
    strong scaling. wire_s: time of the gradients' all-reduce; 0 on one rank, NaN if the link or the size is unknown.
    growth: cost of communication relative to the ranks of the communication breakdown; 0 on one rank, NaN without a
    breakdown. nodes: default 1.
    """

    world_size: Array
    batch_per_gpu: Array
    base_batch: Array
    wire_s: Array
    growth: Array | None = None
    nodes: Array | None = None

    def __post_init__(self) -> None:
        if self.growth is None:
            object.__setattr__(self, "growth", np.full(len(self.wire_s), np.nan))
        if self.nodes is None:
            object.__setattr__(self, "nodes", np.ones(len(self.wire_s)))
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=float))

    @property
    def work(self) -> Array:
        """Return the computation per rank and step, relative to that of one rank alone."""
        return self.batch_per_gpu / self.base_batch

    @property
    def wire_known(self) -> bool:
        return bool(np.isfinite(self.wire_s).all())

    @property
    def growth_known(self) -> bool:
        return self.growth is not None and bool(np.isfinite(self.growth).all())

    def __getitem__(self, which: Array | slice) -> "Points":
        return Points(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Parameter:
    """A parameter of a law, with its bounds. Unit "s" is scaled with the step times during the fit."""

    name: str
    unit: str = ""
    low: float = 0.0
    high: float = np.inf
    start: float = 0.05


@dataclass(frozen=True)
class Law:
    """A law: `step_s(points, values)`, with values in the order of `parameters`. The first parameter is a time.

    part: where the entire cost of more ranks arises according to the law, "transfer", "wait" or "host"; None if the
    law takes the parts as measured. least_points: numbers of ranks that a fit requires, if more than its parameters.
    needs_wire: requires a known link. needs_breakdown: requires a communication breakdown.
    """

    title: str
    formula: str
    parameters: tuple[Parameter, ...]
    step_s: Callable[[Points, Array], Array]
    part: str | None
    least_points: int = 0
    needs_wire: bool = False
    needs_breakdown: bool = False

    @property
    def knows_link(self) -> bool:
        """Return True if the law follows a change of the interconnect."""
        return self.needs_wire or self.needs_breakdown

    def missing_input(self, points: Points) -> str | None:
        """Return which required measurement these points lack; None if nothing is missing."""
        if self.needs_wire and not points.wire_known:
            return "an all-reduce sweep and the size of the gradients"
        if self.needs_breakdown and not points.growth_known:
            return "a communication breakdown and a run on one rank"
        return None


def ring_factor(world_size: Array | float) -> Array:
    """Return 2 (N-1) / N: how often the bytes cross each rank's link in a ring all-reduce.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    size = np.asarray(world_size, dtype=float)
    return 2 * (size - 1) / size


def ring_s(world_size: Array | float, size_bytes: float, link: Link, messages: float = 1) -> Array:
    """Return the seconds of a ring all-reduce of S bytes, 2(N-1) α + 2(N-1)/N · S/B; 0 for one rank.

    messages: number of messages that the bytes are split into; each adds its latency.
    Source: Thakur, Rabenseifner and Gropp, Int. J. High Performance Computing Applications 19, 2005.
    """
    size = np.asarray(world_size, dtype=float)
    return messages * 2 * (size - 1) * link.latency_s + ring_factor(size) * size_bytes / link.bus_bytes_per_s


def two_level_s(
    world_size: Array | float,
    nodes: Array | float,
    size_bytes: float,
    inside: Link,
    between: Link,
    messages: float = 1,
) -> Array:
    """Return the seconds of a two-level all-reduce on n nodes with g = N / n ranks ranks_per_node.

    Inside each node: a reduce-scatter and an all-gather, 2(g-1) α + 2(g-1)/g · S/B. Between nodes: an
    all-reduce of the S/g bytes per rank, 2(n-1) α' + 2(n-1)/n · (S/g)/B'. `between` is one rank's share of its node's
    network. On one node the result equals `ring_s`. Source: Jia et al., Highly Scalable Deep Learning Training System,
    2018, section 3.3.
    """
    count = np.asarray(nodes, dtype=float)
    ranks_per_node = np.asarray(world_size, dtype=float) / count
    return ring_s(ranks_per_node, size_bytes, inside, messages) + ring_s(
        count, size_bytes / ranks_per_node, between, messages
    )


def overlapped_s(compute_s: Array, sync_s: Array, gamma: float | Array) -> Array:
    """Return (T_grad^γ + T_sync^γ)^(1/γ): no overlap for γ = 1, full overlap for large γ.

    Source: Qiao et al., Pollux, OSDI 2021, section 3.2.
    """
    larger, smaller = np.maximum(compute_s, sync_s), np.minimum(compute_s, sync_s)
    return larger * (1 + (smaller / larger) ** gamma) ** (1 / gamma)


def expected_largest(world_size: Array) -> Array:
    """Return the expected maximum of N standard normal values: 0, 0.564, 1.029, 1.424 for N = 1, 2, 4, 8.

    A step ends with its last rank. If the ranks' times spread, the wait for the slowest grows in this way.
    Source: David and Nagaraja, Order Statistics, 2003, section 4.5.
    """
    return np.array([_expected_largest(float(size)) for size in np.asarray(world_size, dtype=float)])


@cache
def _expected_largest(size: float) -> float:
    below = quad(lambda x: ndtr(x) ** size, -12, 0)[0]
    above = quad(lambda x: 1 - ndtr(x) ** size, 0, 12)[0]
    return max(0.0, float(above - below))


def _offset(points: Points, values: Array) -> Array:
    """DDP's own overhead: the same on two ranks as on many."""
    return values[0] * points.work + values[1] * (points.world_size > 1)


def _breakdown(points: Points, values: Array) -> Array:
    """Every part of the cost grows by its own law, see `ScalingSeries.at`."""
    assert points.growth is not None
    return values[0] * points.work + values[1] * points.growth


def wait_growth(world_size: Array, late_rank: int | None) -> Array:
    """Return the growth of the wait for the slowest rank, in any unit.

    If it is the same rank in every step, all others wait for it as soon as it is among them. If it varies, the wait
    grows like `expected_largest`.
    """
    if late_rank is not None:
        return (np.asarray(world_size) > late_rank).astype(float)
    return expected_largest(world_size)


def exposed_transfers_s(ready_before_s: Array, wire_s: Array, in_order: bool = True) -> float:
    """Return the seconds of a step's transfers after its last local gradient, for buckets in their order.

    ready_before_s: how long before that gradient each bucket is ready and its transfer can start. in_order (NCCL): a
    transfer also waits for the end of the previous one. If the buckets keep pace with the backward pass, only the last
    one is exposed. Otherwise their entire excess is exposed.
    """
    end_s = -np.inf
    for before_s, transfer_s in zip(ready_before_s, wire_s, strict=True):
        alone_s = transfer_s - before_s
        end_s = max(alone_s, end_s + transfer_s if in_order else end_s)
    return float(max(0.0, end_s))


def _ring(points: Points, values: Array) -> Array:
    """A cost proportional to the bytes that cross a link."""
    return values[0] * points.work + values[1] * ring_factor(points.world_size)


def _alpha_beta(points: Points, values: Array) -> Array:
    hops = 2 * (points.world_size - 1)
    return values[0] * points.work + values[1] * hops + values[2] * ring_factor(points.world_size)


def _straggler(points: Points, values: Array) -> Array:
    return values[0] * points.work + values[1] * expected_largest(points.world_size)


def _overlap(points: Points, values: Array) -> Array:
    return overlapped_s(values[0] * points.work, points.wire_s, values[1])


def _hidden(points: Points, values: Array) -> Array:
    """The backward pass hides the same seconds of any all-reduce; that amount shrinks with its work."""
    return values[0] * points.work + np.maximum(0.0, points.wire_s - values[1] * points.work)


_ALONE = Parameter("step time on one rank", "s", 0.0, np.inf, 1.0)
_GAMMA = Parameter("overlap exponent γ", "", 1.0, LARGEST_GAMMA, 2.0)

LAWS: Mapping[str, Law] = {
    "breakdown": Law(
        "communication breakdown",
        "T₁ + c · (host + wait(N) + exposed buckets(N))",
        (_ALONE, Parameter("cost on the ranks of the breakdown", "s")),
        _breakdown,
        part=None,
        needs_breakdown=True,
    ),
    "ring": Law("ring", "T₁ + c · 2(N-1)/N", (_ALONE, Parameter("exposed cost on 2 ranks", "s")), _ring, "transfer"),
    "overlap": Law(
        "overlap with the measured all-reduce",
        "(T₁^γ + W(N)^γ)^(1/γ)",
        (_ALONE, _GAMMA),
        _overlap,
        "transfer",
        needs_wire=True,
    ),
    "hidden": Law(
        "measured all-reduce minus the hidden part",
        "T₁ + max(0, W(N) - h)",
        (_ALONE, Parameter("hidden all-reduce", "s")),
        _hidden,
        "transfer",
        needs_wire=True,
    ),
    "offset": Law("DDP offset", "T₁ + δ for N > 1", (_ALONE, Parameter("offset", "s")), _offset, "host"),
    "straggler": Law(
        "straggler", "T₁ + σ · E[largest of N]", (_ALONE, Parameter("spread of ranks", "s")), _straggler, "wait"
    ),
    "alpha_beta": Law(
        "all-reduce, α and β fitted",
        "T₁ + 2(N-1) α + 2(N-1)/N · β",
        (_ALONE, Parameter("α", "s", start=0.01), Parameter("β", "s")),
        _alpha_beta,
        "transfer",
        least_points=4,
    ),
}
"""All laws that are fitted. Formulas give the step time at a constant batch per rank (weak scaling). In strong scaling
the computation shrinks with the batch (`Points.work`).
"""
