"""Run a rank of group after group, each in a fresh process.

    keeper <- calls - host of the rank (an actor of Ray Train, or a thread of the twin) <- pipe - process of the rank

The processes are forked from a server (`fork_server.py`). So a group starts without new actors, interpreters
and imports, but shares nothing else with the one before: device context, communicators, memory and caches are its own.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from study.orchestrate.failures import first_line
from study.orchestrate.group import GroupPlan
from study.orchestrate.processes.fork_server import ForkServer
from study.orchestrate.processes.guard import end_with_parent, guard_this_process, name_this_process
from study.orchestrate.protocol import KeeperProxy, Payload
from study.orchestrate.stuck import Calls, calls
from study.plan.placement import Layout

ANSWER_TIMEOUT_S = 4.0
CONNECT_TIMEOUT = timedelta(minutes=30)
"""torch's default for gloo, as Ray Train's for NCCL"""

ENDED = "ended"
"""last message of a rank's process, instead of a method of the keeper: it ends, with an exception or None"""

_questions: dict[int, Connection] = {}
"""for each process of a rank that runs now, by its pid"""


@dataclass(frozen=True)
class Place:
    """Which rank a host runs, and what its processes start with."""

    rank: int
    node_id: str
    address: str
    """of its node, for other ranks"""
    gpu: int | None = None
    """index among the visible GPUs; None for a rank on CPUs"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """environment variables of its processes"""
    measure: Callable[..., Payload] | None = None
    """replaces `study.orchestrate.rank.measure`; must be a function of a module"""


@dataclass(frozen=True)
class CallThroughPipe:
    """Calls a method of the keeper from a rank's process."""

    pipe: Connection
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self, method: str, *arguments: Any) -> Any:
        with self.lock:
            self.pipe.send((method, arguments))
            return self.pipe.recv()


def host_rank(place: Place, launch: str, call: Callable[..., Any], handle_of: Callable[[Any], Any]) -> None:
    """Run the processes of a rank, one per group of a launch, until the keeper wants no more.

    call: calls a method of the keeper. handle_of: returns the handle of a process for `RankBackend.kill`. Raises the
    exception that ended a process, or ChildProcessError if it was killed.
    """
    for number in itertools.count():
        plan: GroupPlan | None = call("next_group", launch, number)
        if plan is None:
            return
        _run_process(place, plan, call, handle_of)
        call("rank_ended", plan.name, place.rank)


def calls_of_rank(pid: int | None = None) -> Calls | None:
    """Return the call stack of the rank's process with this pid, or of the only one. None if it does not answer.

    A rank that runs in this process itself answers too.
    """
    try:
        questions = _questions[pid] if pid is not None else next(iter(_questions.values()), None)
        if questions is None:
            return calls()
        questions.send(None)
        return questions.recv() if questions.poll(ANSWER_TIMEOUT_S) else None
    except (KeyError, EOFError, OSError):  # it has ended
        return None


def _run_process(place: Place, plan: GroupPlan, call: Callable[..., Any], handle_of: Callable[[Any], Any]) -> None:
    """Run the process of a rank in one group until it ends. Raises what ended it, if it did not end by itself."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    questions, answers = context.Pipe()
    # not a daemon, because daemons cannot have loader processes
    process = context.Process(target=_rank_process, args=(place, plan, ForkServer.running(), theirs, answers))
    process.start()
    theirs.close()
    answers.close()
    assert process.pid is not None
    _questions[process.pid] = questions
    end: list[BaseException | None] = []
    # the process may be killed while it waits for the keeper, so that this thread must not wait for the keeper itself
    forwarding = threading.Thread(target=_forward, args=(ours, call, handle_of(process), end), daemon=True)
    forwarding.start()
    process.join()
    del _questions[process.pid]
    questions.close()
    forwarding.join(ANSWER_TIMEOUT_S)
    error = end[0] if end else ChildProcessError(_end_of(process.exitcode or 0))
    if error is not None:
        raise error


def _end_of(exit_code: int) -> str:
    """Describe how a process ended that did not report an exception."""
    if exit_code >= 0:
        return f"its process ended with status {exit_code}"
    with contextlib.suppress(ValueError):  # a signal without a name
        name = signal.Signals(-exit_code).name
        hint = "; the kernel kills processes when the host's memory is full" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{hint}"
    return f"its process was killed by signal {-exit_code}"


def _forward(pipe: Connection, call: Callable[..., Any], handle: Any, end: list[BaseException | None]) -> None:
    """Pass the calls of a rank's process to the keeper until it ends, or until the keeper does not answer any more."""
    with contextlib.closing(pipe), contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = pipe.recv()
            if method == ENDED:
                end.append(arguments)
                return
            if method == "rank_starting":
                group, process = arguments
                arguments = (group, replace(process, handle=handle))
            pipe.send(call(method, *arguments))


def _rank_process(place: Place, plan: GroupPlan, server: ForkServer, keeper: Connection, questions: Any) -> None:
    """Be the process of a rank in one group."""
    end_with_parent(server.pid)
    name_this_process(f"rank {place.rank}")
    host = multiprocessing.parent_process()
    assert host is not None and host.pid is not None
    guard_this_process(host=host.pid)
    server.use()
    os.environ.update(plan.layout.kind.environment() | dict(place.variables))
    threading.Thread(target=_answer, args=(questions,), name="stack", daemon=True).start()
    call = CallThroughPipe(keeper)
    try:
        _serve(place, plan.layout, KeeperProxy(call, plan.name))
    except BaseException as error:
        _send_end(call.pipe, error)
        raise SystemExit(1) from error
    call.pipe.send((ENDED, None))


def _answer(questions: Connection) -> None:
    """Answer each question with the calls of this process. End it once the host has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            questions.recv()
            questions.send(calls())
    os.kill(os.getpid(), signal.SIGKILL)


def _send_end(pipe: Connection, error: BaseException) -> None:
    """Tell the host which exception ends this process, with its traceback as a note.

    One that the host could not make again becomes an exception with the same first line.
    """
    note = "".join(traceback.format_exception(error))
    try:
        type(error)(*error.args)
        error.add_note(note)
        pipe.send((ENDED, error))
    except Exception:  # its class takes other arguments, or it holds what cannot be sent
        portable = RuntimeError(first_line(error))
        portable.add_note(note)
        pipe.send((ENDED, portable))


def _serve(place: Place, layout: Layout, keeper: KeeperProxy) -> None:
    """Connect to the other ranks of the group and serve its trials."""
    import torch

    from study.orchestrate.rank import RankFunctions, serve

    device = torch.device("cpu") if place.gpu is None else torch.device("cuda", place.gpu)
    uses_gpu = place.gpu is not None and layout.kind.door != "script"
    if uses_gpu:
        torch.cuda.set_device(device)
    elif place.gpu is None:
        torch.set_num_threads(layout.kind.cpus_per_rank)
    _connect(place, len(layout.node_ids), "nccl" if uses_gpu else "gloo", keeper)
    functions = RankFunctions() if place.measure is None else RankFunctions(measure=place.measure)
    serve(layout, place.node_id, None, device, keeper, functions, place.address)


def _connect(place: Place, ranks: int, backend: str, keeper: KeeperProxy) -> None:
    """Create the default process group. Rank 0 listens on a free port and tells the others through the keeper."""
    import torch.distributed as dist

    if place.rank == 0:
        store = dist.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
        keeper.meet(f"{place.address}:{store.port}")
    else:
        host, _, port = (keeper.meet(None) or "").rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=ranks, timeout=CONNECT_TIMEOUT)
