"""A callback for lightning.Trainer: marks each optimizer step, and ends the training when the study has enough.

trainer = lightning.Trainer(..., callbacks=[StudySteps()])
"""

import itertools
from typing import Any

from lightning.pytorch.callbacks import Callback

from trainables.probe import steps


class StudySteps(Callback):
    """Mark the steps of a training. Without a study, do nothing."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps, self.seen = steps(itertools.count()), trainer.global_step
        next(self.steps)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step > self.seen:  # not if the gradients of this batch are accumulated
            self.seen = trainer.global_step
            trainer.should_stop = trainer.should_stop or next(self.steps, None) is None
