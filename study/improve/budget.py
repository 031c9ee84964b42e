"""How many trials, and how much time, the rest of a search takes."""

from collections.abc import Sequence

from study.improve.evidence import Evidence
from study.improve.rounds import SEEDS, Configuration, Round, Settings

GROUPS = 2
"""Worker groups per round, except for the final one."""

LOSS_TRIALS = 1 + SEEDS
"""Most trials of the final round that only show a loss: with other seeds, and with the batch of the baseline."""


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
    of_best = len(settings.sizes) * (configurations * GROUPS + final_groups)
    of_baseline = len(settings.sizes) * final_groups + losses
    trials = of_best + of_baseline
    groups = final_groups + (GROUPS if configurations else 0)
    if settings.base.door != "factory":
        groups = trials  # a script needs new processes each time
    seconds = of_best * _trial_s(evidence, rounds, best) + of_baseline * _trial_s(evidence, rounds, ())
    seconds += trials * evidence.pause_s(used) + groups * evidence.start_s(used)
    return len(used) + trials, evidence.elapsed_s(used) + seconds


def can_compare_losses(settings: Settings) -> bool:
    """Return True if a lever may change the arithmetic. The seed of users' own code cannot be set."""
    return settings.base.door == "factory" and any(lever.effect == "arithmetic" for lever in settings.levers.values())


def last_round_of(configuration: Configuration, rounds: Sequence[Round]) -> Round | None:
    """Return the last of the finished rounds that measured a configuration."""
    return next((done for done in reversed(rounds) if configuration in done.configurations), None)


def _trial_s(evidence: Evidence, rounds: Sequence[Round], configuration: Configuration) -> float:
    """Return how long a trial of a configuration took in the last round that has it."""
    last = last_round_of(configuration, rounds)
    assert last is not None
    return evidence.trial_s([p.trial.trial_id for p in last.planned if p.configuration == configuration])
