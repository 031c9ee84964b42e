"""What a user's workload reads of its trial is recorded, and ends up in the evidence of every rank."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainables.measure.run import run
from trainables.step.context import RankSetup
from trainables.step.recorded_trial import LEFT_TO_WORKLOADS, RecordedTrial
from trainables.trial import Trial

TRIAL = Trial(workload="mine.py:build", parallel="none", batch_per_gpu=4, warmup_steps=2, steps=1)
ALL = sorted({*LEFT_TO_WORKLOADS, "learning_rate"})

WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainables.workload import Workload


def build(trial):
    data = TensorDataset(torch.zeros(32, trial.image_size), torch.zeros(32, dtype=torch.int64))
    model = nn.Linear(trial.image_size, 2)
    loss = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=trial.label_smoothing)
    return Workload(model=model, dataset=data, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
"""


def test_only_the_fields_that_were_read_have_an_effect() -> None:
    recorded = RecordedTrial.of(TRIAL)
    assert isinstance(recorded, Trial)
    assert recorded.unread_fields() == ALL
    assert recorded.image_size == TRIAL.image_size
    assert recorded.global_batch == TRIAL.global_batch
    assert recorded.unread_fields() == [name for name in ALL if name != "image_size"]


@pytest.mark.parametrize(
    "copy",
    [
        pickle.dumps,
        lambda trial: trial.but(image_size=64),
        lambda trial: trial.model_dump(),
        lambda trial: trial.trial_id,
    ],
)
def test_a_copy_counts_as_reading_every_field(copy: Callable[[Trial], object]) -> None:
    recorded = RecordedTrial.of(TRIAL)
    copy(recorded)
    assert recorded.unread_fields() == []


def test_a_pickled_trial_is_a_plain_one() -> None:
    copy = pickle.loads(pickle.dumps(RecordedTrial.of(TRIAL)))
    assert type(copy) is Trial and copy == TRIAL


def test_fields_read_during_a_step_count_too(tmp_path: Path) -> None:
    path = tmp_path / "reads_two_fields.py"
    path.write_text(WORKLOAD)
    output = run(TRIAL.but(workload=f"{path}:build"), RankSetup(0, torch.device("cpu")))
    unread = output.evidence["unread_fields"]
    assert set(ALL) - set(unread) == {"image_size", "label_smoothing"}


def test_the_registry_reads_what_it_needs_so_nothing_is_recorded() -> None:
    output = run(TRIAL.but(workload="", model="mlp"), RankSetup(0, torch.device("cpu")))
    assert output.evidence["unread_fields"] is None


def test_trainings_by_epochs_set_the_learning_rate_themselves() -> None:
    assert "learning_rate" not in RecordedTrial.of(TRIAL.but(epochs=1)).unread_fields()
