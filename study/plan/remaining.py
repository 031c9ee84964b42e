"""Estimate the remaining time of a run from its plan and from the times of its ended trials."""

import math
import statistics
import time
from collections.abc import Sequence

from study.plan.estimate import Expected, Group, configuration_key, group_of, opening_groups
from trainables.trial import Trial

_NO_REPEAT = -1
"""of a group that has ended: the next one follows on its ranks, whatever its repeat"""


class RemainingTime:
    """The remaining time of a run: of the trial that runs, the trials after it, their worker groups, and the end.

    Only the time of the current trial counts down, so that a slow one does not use up the time of the others. An ended
    trial gives the time of its repeats, and scales the `expected` times of the others. The first trial of a worker
    group also takes the group's start. All is computed when a trial ends, since the display asks while trials run.
    """

    def __init__(self, trials: Sequence[Trial], expected: Expected | None = None) -> None:
        self.trials = {trial.trial_id: trial for trial in trials}
        self._expected = expected
        self._groups = {trial.trial_id: group_of(trial) for trial in trials}
        self._configurations = {trial.trial_id: configuration_key(trial) for trial in trials}
        self._live: Group | None = None
        self._is_first = False
        self._first: list[tuple[str, float]] = []
        self._others: list[tuple[str, float]] = []
        self._last_end_s = time.monotonic()
        self._least_s = math.inf
        self._update()

    def group_starting(self) -> None:
        """Note that the next trial is the first of its worker group."""
        self._is_first = True
        self._live = self._live and (self._live[0], _NO_REPEAT)
        if not self._first:
            self._last_end_s = time.monotonic()
        self._update()

    def ended(self, trial: Trial) -> None:
        """Note the end of a trial of the plan."""
        if self.trials.pop(trial.trial_id, None) is None:
            return
        now_s = time.monotonic()
        (self._first if self._is_first else self._others).append((trial.trial_id, now_s - self._last_end_s))
        self._is_first, self._last_end_s, self._live = False, now_s, self._groups[trial.trial_id]
        self._least_s = math.inf
        self._update()

    def left_s(self) -> float | None:
        """Return the remaining seconds; None if nothing is known. It never rises before the next trial ends."""
        if self._left_s is None:
            return None
        left_s = self._left_s - min(time.monotonic() - self._last_end_s, self._current_s)
        self._least_s = min(self._least_s, left_s)
        return self._least_s

    def _update(self) -> None:
        """Compute the remaining time from now on, and that of the current trial."""
        self._left_s: float | None = None
        self._current_s = 0.0
        if self._expected is None and not (self._first or self._others):
            return
        scale = self._scale()
        start_s, renewal_s = self._starts_s(scale)
        trial_times_s = [self._trial_s(name, scale) for name in self.trials]
        opening = opening_groups((self._groups[name] for name in self.trials), self._live)
        end_s = self._expected.end_s if self._expected else 0.0
        starts_s = [start_s if own_launch else renewal_s for _, own_launch in opening]
        self._left_s = sum(trial_times_s) + sum(starts_s) + end_s
        is_starting = self._is_first or not (self._first or self._others)
        starting_s = starts_s[0] if is_starting and starts_s else 0.0
        self._current_s = statistics.mean(trial_times_s or [end_s]) + starting_s

    def _trial_s(self, trial_id: str, scale: float) -> float:
        """Return the time of a trial in a live worker group."""
        key = self._configurations[trial_id]
        repeats = [seconds for other, seconds in self._others if self._configurations[other] == key]
        if repeats:
            return statistics.mean(repeats)
        if self._expected:
            return scale * self._expected.trials_s[trial_id]
        return statistics.mean(seconds for _, seconds in self._others or self._first)

    def _scale(self) -> float:
        """Return the time of the ended trials, relative to the expected one; 1 before any."""
        expected_s = sum(self._expected.trials_s[name] for name, _ in self._others) if self._expected else 0.0
        return sum(seconds for _, seconds in self._others) / expected_s if expected_s else 1.0

    def _starts_s(self, scale: float) -> tuple[float, float]:
        """Return the time of the start of a worker group with a launch of its own, and of each other one.

        Measured starts replace the expected times: the first one, and the mean of the others.
        """
        expected = self._expected or Expected()
        if not (self._first and (self._others or self._expected)):
            return expected.start_s, expected.renewal_s  # without either, it is in the time of the first trial
        first_s, *further_s = (max(0.0, seconds - self._trial_s(name, scale)) for name, seconds in self._first)
        usual_s = expected.renewal_s if self._expected else first_s
        return first_s, statistics.mean(further_s) if further_s else usual_s
