"""Batches that are made ready beside the step."""

import threading
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from trainables.data.loader import made_ahead
from trainables.registry import AHEAD_BATCHES

CPU = torch.device("cpu")


def numbered(taken: list[int], most: int = 1000) -> Iterator[tuple[int, str]]:
    for number in range(most):
        taken.append(number)
        yield number, f"target {number}"


def tensor_of_inputs(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
    return torch.tensor(batch[0]), batch[1]


def test_batches_come_in_order_with_their_targets_and_end_where_they_end() -> None:
    made = torch.zeros(1, dtype=torch.int64)
    found = list(made_ahead(numbered([], 5), tensor_of_inputs, CPU, made))
    assert found == [(torch.tensor(number), f"target {number}") for number in range(5)]
    assert made.tolist() == [5]
    assert list(made_ahead(numbered([], 0), tensor_of_inputs, CPU)) == []


def test_so_many_batches_are_made_before_they_are_asked_for_and_no_more() -> None:
    made, taken = threading.Semaphore(0), list[int]()

    def make(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
        made.release()
        return tensor_of_inputs(batch)

    batches = made_ahead(numbered(taken), make, CPU)
    assert taken == [], "nothing is made for a trial that asks for nothing"
    for asked in range(1, 4):
        next(batches)
        for _ in range(1 if asked > 1 else 1 + AHEAD_BATCHES):
            assert made.acquire(timeout=60)
        assert taken == list(range(asked + AHEAD_BATCHES))
    batches.close()  # type: ignore[attr-defined]


def test_another_thread_makes_them_and_ends_with_the_batches() -> None:
    threads = list[threading.Thread]()

    def make(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
        threads.append(threading.current_thread())
        return tensor_of_inputs(batch)

    batches = made_ahead(numbered([]), make, CPU)
    list(islice(batches, 3))
    (maker,) = set(threads)
    assert maker is not threading.current_thread()
    del batches
    assert not maker.is_alive()


def test_what_goes_wrong_is_raised_where_its_batch_is_asked_for() -> None:
    def make(batch: tuple[int, str]) -> tuple[torch.Tensor, str]:
        if batch[0] == 2:
            raise ValueError("the third is damaged")
        return tensor_of_inputs(batch)

    batches = made_ahead(numbered([]), make, CPU)
    assert [int(inputs) for inputs, _ in islice(batches, 2)] == [0, 1]
    with pytest.raises(ValueError, match="the third is damaged"):
        next(batches)
