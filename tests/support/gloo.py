"""Runs a function on several real ranks: one process each, connected over gloo.

Processes fork from a server that has imported torch already, so that a call costs about a second and not ten.
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
    """A rank raised, ended early or took too long; the message holds the rank and its traceback."""


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """`function(rank, *arguments)` on each rank of a default group of gloo; its results in the order of ranks.

    The function is one of a module's, its arguments and results are pickled. Raises RankFailed for the first rank that
    fails. No process of it is left afterwards.
    """
    preload_loader_processes()
    context = multiprocessing.get_context("forkserver")
    # the store picks a free port itself: nobody can take it between the choice and the use
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
    """The server that processes fork from starts with torch imported, unless it runs already."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)


def _rank(
    rank: int, world_size: int, port: int, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # of all that was imported: a trial collects garbage three times, and looked through it for 0.2 s each time
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # these ranks are of one host, whatever its name resolves to
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        outcome: tuple[Any, str | None] = (function(rank, *arguments), None)
    except Exception:  # noqa: BLE001 - whatever a rank raises is its caller's to see
        outcome = (None, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))  # bytes, for `send` shares the memory of tensors, which ends with the rank
    if dist.is_initialized() and outcome[1] is None:
        dist.destroy_process_group()


def _collect(connections: list[Connection], deadline_s: float) -> list[Any]:
    """Each rank's result, or the first failure to arrive: the failures that follow from it come later."""
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
