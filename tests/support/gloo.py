"""Run a function on several real ranks: one process per rank, connected over gloo.

Processes fork from a server that has already imported torch, so a call takes about 1 s instead of 10 s.
"""

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

PRELOAD = [
    "pytest",
    "hypothesis",
    "pandas",
    "study.orchestrate.rank",
    "trainables.data.images.convert",
    "trainables.data.fashion_mnist",
    "trainables.data.images.folder",
    "trainables.data.images.lmdb_file",
    "trainables.models.mlp",
    "trainables.models.resnet",
]


class RankFailed(Exception):
    """A rank raised, ended early or timed out. The message has the rank and its traceback."""


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(rank, *arguments)` on each rank of a gloo default group, and return the results by rank.

    The function must be defined at module level, because it is pickled with its arguments and results. Raises
    RankFailed for the first rank that fails. No process remains afterwards.
    """
    preload_loader_processes()
    context = multiprocessing.get_context("forkserver")
    # The store chooses a free port itself, so no other process can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world_size, store.port, sender, function, arguments))
        process.start()
        sender.close()
        connections.append(receiver)
        processes.append(process)
    try:
        return _collect(connections, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(0.5 if process.is_alive() else None)
            if process.is_alive():
                process.kill()
                process.join()


def preload_loader_processes() -> None:
    """Make the forkserver import torch when it starts. No effect if it is already running."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)


def _rank(
    rank: int, world_size: int, port: int, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # exclude all imports from the three collections of a trial, which would take 0.2 s each
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this host, whatever its name resolves to
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        outcome: tuple[Any, str | None] = (function(rank, *arguments), None)
    except Exception:  # noqa: BLE001 - the caller gets every exception of a rank
        outcome = (None, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))  # as bytes, because `send` shares tensor memory that ends with the rank
    if dist.is_initialized() and outcome[1] is None:
        dist.destroy_process_group()


def _collect(connections: list[Connection], deadline_s: float) -> list[Any]:
    """Return the result of each rank. Raises RankFailed for the first failure, since others may follow from it."""
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        open_connections = [connection for rank, connection in enumerate(connections) if rank not in results]
        ready = wait(open_connections, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(connections))) - set(results))
            raise RankFailed(f"no answer in time from ranks {missing}")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            try:
                results[rank], failure = pickle.loads(connection.recv_bytes())
            except EOFError:
                failure = "its process ended without an answer"
            if failure is not None:
                raise RankFailed(f"rank {rank}: {failure}")
    return [results[rank] for rank in range(len(connections))]
