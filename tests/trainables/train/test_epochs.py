"""Epochs: every sample once, global batches independent of ranks and parts, and short last batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.data.sampler import rank_steps, steps_per_epoch
from trainables.data.source import DataError
from trainables.step.context import RankSetup, build_context
from trainables.step.step import StepBatch, weighted_parts
from trainables.train.epochs import epochs_of
from trainables.trial import Trial

CPU = torch.device("cpu")
TRIAL = Trial(model="mlp", batch_per_gpu=4, epochs=2, resident_data=True)


def global_batches(trial: Trial, length: int, epoch: int = 0) -> list[list[int]]:
    """Return the sorted sample indices of all ranks per step."""
    ranks = [list(rank_steps(trial, length, epoch, rank)) for rank in range(trial.world_size)]
    return [
        sorted(torch.cat([part for parts, _ in step for part in parts]).tolist()) for step in zip(*ranks, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 40))
def test_an_epoch_takes_every_sample_once_except_a_last_batch_too_small_for_all_ranks(
    ranks: int, batch: int, parts: int, more: int
) -> None:
    trial = TRIAL.but(world_size=ranks, batch_per_gpu=batch, accumulation_steps=parts)
    length = trial.global_batch + more
    steps = global_batches(trial, length)
    samples = [sample for step in steps for sample in step]
    rest = length % trial.global_batch
    assert len(steps) == steps_per_epoch(trial, length)
    assert len(samples) == len(set(samples)) == length - (rest if rest < 2 * ranks else 0)
    for rank in range(ranks):
        for rank_parts, total in rank_steps(trial, length, 0, rank):
            sizes = [len(part) for part in rank_parts]
            assert max(sizes) <= batch and max(sizes) - min(sizes) <= 1 and len(sizes) <= parts
            assert total == trial.global_batch or total == rest


@pytest.mark.parametrize(
    "fields",
    [
        {"world_size": 2, "batch_per_gpu": 4},
        {"accumulation_steps": 2},
        {"batch_per_gpu": 2, "world_size": 2, "accumulation_steps": 2},
    ],
)
def test_global_batches_do_not_depend_on_ranks_and_parts(fields: dict[str, int]) -> None:
    assert global_batches(TRIAL.but(**fields), 30) == global_batches(TRIAL.but(batch_per_gpu=8), 30)


def test_shuffles_differ_between_epochs_seeds_and_repeats() -> None:
    first = global_batches(TRIAL, 30)
    for trial, epoch in ((TRIAL, 1), (TRIAL.but(seed=1), 0), (TRIAL.but(repeat=1), 0), (TRIAL.but(seed=1), 1)):
        assert global_batches(trial, 30, epoch) != first
    assert global_batches(TRIAL.but(seed=1), 30, 0) != global_batches(TRIAL, 30, 1), "one seed's next epoch"
    assert global_batches(TRIAL.but(set_epoch=False), 30, 5) == first
    assert global_batches(TRIAL.but(order="in_order"), 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ranks_with_separate_shuffles_repeat_some_samples() -> None:
    trial = TRIAL.but(world_size=2, shared_shuffle=False)
    samples = [sample for step in global_batches(trial, 64) for sample in step]
    assert len(samples) == 64 and len(set(samples)) < 60


def test_a_data_set_smaller_than_a_global_batch_is_rejected() -> None:
    trial = TRIAL.but(world_size=2, batch_per_gpu=8, accumulation_steps=3)
    with pytest.raises(DataError, match=r"47 samples.* 48 \(2 ranks x 8 x 3\)"):
        steps_per_epoch(trial, 47)


@pytest.mark.parametrize(
    ("loss_mean", "expected"), [("global", [3 * 2 / 11, 2 * 2 / 11]), ("rank", [3 / 5, 2 / 5])]
)  # fmt: skip
def test_a_short_batch_is_weighted_according_to_loss_mean(loss_mean: str, expected: list[float]) -> None:
    trial = TRIAL.but(world_size=2, loss_mean=loss_mean)
    assert weights(trial, StepBatch(["a", "b"], [3, 2], samples=11, complete=False)) == pytest.approx(expected)
    for parts in (1, 4):
        complete = StepBatch(["a"] * parts, [4] * parts, samples=8 * parts, complete=True)
        assert weights(trial.but(accumulation_steps=parts), complete) == [1 / parts] * parts


def weights(trial: Trial, batch: StepBatch) -> list[float]:
    return [weight for _, _, weight in weighted_parts(trial, batch)]


def test_resident_data_and_loaders_deliver_the_same_batches() -> None:
    batches = []
    for trial in (TRIAL.but(batch_per_gpu=3000), TRIAL.but(batch_per_gpu=3000, resident_data=False)):
        context = build_context(trial, RankSetup(0, CPU))
        epochs = epochs_of(context, 1)
        batches.append([(batch.sizes, context.workload.select(batch.parts[0])) for batch in next(epochs)])
        assert next(epochs, None) is None
    resident, loaded = batches
    assert [sizes for sizes, _ in resident] == [[3000], [3000], [3000], [1000]]
    for (sizes, (images, labels)), (others, (other_images, other_labels)) in zip(resident, loaded, strict=True):
        assert sizes == others
        assert images.dtype == torch.uint8 and torch.equal(images, other_images) and torch.equal(labels, other_labels)
