"""What the rounds show of a lever: its gain by the goal, and whether it is one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from study.improve.budget import last_round_of
from study.improve.evidence import Evidence, Ratio, Run, Sample, ratio
from study.improve.rounds import Configuration, Planned, Round, Settings

LEAST_GAIN = 1.005
"""A smaller gain that is not significant is not measured again."""

CLEAR_GAIN = 1.2
"""A gain whose 95 % interval is above this is not corrected for the number of comparisons, and one of this size is
measured again even if its interval contains 1, as that of two groups is wide. The final comparison verifies both."""

UNKNOWN = Ratio(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Attempt:
    """A lever in one round. onto: the configuration that it was added to. bottleneck: region that bounded that one.

    gain: by the goal. on_one: gain in throughput on one rank, unknown unless the goal is efficiency. on_all: on all.
    status: of its trials. reason: why they did not end well.
    """

    lever: str
    onto: Configuration
    bound: float | None
    bottleneck: str | None
    gain: Ratio
    on_one: Ratio
    on_all: Ratio
    is_gain: bool
    is_promising: bool
    status: str = "done"
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """Gains of a configuration over another: by the goal, and in throughput on one rank and on all."""

    gain: Ratio
    on_one: Ratio
    on_all: Ratio

    def is_gain(self, settings: Settings) -> bool:
        """Return True if the gain is significant, and if it is one in efficiency, faster on all ranks too.

        Efficiency also rises if one rank becomes slower, which helps nobody.
        """
        return self.gain.low > 1 and (settings.goal != "efficiency" or self.on_all.low > 1)


def compared(
    settings: Settings,
    evidence: Evidence,
    rounds: Sequence[Round],
    pair: tuple[Configuration, Configuration],
    blocks: Sequence[str] | None = None,
) -> Comparison:
    """Compare two configurations. blocks: those that count, see `paired_ratio`; None for all."""
    by_goal = samples(settings, evidence, rounds)
    throughputs = samples(settings, evidence, rounds, in_throughput=True)
    if settings.is_training and _fell_short(evidence, rounds, pair[0]):
        return Comparison(UNKNOWN, UNKNOWN, UNKNOWN)
    all_ranks = () if settings.goal != "efficiency" else settings.compared_sizes[1:]
    return Comparison(
        ratio(by_goal, pair, settings.compared_sizes, blocks=blocks),
        UNKNOWN if settings.goal != "efficiency" else ratio(throughputs, pair, (1,), blocks=blocks),
        ratio(throughputs, pair, all_ranks, blocks=blocks),
    )


def samples(
    settings: Settings, evidence: Evidence, rounds: Sequence[Round], *, in_throughput: bool = False
) -> list[Sample]:
    """Return the done runs of all rounds, with values of the goal or throughputs."""
    return [
        Sample(planned.configuration, planned.trial.world_size, done.block_name(number), value)
        for done in rounds
        for number, block in enumerate(done.blocks)
        for planned in block
        if planned.role == "timed"
        and (value := _value(settings, planned, evidence.runs[planned.trial.trial_id], in_throughput)) is not None
    ]


def _value(settings: Settings, planned: Planned, run: Run, in_throughput: bool) -> float | None:
    """Return the throughput, that per rank if the goal is cost, or the trainings per second to their target."""
    throughput = run.throughput_samples_per_s
    if in_throughput or throughput is None or settings.goal in ("throughput", "efficiency"):
        return throughput
    if settings.goal == "cost":
        return throughput / planned.trial.world_size
    return None if run.time_to_target_s is None else 1 / run.time_to_target_s


def _fell_short(evidence: Evidence, rounds: Sequence[Round], configuration: Configuration) -> bool:
    """Return True if a training did not end at its target. The others would then be those with fortunate seeds."""
    runs = [evidence.runs[p.trial.trial_id] for done in rounds for p in done.timed(configuration)]
    return any(run.time_to_target_s is None for run in runs)


def attempt(
    settings: Settings,
    evidence: Evidence,
    rounds: Sequence[Round],
    pair: tuple[Configuration, Configuration],
    bound: float | None,
    bottleneck: str | None,
    confidence: float,
) -> Attempt:
    """Judge the last lever of a configuration, against the one without it, by all rounds so far.

    confidence: that of the interval with which it is a gain, corrected for the number of comparisons.
    """
    found = compared(settings, evidence, rounds, pair)
    is_known = not math.isnan(found.gain.value)
    by_goal = samples(settings, evidence, rounds)
    corrected = ratio(by_goal, pair, settings.compared_sizes, confidence) if is_known else UNKNOWN
    last = last_round_of(pair[0], rounds)
    status, reason = reason_of(last, pair[0], evidence) if last and not is_known else ("done", "")
    is_large = found.gain.low > 1 and found.gain.value >= LEAST_GAIN or found.gain.value >= CLEAR_GAIN
    is_faster = settings.goal != "efficiency" or found.on_all.value >= 1
    return Attempt(
        pair[0][-1],
        pair[1],
        bound,
        bottleneck,
        found.gain,
        found.on_one,
        found.on_all,
        is_gain=(corrected.low > 1 or found.gain.low > CLEAR_GAIN) and found.is_gain(settings),
        is_promising=is_large and is_faster,
        status=status,
        reason=reason,
    )


def reason_of(of: Round, configuration: Configuration, evidence: Evidence) -> tuple[str, str]:
    """Return status and reason of the first trial of a configuration that is not done."""
    runs = (evidence.runs[planned.trial.trial_id] for planned in of.timed(configuration))
    return next(((run.status, run.reason) for run in runs if run.status != "done"), ("done", ""))


def is_lost(done: Round, evidence: Evidence) -> bool:
    """Return True if no trial of the reference is done, so that nothing can be compared."""
    return not any(evidence.runs[name].status == "done" for name in done.ids_of(done.configurations[0]))
