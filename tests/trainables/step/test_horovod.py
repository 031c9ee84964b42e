"""Ranks that average gradients through Horovod train like one rank; a stand-in takes Horovod's place."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo import on_ranks
from tests.trainables.step.test_parallel import ALONE, PAIR, trained

STAND_IN = Path(__file__).parents[2] / "support" / "stand_in"


def train(rank: int) -> dict[str, Any]:
    sys.path.insert(0, str(STAND_IN))
    import horovod.torch
    from horovod.runner.http.http_server import RendezvousServer

    alone: Any = dist.new_group([0])
    through = PAIR.but(parallel="horovod", bucket_mb=2.0)
    found: dict[str, Any] = {
        "each step": trained(through, rank, None),
        "accumulated": trained(through.but(batch_per_gpu=2, accumulation_steps=4), rank, None),
        "settings": horovod.torch.settings,
        "left": {name for name in os.environ if name.startswith("HOROVOD_")},
        "servers": RendezvousServer.running,
    }
    if rank == 0:
        found["alone"] = trained(ALONE, 0, alone)
    return found


@pytest.fixture(scope="module")
def visit() -> list[dict[str, Any]]:
    return on_ranks(2, train)


@pytest.mark.parametrize("what", ["gradients", "weights"])
@pytest.mark.parametrize("name", ["each step", "accumulated"])
def test_two_ranks_under_horovod_train_like_one_with_both_batches(
    visit: list[dict[str, Any]], name: str, what: str
) -> None:
    for mine, other, value in zip(visit[0][name][what], visit[1][name][what], visit[0]["alone"][what], strict=True):
        assert torch.equal(mine, other)
        assert value.abs().max() > 0
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-6)


def test_ranks_find_each_other_at_the_first_rank_and_nothing_remains(visit: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(visit):
        for settings in found["settings"]:
            assert settings["HOROVOD_RANK"] == settings["HOROVOD_LOCAL_RANK"] == str(rank)
            assert settings["HOROVOD_SIZE"] == settings["HOROVOD_LOCAL_SIZE"] == "2"
            assert settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
            assert settings["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4242"
            assert settings["HOROVOD_GLOO_IFACE"] == "lo"
            assert settings["HOROVOD_FUSION_THRESHOLD"] == str(2 * 2**20)
        assert len(found["settings"]) == 2
        assert found["left"] == set()
        assert found["servers"] == 0
