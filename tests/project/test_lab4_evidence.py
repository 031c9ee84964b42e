"""The evidence for hpml-lab4: repetition follows from the samplers, and sent bytes equal those of the tensors."""

from typing import cast

import pytest
import torch

from scripts.lab4_evidence import BATCH, EPOCHS, measure_sent_bytes, repeats
from tests.support.gloo import on_ranks
from trainables.build import build_workload
from trainables.trial import Trial


def test_a_rank_sees_a_new_share_per_epoch_only_with_set_epoch() -> None:
    rows = repeats().set_index(["sampler", "ranks", "set_epoch"])
    for key, row in rows.iterrows():
        sampler, ranks, set_epoch = cast(tuple[str, int, str], key)
        if set_epoch == "no":
            assert row["seen"] == pytest.approx(1 / ranks, abs=BATCH / 10_000)
            assert row["batches"] == (1.0 if sampler == "DistributedSampler" else 0.0)
            assert row["neighbours"] > 0.99
        else:
            assert row["seen"] == pytest.approx(1 - (1 - 1 / ranks) ** EPOCHS, abs=0.02)
            assert row["batches"] == 0.0
            assert row["neighbours"] < 0.01


def sent_bytes_on_rank(rank: int, trials: list[Trial]) -> dict[str, float]:
    torch.set_num_threads(1)
    return measure_sent_bytes(trials)


def test_ddp_sends_the_bytes_of_its_tensors() -> None:
    trial = Trial(world_size=2, batch_per_gpu=2)
    first, _ = on_ranks(2, sent_bytes_on_rank, [trial, trial.but(broadcast_buffers=False)])
    model = build_workload(trial, torch.device("cpu")).model
    weights = sum(tensor.nbytes for tensor in model.parameters())
    buffers = sum(tensor.nbytes for tensor in model.buffers())
    assert first["initial"] == pytest.approx(weights + buffers, rel=0.01)
    assert first["step False"] == pytest.approx(weights, rel=0.01)
    assert first["step True"] - first["step False"] == pytest.approx(buffers, rel=0.3)
