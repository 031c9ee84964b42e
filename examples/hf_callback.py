"""A callback for transformers.Trainer: marks each optimizer step, and ends the training when the study has enough.

trainer = Trainer(..., callbacks=[StudySteps()])
"""

import itertools
from typing import Any

from transformers import TrainerCallback

from trainables.probe import steps


class StudySteps(TrainerCallback):
    """Mark the steps of a training. Without a study, do nothing."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps = steps(itertools.count())
        next(self.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if next(self.steps, None) is None:
            control.should_training_stop = True
