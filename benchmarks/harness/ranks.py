"""Ranks that a benchmark starts without Ray: one connected process per rank. All measure, and rank 0 writes."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def options_of(
    description: str | None, *, name: str, small: str, seconds: float, quadruples: int = 5, image_size: int = 224
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks on such ranks. small: effect of --small, for the help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-size", type=int, default=image_size)
    parser.add_argument("--quadruples", type=int, default=quadruples, help="ABBA rounds per case, at least 2")
    parser.add_argument("--seconds", type=float, default=seconds, help="time limit for all cases")
    parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--name", default=name, help="folder under benchmarks/results")
    return parser


def sizes_that_fit(asked: str, available: int) -> list[int]:
    """Return the numbers of ranks in a comma-separated list that do not exceed `available`."""
    return [int(size) for size in asked.split(",") if int(size) <= available]


@dataclass(frozen=True)
class Place:
    """The device of a rank, and the groups of the first n ranks by n.

    A group is (gradients over NCCL or gloo, control over gloo). A rank outside a group must not use its entry.
    """

    rank: int
    device: torch.device
    groups: dict[int, tuple[Any, Any]]

    @property
    def world_size(self) -> int:
        return max(self.groups)

    def agreed(self, value: Any, size: int | None = None) -> Any:
        """Return rank 0's value. Collective over the first `size` ranks (None: all)."""
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.groups[size or self.world_size][1])
        return held[0]


def launch(function: Callable[..., None], device: str, sizes: Sequence[int], *arguments: Any) -> None:
    """Run `function(place, *arguments)` on max(sizes) ranks, with groups for every size.

    The function must be defined at module level. If a rank fails, the others end and the error of torch.multiprocessing
    is raised.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(
        _rank, args=(function, device, sorted(set(sizes)), store.port, arguments), nprocs=max(sizes)
    )


def _rank(
    rank: int, function: Callable[..., None], device_type: str, sizes: list[int], port: int, arguments: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks run on this host, whatever its name resolves to
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=sizes[-1])
    groups: dict[int, tuple[Any, Any]] = {
        size: (dist.new_group(range(size)), dist.new_group(range(size), backend="gloo")) for size in sizes
    }
    function(Place(rank, device, groups), *arguments)
    dist.barrier(groups[sizes[-1]][1])
    if on_gpu:
        torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)  # process groups with collectives in CUDA graphs cannot be destroyed cleanly


class Clock:
    """The remaining seconds of a benchmark, according to rank 0."""

    def __init__(self, place: Place, seconds: float):
        self.place, self.ends_at = place, time.monotonic() + seconds

    def fits(self, seconds: float, size: int | None = None) -> bool:
        """Return True if so many seconds remain. Rank 0 decides, with its own value of `seconds`.

        Collective over the first `size` ranks (None: all).
        """
        return bool(self.place.agreed(self.ends_at - time.monotonic() >= seconds, size))
