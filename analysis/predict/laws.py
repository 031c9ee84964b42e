"""Laws of scaling: step time as a function of the number of ranks, the batch per rank and the interconnect.

Every law is a line in `LAWS`: a formula with its parameters. `fitting` finds these from measured steps, `prediction` asks
the law about numbers of ranks that were not measured. Times are seconds, sizes bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.integrate import quad
from scipy.special import ndtr

Array = np.ndarray

LARGEST_GAMMA = 10.0
"""Exponent at which computation and communication count as fully overlapped (Pollux bounds it so, too)."""


@dataclass(frozen=True)
class Link:
    """An interconnect: latency_s of one hop of a ring, and bus bandwidth in bytes/s (nccl-tests' busbw). label: whence."""

    latency_s: float
    bus_bytes_per_s: float
    label: str


@dataclass(frozen=True)
class Points:
    """Where a law is asked: arrays of one length.

    base_batch: samples that one rank alone would take a step, those of the batch per rank where that is held (weak
    scaling) and of the global batch where that is (strong). wire_s: time of the gradients' all-reduce where the link and
    their size are known, 0 on one rank; NaN where they are not. growth: what ranks cost each other in units of what 2 do,
    as the parts of the communication account grow, 0 on one rank; NaN where no account was kept.
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
        """What a rank computes a step, in units of what one rank alone would."""
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
    """A law's parameter with the values that it may take. unit "s" is scaled with the steps when it is searched for."""

    name: str
    unit: str = ""
    low: float = 0.0
    high: float = np.inf
    start: float = 0.05


@dataclass(frozen=True)
class Law:
    """A law: `step_s(points, values)` in the order of `parameters`, of which the first is a time.

    joint: fitted over all batches together, not to one series. needs_wire, needs_account: cannot be asked where no link
    is known, or no communication account was kept.
    """

    title: str
    formula: str
    parameters: tuple[Parameter, ...]
    step_s: Callable[[Points, Array], Array]
    joint: bool = False
    needs_wire: bool = False
    needs_account: bool = False

    def lacks(self, points: Points) -> str | None:
        """What the law needs and these points do not have."""
        if self.needs_wire and not points.wire_known:
            return "an all-reduce sweep and the gradients' size"
        if self.needs_account and not points.growth_known:
            return "a communication account and one rank"
        return None


def amdahl(world_size: Array, serial: float | Array) -> Array:
    """Speed-up 1 / (s + (1 - s) / N) with serial share s (Amdahl, AFIPS 1967)."""
    return 1 / (serial + (1 - serial) / world_size)


def gustafson(world_size: Array, serial: float | Array) -> Array:
    """Speed-up N - s (N - 1) with serial share s (Gustafson, Communications of the ACM 31, 1988)."""
    return world_size - serial * (world_size - 1)


def universal(world_size: Array, contention: float | Array, coherency: float | Array) -> Array:
    """Speed-up N / (1 + σ(N-1) + κN(N-1)): contention σ, coherency κ (Gunther, Guerrilla Capacity Planning, 2007)."""
    return world_size / (1 + contention * (world_size - 1) + coherency * world_size * (world_size - 1))


def ring_factor(world_size: Array | float) -> Array:
    """2 (N-1) / N: how often the bytes cross each rank's link in a ring all-reduce (nccl-tests, doc/PERFORMANCE.md)."""
    size = np.asarray(world_size, dtype=float)
    return 2 * (size - 1) / size


def ring_s(world_size: Array | float, size_bytes: float, link: Link, messages: float = 1) -> Array:
    """Seconds of a ring all-reduce, 2(N-1) α + 2(N-1)/N · S/B, of S bytes in so many messages, each with its latency.

    Thakur, Rabenseifner and Gropp, Int. J. High Performance Computing Applications 19, 2005; 0 for one rank.
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
    """Seconds of an all-reduce in two levels on n nodes with g = N / n ranks each.

    A reduce-scatter and an all-gather inside each node, and between nodes an all-reduce of the S/g bytes that each rank
    holds: 2(g-1) α + 2(g-1)/g · S/B inside, 2(n-1) α' + 2(n-1)/n · (S/g)/B' between; `between` is one rank's share of its
    node's network (Jia et al., Highly Scalable Deep Learning Training System, 2018, section 3.3). One node: `ring_s`.
    """
    count = np.asarray(nodes, dtype=float)
    each = np.asarray(world_size, dtype=float) / count
    return ring_s(each, size_bytes, inside, messages) + ring_s(count, size_bytes / each, between, messages)


def overlapped_s(compute_s: Array, sync_s: Array, gamma: float | Array) -> Array:
    """(T_grad^γ + T_sync^γ)^(1/γ): γ = 1 overlaps nothing, a large γ all (Qiao et al., Pollux, OSDI 2021, section 3.2)."""
    larger, smaller = np.maximum(compute_s, sync_s), np.minimum(compute_s, sync_s)
    return larger * (1 + (smaller / larger) ** gamma) ** (1 / gamma)


def expected_largest(world_size: Array) -> Array:
    """Expectation of the largest of N standard normal values: 0, 0.564, 1.029 and 1.424 for N = 1, 2, 4, 8.

    The step ends with the last rank; where ranks' own times spread, that is how waiting for it grows (David and Nagaraja,
    Order Statistics, 2003, section 4.5).
    """
    return np.array([_expected_largest(float(size)) for size in np.asarray(world_size, dtype=float)])


@cache
def _expected_largest(size: float) -> float:
    below = quad(lambda x: ndtr(x) ** size, -12, 0)[0]
    above = quad(lambda x: 1 - ndtr(x) ** size, 0, 12)[0]
    return max(0.0, float(above - below))


def _of_speed_up(points: Points, step_s: float, speed_up: Array) -> Array:
    """Step time from a speed-up of throughput: that of one rank, times the work of all ranks, over the speed-up."""
    return step_s * points.work * points.world_size / speed_up


def _amdahl(points: Points, values: Array) -> Array:
    return _of_speed_up(points, values[0], amdahl(points.world_size, values[1]))


def _gustafson(points: Points, values: Array) -> Array:
    return _of_speed_up(points, values[0], gustafson(points.world_size, values[1]))


def _universal(points: Points, values: Array) -> Array:
    return _of_speed_up(points, values[0], universal(points.world_size, values[1], values[2]))


def _offset(points: Points, values: Array) -> Array:
    """DDP's own work, which two ranks pay as much as many."""
    return values[0] * points.work + values[1] * (points.world_size > 1)


def _account(points: Points, values: Array) -> Array:
    """Each part of the cost grows by its own law, see `account_growth`."""
    assert points.growth is not None
    return values[0] * points.work + values[1] * points.growth


def account_growth(world_size: Array, host_s: float, wait_s: float, wire_s: Array, wire_on_two_s: float) -> Array:
    """What N ranks cost each other in units of what 2 do, in seconds or any other unit of all parts.

    host_s, wait_s: on 2 ranks. The host's work and contention on the device stay as they are from there on, and the wait
    for the slowest rank grows as `expected_largest`. wire_s: exposed transfers on each number of ranks
    (`exposed_transfers_s`), wire_on_two_s those on 2. Where all parts are 0, what there is stays as it is.
    """
    size = np.asarray(world_size, dtype=float)
    total = host_s + wait_s + wire_on_two_s
    if total <= 0:
        return (size > 1).astype(float)
    grown = host_s * (size > 1) + wait_s * expected_largest(size) / _expected_largest(2.0) + wire_s
    return np.asarray(grown / total)


def exposed_transfers_s(ready_before_s: Array, wire_s: Array, in_order: bool = True) -> float:
    """Seconds of a step's transfers after its last local gradient, of buckets in their order.

    A bucket is ready so long before that gradient, and its transfer begins then; in order (NCCL), not before the end of the
    one before it. So while the buckets keep pace with the backward pass only the last one is exposed, and where they do
    not, all that they are longer by is.
    """
    end_s = -np.inf
    for before_s, transfer_s in zip(ready_before_s, wire_s, strict=True):
        alone_s = transfer_s - before_s
        end_s = max(alone_s, end_s + transfer_s if in_order else end_s)
    return float(max(0.0, end_s))


def _ring(points: Points, values: Array) -> Array:
    """A cost that grows as the bytes that cross a link do."""
    return values[0] * points.work + values[1] * ring_factor(points.world_size)


def _alpha_beta(points: Points, values: Array) -> Array:
    hops = 2 * (points.world_size - 1)
    return values[0] * points.work + values[1] * hops + values[2] * ring_factor(points.world_size)


def _straggler(points: Points, values: Array) -> Array:
    return values[0] * points.work + values[1] * expected_largest(points.world_size)


def _overlap(points: Points, values: Array) -> Array:
    return overlapped_s(values[0] * points.work, points.wire_s, values[1])


def _hidden(points: Points, values: Array) -> Array:
    """The backward pass hides as much of a longer all-reduce as of a shorter one; what it hides shrinks with its work."""
    return values[0] * points.work + np.maximum(0.0, points.wire_s - values[1] * points.work)


def _pollux(points: Points, values: Array) -> Array:
    """With the link known; `_pollux_fitted` fits it."""
    compute_s = values[0] + values[1] * points.batch_per_gpu
    return overlapped_s(compute_s, values[2] * (points.world_size > 1) + points.wire_s, values[3])


def _pollux_fitted(points: Points, values: Array) -> Array:
    compute_s = values[0] + values[1] * points.batch_per_gpu
    sync_s = values[2] * (points.world_size > 1) + values[4] * ring_factor(points.world_size)
    return overlapped_s(compute_s, sync_s, values[3])


_ALONE = Parameter("step of one rank", "s", 0.0, np.inf, 1.0)
_SERIAL = Parameter("serial share", "", 0.0, 1.0)
_GAMMA = Parameter("overlap exponent γ", "", 1.0, LARGEST_GAMMA, 2.0)
_SHARED = (
    Parameter("compute α", "s", 0.0, np.inf, 0.5),
    Parameter("compute β a sample", "s", 0.0, np.inf, 0.005),
    Parameter("DDP's offset", "s"),
    _GAMMA,
)

LAWS: Mapping[str, Law] = {
    "account": Law(
        "parts of the account",
        "T₁ + c · (host + wait · E[largest of N] + exposed buckets(N))",
        (_ALONE, Parameter("cost on 2 ranks", "s")),
        _account,
        needs_account=True,
    ),
    "ring": Law("ring", "T₁ + c · 2(N-1)/N", (_ALONE, Parameter("exposed cost on 2 ranks", "s")), _ring),
    "overlap": Law(
        "overlap with the measured all-reduce", "(T₁^γ + W(N)^γ)^(1/γ)", (_ALONE, _GAMMA), _overlap, needs_wire=True
    ),
    "hidden": Law(
        "measured all-reduce less what is hidden",
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
"""Every law that is fitted. Formulas give the step where the batch per rank is held; where the global batch is, what is
computed shrinks with it (`Points.work`). Their order is that of preference where no held-out point can tell them apart,
but see `prediction.choose`."""
