"""The endless batches of each rank: their samples and their order."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Sampler, TensorDataset

from study.capacity import NodeCapacity
from study.orchestrate.processes.fork_server import LOADER_MODULES
from study.plan.placement import layouts
from tests.support.gloo import preload_loader_processes
from tests.support.hosts import ROOT
from trainables.batch import identity
from trainables.build import build_workload
from trainables.data.loader import endless_batches
from trainables.data.sampler import RankSampler
from trainables.data.source import DataError
from trainables.trial import Trial
from trainables.workload import Workload

CPU = torch.device("cpu")
shapes = {
    "length": st.integers(1, 60),
    "batch": st.integers(1, 70),
    "world_size": st.integers(1, 8),
    "seed": st.integers(0, 2**31 - 1),
}


def rank_sampler(length: int, batch: int, rank: int, world_size: int, seed: int) -> RankSampler:
    return RankSampler(Trial(model="mlp", batch_per_gpu=batch, world_size=world_size, seed=seed), length, rank)


def epochs(length: int, batch: int, rank: int, world_size: int, seed: int, count: int = 2) -> list[list[int]]:
    """Return the indices of one rank in each of the first epochs, cut from its stream of batches."""
    share = length // world_size
    batches = list(islice(rank_sampler(length, batch, rank, world_size, seed), -(-share * count // batch)))
    assert all(len(indices) == batch for indices in batches)
    stream = [index for indices in batches for index in indices]
    return [stream[epoch * share : (epoch + 1) * share] for epoch in range(count)]


# ------------------------------------------------------------------------------------------------------- indices


@given(**shapes)
@example(length=7, batch=3, world_size=2, seed=0)
@example(length=5, batch=16, world_size=5, seed=0)
def test_no_sample_occurs_twice_in_an_epoch_across_ranks(length: int, batch: int, world_size: int, seed: int) -> None:
    length = max(length, world_size)
    epochs_by_rank = [epochs(length, batch, rank, world_size, seed) for rank in range(world_size)]
    for epoch in range(2):
        indices = [index for rank_epochs in epochs_by_rank for index in rank_epochs[epoch]]
        assert len(set(indices)) == len(indices) == length - length % world_size
        assert set(indices) <= set(range(length))


@given(**shapes)
def test_the_shuffle_does_not_depend_on_the_number_of_ranks(
    length: int, batch: int, world_size: int, seed: int
) -> None:
    length = max(length, world_size)
    [one_rank, *_] = epochs(length, batch, 0, 1, seed)
    for rank in range(world_size):
        [first, *_] = epochs(length, batch, rank, world_size, seed)
        assert first == one_rank[rank :: world_size][: length // world_size]  # fmt: skip


@given(**shapes)
def test_the_same_seed_gives_the_same_batches(length: int, batch: int, world_size: int, seed: int) -> None:
    length = max(length, world_size)
    batches = rank_sampler(length, batch, world_size - 1, world_size, seed)
    assert list(islice(batches, 5)) == list(islice(batches, 5))
    assert list(islice(rank_sampler(length, batch, world_size - 1, world_size, seed), 5)) == list(islice(batches, 5))


@given(seed=st.integers(0, 2**31 - 1001))
def test_the_order_changes_with_epoch_and_seed(seed: int) -> None:
    first, second, third = epochs(100, 8, 0, 1, seed, count=3)
    assert first != second != third != first
    assert sorted(first) == sorted(second) == sorted(third) == list(range(100))
    assert epochs(100, 8, 0, 1, seed + 1000)[0] != first


def test_a_batch_larger_than_the_data_set_repeats_samples() -> None:
    [batch] = islice(rank_sampler(4, 10, 0, 1, 0), 1)
    assert len(batch) == 10
    assert sorted(batch[:4]) == sorted(batch[4:8]) == [0, 1, 2, 3]


def test_fewer_samples_than_ranks_is_an_error() -> None:
    with pytest.raises(DataError, match="3 samples, fewer than its 4 ranks"):
        rank_sampler(3, 8, 0, 4, 0)
    assert len(epochs(4, 1, 3, 4, 0)[0]) == 1, "one sample per rank is enough"


# ------------------------------------------------------------------------------------------------------- batches


def sample_batches(**fields: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the first batches of the shipped sample on the last rank of a trial."""
    trial = Trial(model="mlp", batch_per_gpu=16, world_size=2, **fields)
    return list(islice(endless_batches(trial, build_workload(trial, CPU), rank=1), 8))


def test_loader_processes_deliver_the_same_batches_as_the_rank_itself() -> None:
    preload_loader_processes()
    expected = sample_batches()
    assert {images.dtype for images, _ in expected} == {torch.uint8}
    assert {tuple(images.shape) for images, _ in expected} == {(16, 1, 28, 28)}
    for workers, prefetch in ((1, 1), (2, 2)):
        loaded = sample_batches(loader_workers=workers, prefetch_batches=prefetch)
        for (images, labels), (expected_images, expected_labels) in zip(loaded, expected, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)


def test_another_seed_loads_other_images() -> None:
    assert not torch.equal(sample_batches()[0][0], sample_batches(seed=1)[0][0])


def test_loading_does_not_advance_the_random_state_of_the_rank() -> None:
    trial = Trial(model="mlp")
    workload = build_workload(trial, CPU)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    list(islice(endless_batches(trial, workload, rank=0), 3))
    assert torch.equal(torch.rand(4), expected)


def dict_workload(trial: Trial) -> Workload:
    return Workload(
        model=nn.Linear(1, 1), dataset=[({"x": torch.tensor([float(i)])}, i) for i in range(32)],  # type: ignore[arg-type]
        loss=nn.functional.mse_loss, optimizer=torch.optim.SGD,
    )  # fmt: skip


def test_samples_of_a_user_data_set_are_collated() -> None:
    trial = Trial(batch_per_gpu=8)
    inputs, targets = next(endless_batches(trial, dict_workload(trial), rank=0))
    assert inputs["x"].shape == (8, 1)
    assert inputs["x"].flatten().tolist() == targets.tolist()


def test_a_workload_may_define_its_order_of_samples() -> None:
    trial = Trial(batch_per_gpu=2, world_size=2, loader_workers=0)

    class Backwards(Sampler[list[int]]):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[31 - self.rank, 30 - self.rank], [0, 0]])

    workload = replace(dict_workload(trial), batch_indices=Backwards)
    assert [targets.tolist() for _, targets in endless_batches(trial, workload, rank=1)] == [[30, 29], [0, 0]]


def test_loader_processes_deliver_random_images() -> None:
    preload_loader_processes()
    trial = Trial(model="mlp", dataset="synthetic_loader", image_size=16, batch_per_gpu=8, loader_workers=2)
    workload = build_workload(trial, CPU)
    assert not workload.resident
    batches = [
        list(islice(endless_batches(trial.but(loader_workers=workers), workload, rank=0), 3)) for workers in (0, 2)
    ]
    for (images, labels), (expected_images, expected_labels) in zip(*batches, strict=True):
        assert images.shape == (8, 3, 16, 16)
        assert torch.equal(images, expected_images) and torch.equal(labels, expected_labels)


@pytest.mark.parametrize("dataset", ["fashion_mnist_sample", "synthetic_loader", "text_sample"])
def test_the_forkserver_preloads_all_modules_that_a_loader_needs(dataset: str) -> None:
    model = "mlstm64" if dataset == "text_sample" else "mlp"
    trial = Trial(model=model, dataset=dataset, batch_per_gpu=4, loader_workers=1)
    workload = build_workload(trial, CPU)
    (layout,) = layouts([trial], [NodeCapacity("a", "127.0.0.1", cpus=2, gpus=0)]).values()
    code = (
        "import pickle, sys; from importlib import import_module\n"
        "for name in sys.argv[1:]: import_module(name)\n"
        "before = set(sys.modules); pickle.load(sys.stdin.buffer); print(*sorted(set(sys.modules) - before))"
    )
    imported = subprocess.run(
        [sys.executable, "-c", code, *LOADER_MODULES, *(layout.loader_modules or ())],
        input=pickle.dumps((workload.dataset, workload.collate)), capture_output=True, check=True, cwd=ROOT,
    ).stdout.split()  # fmt: skip
    assert imported == [], "every trial with loaders would wait for these imports"


def test_resident_text_repeats_one_batch() -> None:
    trial = Trial(model="mlstm64", dataset="synthetic", batch_per_gpu=4, sequence_length=8)
    first, second = islice(endless_batches(trial, build_workload(trial, CPU), rank=0), 2)
    assert first is second and first[0].shape == (4, 8)


def test_resident_images_repeat_one_batch() -> None:
    trial = Trial(model="mlp", dataset="synthetic", batch_per_gpu=4, image_size=8)
    workload = build_workload(trial, CPU)
    assert workload.collate is identity
    first, second, *_ = list(islice(endless_batches(trial, workload, rank=0), 1000))
    assert isinstance(workload.dataset, TensorDataset)
    assert first is second
    assert first[0].data_ptr() == workload.dataset.tensors[0].data_ptr()
    assert first[0].shape == (4, 3, 8, 8)
    assert first[0].std() > 0.5, "zeros would draw less power and run faster"
