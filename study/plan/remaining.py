"""Estimate the remaining time of a run from the times of its ended trials."""

import statistics
import time
from collections.abc import Sequence

from trainables.trial import Trial


class RemainingTime:
    """The remaining time of a run. `estimate_s` is the estimate for all trials before any has ended, if known.

    Each ended trial gives a new estimate, which then counts down. The first trial of a worker group also takes the
    group's start, so its extra time counts once per remaining repeat, each of which has its own group.
    """

    def __init__(self, trials: Sequence[Trial], estimate_s: float | None = None) -> None:
        self.trials = {trial.trial_id: trial for trial in trials}
        self._total = len(trials)
        self._estimate_s = estimate_s
        self._left_s = estimate_s
        self._at_s = self._last_end_s = time.monotonic()
        self._is_first = False
        self._first_s: list[float] = []
        self._others_s: list[float] = []

    def group_starting(self) -> None:
        """Note that the next trial is the first of its worker group."""
        self._is_first = True

    def ended(self, trial: Trial) -> None:
        """Note the end of a trial."""
        self.trials.pop(trial.trial_id, None)
        now_s = time.monotonic()
        (self._first_s if self._is_first else self._others_s).append(now_s - self._last_end_s)
        self._is_first, self._last_end_s, self._at_s = False, now_s, now_s
        self._left_s = self._estimated_s(trial)

    def left_s(self) -> float | None:
        """Return the remaining seconds; None if nothing is known."""
        return None if self._left_s is None else max(0.0, self._left_s - (time.monotonic() - self._at_s))

    def _estimated_s(self, last: Trial) -> float:
        left = len(self.trials)
        if not self._others_s:
            if self._estimate_s is not None and len(self._first_s) == 1:
                return self._estimate_s * left / self._total
            return statistics.mean(self._first_s) * left
        trial_s = statistics.mean(self._others_s)
        start_s = max(0.0, statistics.mean(self._first_s) - trial_s) if self._first_s else 0.0
        groups = {trial.repeat for trial in self.trials.values()} - {last.repeat}
        return trial_s * left + start_s * len(groups)
