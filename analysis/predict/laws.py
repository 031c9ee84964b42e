"""Scaling laws: step time as a function of the number of ranks, the batch per rank and the interconnect.

Every law is an entry of `LAWS`: a formula with its parameters. `predict.fit` fits them to measured steps, and
`predict.model` evaluates them at other numbers of ranks. Times are in seconds, sizes in bytes.
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
    growth: cost of communication relative to 2 ranks, see `cost_growth`; 0 on one rank, NaN without a communication
    breakdown.
    """

    world_size: Array
    batch_per_gpu: Array
    base_batch: Array
    wire_s: Array
    growth: Array | None = None

    def __post_init__(self) -> None:
        if self.growth is None:
            object.__setattr__(self, "growth", np.full(len(self.wire_s), np.nan))
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

    joint: fitted to the series of all batches together. needs_wire: requires a known link. needs_breakdown: requires a
    communication breakdown.
    """

    title: str
    formula: str
    parameters: tuple[Parameter, ...]
    step_s: Callable[[Points, Array], Array]
    joint: bool = False
    needs_wire: bool = False
    needs_breakdown: bool = False

    def missing_input(self, points: Points) -> str | None:
        """Return which required measurement these points lack; None if nothing is missing."""
        if self.needs_wire and not points.wire_known:
            return "an all-reduce sweep and the size of the gradients"
        if self.needs_breakdown and not points.growth_known:
            return "a communication breakdown and a run on one rank"
        return None


def amdahl(world_size: Array, serial: float | Array) -> Array:
    """Return the speed-up 1 / (s + (1 - s) / N) for serial share s (Amdahl, AFIPS 1967)."""
    return 1 / (serial + (1 - serial) / world_size)


def gustafson(world_size: Array, serial: float | Array) -> Array:
    """Return the speed-up N - s (N - 1) for serial share s (Gustafson, Communications of the ACM 31, 1988)."""
    return world_size - serial * (world_size - 1)


def universal(world_size: Array, contention: float | Array, coherency: float | Array) -> Array:
    """Return the speed-up N / (1 + σ(N-1) + κN(N-1)) for contention σ and coherency κ.

    Source: Gunther, Guerrilla Capacity Planning, 2007.
    """
    return world_size / (1 + contention * (world_size - 1) + coherency * world_size * (world_size - 1))


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


def _of_speed_up(points: Points, step_s: float, speed_up: Array) -> Array:
    """Return the step time: that of one rank, times the work of all ranks, over the speed-up."""
    return step_s * points.work * points.world_size / speed_up


def _amdahl(points: Points, values: Array) -> Array:
    return _of_speed_up(points, values[0], amdahl(points.world_size, values[1]))


def _gustafson(points: Points, values: Array) -> Array:
    return _of_speed_up(points, values[0], gustafson(points.world_size, values[1]))


def _universal(points: Points, values: Array) -> Array:
    return _of_speed_up(points, values[0], universal(points.world_size, values[1], values[2]))


def _offset(points: Points, values: Array) -> Array:
    """DDP's own overhead: the same on two ranks as on many."""
    return values[0] * points.work + values[1] * (points.world_size > 1)


def _breakdown(points: Points, values: Array) -> Array:
    """Every part of the cost grows by its own law, see `cost_growth`."""
    assert points.growth is not None
    return values[0] * points.work + values[1] * points.growth


def cost_growth(world_size: Array, host_s: float, wait_s: float, wire_s: Array, wire_on_two_s: float) -> Array:
    """Return the cost of communication on N ranks relative to 2 ranks. All parts have the same unit.

    host_s, wait_s: on 2 ranks. Host work and contention on the device stay constant from 2 ranks on. The wait for the
    slowest rank grows like `expected_largest`. wire_s: exposed transfers on each number of ranks, see
    `exposed_transfers_s`. wire_on_two_s: exposed transfers on 2 ranks. If all parts are 0, the cost stays constant.
    """
    size = np.asarray(world_size, dtype=float)
    total = host_s + wait_s + wire_on_two_s
    if total <= 0:
        return (size > 1).astype(float)
    grown = host_s * (size > 1) + wait_s * expected_largest(size) / _expected_largest(2.0) + wire_s
    return np.asarray(grown / total)


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


def _pollux(points: Points, values: Array) -> Array:
    """Pollux with a known link. `_pollux_fitted` fits the link as well."""
    compute_s = values[0] + values[1] * points.batch_per_gpu
    return overlapped_s(compute_s, values[2] * (points.world_size > 1) + points.wire_s, values[3])


def _pollux_fitted(points: Points, values: Array) -> Array:
    compute_s = values[0] + values[1] * points.batch_per_gpu
    sync_s = values[2] * (points.world_size > 1) + values[4] * ring_factor(points.world_size)
    return overlapped_s(compute_s, sync_s, values[3])


_ALONE = Parameter("step time on one rank", "s", 0.0, np.inf, 1.0)
_SERIAL = Parameter("serial share", "", 0.0, 1.0)
_GAMMA = Parameter("overlap exponent γ", "", 1.0, LARGEST_GAMMA, 2.0)
_SHARED = (
    Parameter("compute α", "s", 0.0, np.inf, 0.5),
    Parameter("compute β per sample", "s", 0.0, np.inf, 0.005),
    Parameter("DDP offset", "s"),
    _GAMMA,
)

LAWS: Mapping[str, Law] = {
    "account": Law(
        "communication breakdown",
        "T₁ + c · (host + wait · E[largest of N] + exposed buckets(N))",
        (_ALONE, Parameter("cost on 2 ranks", "s")),
        _breakdown,
        needs_breakdown=True,
    ),
    "ring": Law("ring", "T₁ + c · 2(N-1)/N", (_ALONE, Parameter("exposed cost on 2 ranks", "s")), _ring),
    "overlap": Law(
        "overlap with the measured all-reduce", "(T₁^γ + W(N)^γ)^(1/γ)", (_ALONE, _GAMMA), _overlap, needs_wire=True
    ),
    "hidden": Law(
        "measured all-reduce minus the hidden part",
        "T₁ + max(0, W(N) - h)",
        (_ALONE, Parameter("hidden all-reduce", "s")),
        _hidden,
        needs_wire=True,
    ),
    "offset": Law("DDP offset", "T₁ + δ for N > 1", (_ALONE, Parameter("offset", "s")), _offset),
    "straggler": Law("straggler", "T₁ + σ · E[largest of N]", (_ALONE, Parameter("spread of ranks", "s")), _straggler),
    "gustafson": Law("Gustafson", "T₁ · N / (N - s(N-1))", (_ALONE, _SERIAL), _gustafson),
    "amdahl": Law("Amdahl", "T₁ · N · (s + (1-s)/N)", (_ALONE, _SERIAL), _amdahl),
    "alpha_beta": Law(
        "all-reduce, α and β fitted",
        "T₁ + 2(N-1) α + 2(N-1)/N · β",
        (_ALONE, Parameter("α", "s", start=0.01), Parameter("β", "s")),
        _alpha_beta,
    ),
    "universal": Law(
        "universal scalability",
        "T₁ · (1 + σ(N-1) + κN(N-1))",
        (_ALONE, Parameter("contention σ"), Parameter("coherency κ", start=0.001)),
        _universal,
    ),
    "pollux": Law(
        "Pollux over N and batch, all-reduce measured",
        "((α + βb)^γ + (δ + W(N))^γ)^(1/γ)",
        _SHARED,
        _pollux,
        joint=True,
        needs_wire=True,
    ),
    "pollux_fitted": Law(
        "Pollux over N and batch, all-reduce fitted",
        "((α + βb)^γ + (δ + c · 2(N-1)/N)^γ)^(1/γ)",
        (*_SHARED, Parameter("all-reduce on 2 ranks", "s")),
        _pollux_fitted,
        joint=True,
    ),
}
"""All laws that are fitted. Formulas give the step time at a constant batch per rank (weak scaling). In strong scaling
the computation shrinks with the batch (`Points.work`). The order is the order of preference if no held-out point can
distinguish the laws, see `model.choose`.
"""
