"""How many trials, and how much time, the rest of a search takes."""

from collections.abc import Sequence

from study.improve.evidence import Evidence
from study.improve.rounds import SEEDS, Configuration, Round, Settings

GROUPS = 2
"""Worker groups per round, except for the final one."""

LOSS_TRIALS = 1 + SEEDS
"""Most trials of the final round that only show a loss: with other seeds, and with the batch of the baseline."""


FINAL_BREAKDOWNS = 2
"""Trainings that the final round also runs as timed steps: baseline and result."""


def needed(
    settings: Settings,
    evidence: Evidence,
    rounds: Sequence[Round],
    best: Configuration,
    configurations: int,
    final_groups: int,
) -> tuple[int, float]:
    """Return trials and seconds of the rounds so far, one of so many configurations (0: none), and the final one.

    best: the configuration that the round compares others with. They are expected to take as long as it does.
    """
    used = [name for done in rounds for name in done.trial_ids]
    is_checked = rounds[-1].kind == "final" and not configurations
    losses = LOSS_TRIALS if can_compare_losses(settings) and not is_checked else 0
    sizes = max(1, len(settings.compared_sizes))
    of_best = sizes * (configurations * GROUPS + final_groups)
    of_baseline = sizes * final_groups + losses
    breakdowns = (FINAL_BREAKDOWNS + bool(configurations)) * settings.is_training
    trials = of_best + of_baseline + breakdowns
    groups = final_groups + (GROUPS if configurations else 0)
    if settings.base.door != "factory":
        groups = trials  # a script needs new processes each time
    seconds = of_best * _trial_s(evidence, rounds, best) + of_baseline * _trial_s(evidence, rounds, ())
    seconds += breakdowns * _breakdown_s(evidence, rounds)
    seconds += trials * evidence.pause_s(used) + groups * evidence.start_s(used)
    return len(used) + trials, evidence.elapsed_s(used) + seconds


def can_compare_losses(settings: Settings) -> bool:
    """Return True if a lever may change the arithmetic, and losses of several seeds can show how much they vary."""
    is_possible = not settings.is_training and can_set_seeds(settings)
    return is_possible and any(lever.effect == "arithmetic" for lever in settings.levers.values())


def can_set_seeds(settings: Settings) -> bool:
    """Return True if a trial's seed has an effect. That of a user's own code must be bound (`--bind seed=--seed`)."""
    return settings.base.door == "factory" or "seed" in settings.base.bound_fields


def last_round_of(configuration: Configuration, rounds: Sequence[Round]) -> Round | None:
    """Return the last of the finished rounds that measured a configuration."""
    return next((done for done in reversed(rounds) if configuration in done.configurations), None)


def _trial_s(evidence: Evidence, rounds: Sequence[Round], configuration: Configuration) -> float:
    """Return how long a trial of a configuration took in the last round that has it, and one of the baseline without.

    What remains after the losses have ruled out some levers may not have run yet.
    """
    last = last_round_of(configuration, rounds)
    if last is None:
        return _trial_s(evidence, rounds, ())
    return evidence.trial_s([planned.trial.trial_id for planned in last.timed(configuration)])


def _breakdown_s(evidence: Evidence, rounds: Sequence[Round]) -> float:
    """Return how long a training takes as timed steps; 0 if none has run."""
    names = [planned.trial.trial_id for done in rounds for planned in done.planned if planned.role == "breakdown"]
    return evidence.trial_s(names) if names else 0.0
