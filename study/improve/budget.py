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
    members: Sequence[Configuration],
    best: Configuration,
    final_groups: int,
) -> tuple[int, float]:
    """Return trials and seconds of the rounds so far, one of these members (none: no round), and the final one.

    best: the configuration that the final round compares with the baseline.
    """
    used = [name for done in rounds for name in done.trial_ids]
    is_checked = rounds[-1].kind == "final" and not members
    losses = LOSS_TRIALS if can_compare_losses(settings) and not is_checked else 0
    sizes = max(1, len(settings.compared_sizes))
    planned = [(member, sizes * GROUPS) for member in members]
    planned += [(best, sizes * final_groups), ((), sizes * final_groups + losses)]
    breakdowns = (FINAL_BREAKDOWNS + bool(members)) * settings.is_training
    trials = sum(count for _, count in planned) + breakdowns
    groups = final_groups + (GROUPS if members else 0)
    if settings.base.door != "factory":
        groups = trials  # a script needs new processes each time
    seconds = sum(count * _trial_s(evidence, rounds, configuration) for configuration, count in planned)
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
    """Return how long a trial of a configuration took in the last round that has it.

    One that has not run yet is expected to take as long as without its last lever, and what that added elsewhere: what
    takes long to start, such as a compiled model, does so in every combination.
    """
    if last := last_round_of(configuration, rounds):
        return _trial_of_round_s(evidence, last, configuration)
    return _trial_s(evidence, rounds, configuration[:-1]) + _added_s(evidence, rounds, configuration[-1])


def _added_s(evidence: Evidence, rounds: Sequence[Round], lever: str) -> float:
    """Return how much longer trials took with a lever than without, the last time that it was tried; at least 0."""
    for done in reversed(rounds):
        for after in done.configurations:
            if after and after[-1] == lever and after[:-1] in done.configurations:
                before_s = _trial_of_round_s(evidence, done, after[:-1])
                return max(0.0, _trial_of_round_s(evidence, done, after) - before_s)
    return 0.0


def _trial_of_round_s(evidence: Evidence, done: Round, configuration: Configuration) -> float:
    return evidence.trial_s([planned.trial.trial_id for planned in done.timed(configuration)])


def _breakdown_s(evidence: Evidence, rounds: Sequence[Round]) -> float:
    """Return how long a training takes as timed steps; 0 if none has run."""
    names = [planned.trial.trial_id for done in rounds for planned in done.planned if planned.role == "breakdown"]
    return evidence.trial_s(names) if names else 0.0
