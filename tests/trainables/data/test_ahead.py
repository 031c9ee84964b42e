"""Batches that a thread prepares during the step."""

import threading
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from trainables.data.loader import prefetch
from trainables.registry import AHEAD_BATCHES

CPU = torch.device("cpu")


def numbered_batches(read: list[int], count: int = 1000) -> Iterator[tuple[int, str]]:
    """Yield (number, target), and append each number to `read`."""
    for number in range(count):
        read.append(number)
        yield number, f"target {number}"


def to_tensor(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
    return torch.tensor(batch[0]), batch[1]


def test_prefetch_keeps_the_order_and_the_number_of_batches() -> None:
    count = torch.zeros(1, dtype=torch.int64)
    batches = list(prefetch(numbered_batches([], 5), to_tensor, CPU, count))
    assert batches == [(torch.tensor(number), f"target {number}") for number in range(5)]
    assert count.tolist() == [5]
    assert list(prefetch(numbered_batches([], 0), to_tensor, CPU)) == []


def test_prefetch_prepares_a_fixed_number_of_batches_in_advance() -> None:
    prepared, read = threading.Semaphore(0), list[int]()

    def prepare(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
        prepared.release()
        return to_tensor(batch)

    batches = prefetch(numbered_batches(read), prepare, CPU)
    assert read == [], "nothing is prepared before the first request"
    for requested in range(1, 4):
        next(batches)
        for _ in range(1 if requested > 1 else 1 + AHEAD_BATCHES):
            assert prepared.acquire(timeout=60)
        assert read == list(range(requested + AHEAD_BATCHES))
    batches.close()  # type: ignore[attr-defined]


def test_prefetch_uses_one_other_thread_that_ends_with_the_batches() -> None:
    threads = list[threading.Thread]()

    def prepare(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
        threads.append(threading.current_thread())
        return to_tensor(batch)

    batches = prefetch(numbered_batches([]), prepare, CPU)
    list(islice(batches, 3))
    (thread,) = set(threads)
    assert thread is not threading.current_thread()
    del batches
    assert not thread.is_alive()


def test_an_error_is_raised_when_its_batch_is_requested() -> None:
    def prepare(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
        if batch[0] == 2:
            raise ValueError("the third is damaged")
        return to_tensor(batch)

    batches = prefetch(numbered_batches([]), prepare, CPU)
    assert [int(inputs) for inputs, _ in islice(batches, 2)] == [0, 1]
    with pytest.raises(ValueError, match="the third is damaged"):
        next(batches)
