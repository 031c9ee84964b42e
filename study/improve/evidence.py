"""What the finished trials of a search show: ratios of configurations, shares of the step, losses, and time."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from analysis.statistics import CONFIDENCE, log_estimates, paired_ratio

LONGEST_PAUSE_S = 120.0
"""A longer time without a trial is an interruption and does not count towards the budget."""


@dataclass(frozen=True)
class Run:
    """A finished trial. throughput_samples_per_s: of all ranks; None if the trial is not done. time_to_target_s: of a
    training, until the end of the first epoch at its target accuracy; None if it did not reach it.

    started_at, duration_s: with the start of its worker group, if it is the first one there. start_s: of that start.
    """

    trial_id: str
    status: str
    throughput_samples_per_s: float | None
    started_at: float
    duration_s: float
    reason: str = ""
    start_s: float = 0.0
    time_to_target_s: float | None = None


class Ratio(NamedTuple):
    """A ratio with its interval; NaN if unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evidence:
    """The finished trials by trial id.

    shares: returns the share of the step per region of these trials, see `analysis.compare.bottleneck.regions`, with
    the name of the region that bounds it as `bound`. losses: returns the loss per step of a trial; empty if unknown.
    """

    runs: Mapping[str, Run]
    shares: Callable[[tuple[str, ...]], tuple[Mapping[str, float], str | None]]
    losses: Callable[[str], Sequence[float]]

    def elapsed_s(self, trial_ids: Collection[str]) -> float:
        """Return how long these trials took, with the pauses between them, but without interruptions."""
        total_s, ended_at = 0.0, -math.inf
        for run in sorted((self.runs[name] for name in trial_ids), key=lambda run: run.started_at):
            is_interruption = run.started_at - ended_at > LONGEST_PAUSE_S
            end = run.started_at + run.duration_s
            total_s += max(0.0, end - (run.started_at if is_interruption else ended_at))
            ended_at = max(end, ended_at)
        return total_s

    def trial_s(self, trial_ids: Collection[str]) -> float:
        """Return the mean duration of these trials, without the starts of worker groups."""
        return sum((run := self.runs[name]).duration_s - run.start_s for name in trial_ids) / len(trial_ids)

    def start_s(self, trial_ids: Collection[str]) -> float:
        """Return the mean duration of the starts of worker groups before these trials; 0 if none started."""
        starts = [run.start_s for name in trial_ids if (run := self.runs[name]).start_s > 0]
        return sum(starts) / len(starts) if starts else 0.0

    def pause_s(self, trial_ids: Collection[str]) -> float:
        """Return the mean time between these trials, which may have been interrupted."""
        pauses_s = self.elapsed_s(trial_ids) - sum(self.runs[name].duration_s for name in trial_ids)
        return max(0.0, pauses_s / len(trial_ids))


class Sample(NamedTuple):
    """A done run of a configuration, on `world_size` ranks, in a block of trials that ran next to one another.

    A block is one worker group, unless a trial needs processes of its own kind, or a failure ended the group.
    """

    configuration: tuple[str, ...]
    world_size: int
    block: str
    speed: float
    """samples/s, or what else is to be raised"""


def ratio(
    samples: Sequence[Sample],
    pair: tuple[tuple[str, ...], tuple[str, ...]],
    sizes: tuple[int, ...],
    confidence: float = CONFIDENCE,
    blocks: Collection[str] | None = None,
) -> Ratio:
    """Return the ratio of the speeds of two configurations; NaN if unknown.

    sizes: a number of ranks, or none if each configuration has one; or two: then the ratio is that of speed on the
    second / speed on the first, so of scaling efficiencies. blocks: those that count, see `paired_ratio`; None for all.
    """
    values, estimates = _estimated(tuple(samples), sizes)
    names = ("+".join(pair[0]), "+".join(pair[1]))
    if not set(names) <= {*estimates.index}:
        return Ratio(*(float("nan"),) * 3)
    return Ratio(*paired_ratio(values, estimates, names, "speed", confidence, blocks))


@functools.lru_cache(maxsize=64)
def _estimated(samples: tuple[Sample, ...], sizes: tuple[int, ...]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the values that are compared, one row per run or, of efficiencies, per block, and their estimates."""
    frame = pd.DataFrame(samples, columns=Sample._fields).rename(columns={"block": "worker_group"})
    frame["configuration"] = ["+".join(names) for names in frame["configuration"]]
    values = frame[frame["world_size"] == sizes[-1]] if sizes else frame
    if len(sizes) > 1:
        keys = ["configuration", "worker_group"]
        per_group = frame.groupby([*keys, "world_size"])["speed"].mean().unstack("world_size")
        per_group = per_group.reindex(columns=list(sizes)).dropna()
        values = (per_group[sizes[1]] / per_group[sizes[0]]).rename("speed").reset_index()
    return values, log_estimates(values, "configuration", "speed")
