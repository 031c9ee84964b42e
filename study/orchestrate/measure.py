"""Measure one job on one rank: the project's own loop, a user's script in a process of its own, or a train function."""

import contextlib
import inspect
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from analysis.read.schema import SCHEMAS
from study.orchestrate.activity import WindowCallbacks
from study.orchestrate.failures import is_lost_peer
from study.orchestrate.protocol import Evidence, Failure, Job, KeeperProxy, Payload
from study.plan.placement import ranks_by_node
from study.store.environment import energies, readings
from study.store.redaction import redacted, redacted_line
from study.store.tables import packed
from trainables.clock import unix_s
from trainables.measure.allreduce_sweep import all_reduce_sweep, sweep_sizes
from trainables.measure.run import run
from trainables.measure.sweep_process import sweep_in_process
from trainables.probe.job import ProbeJob, RankPlace, ScriptFailure, ScriptJob, ScriptOutput
from trainables.probe.launch import run_script
from trainables.probe.session import probe_session
from trainables.registry import PRECISIONS, load
from trainables.scratch import log_folder, scratch_folder, temporary_files_in
from trainables.step.check import check
from trainables.step.context import RankSetup
from trainables.step.precision import Precision, unmet_by
from trainables.step.process import release_memory
from trainables.step.timing import clock_for, without_garbage_collection
from trainables.train.train import train
from trainables.trial import Trial
from trainables.user_workload import load_user_workload
from trainables.workload import WorkloadError

DDP_WARMUP_STEPS = 12
"""Minimum warm-up on GPUs, because DDP's logger synchronises during its first ten steps."""

SHORT_WINDOW_STEPS = 5
"""Most steps of a script's issue window and of its traced one: a script may have few steps."""

LOG_TAIL_BYTES = 100_000
"""Size of the part of a script's output that is stored with a failure."""

STOP_GRACE_S = 2.0
"""Time after the limit of a trial in which a script may still report why it makes no progress."""

SWEEP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class TrialRank:
    """This process as a rank of one trial. `group` carries gradients, `control` everything else."""

    rank: int
    device: torch.device
    group: Any = None
    control: Any = None
    node_id: str = ""
    address: str = "127.0.0.1"
    """Address of this rank's node."""
    job_number: int = 0
    """Number of the job in the worker group."""


def measure(job: Job, trial_rank: TrialRank, keeper: KeeperProxy) -> Payload:
    """Run a trial on this rank and return its payload. Collective over the trial's ranks.

    The evidence has memory and `readings` before and after. For the project's own timed windows, it also has the
    `energies` of the rank's GPUs before and after the plain window.
    """
    if job.trial.door == "factory" and (unmet := _unmet_by_device(job.trial, trial_rank)):
        return _infeasible(unmet, trial_rank)
    if job.check and job.trial.workload:
        return _check_workload(job, trial_rank)
    if job.trial.door == "script":
        return _measure_script(job, trial_rank)
    if job.trial.door == "function":
        return _measure_function(job, trial_rank)
    trial, device = job.trial, trial_rank.device

    def allocated_bytes() -> int | None:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

    before_bytes = allocated_bytes()
    announces = trial_rank.rank == 0 and not trial.epochs  # training trials report their epochs
    windows = WindowCallbacks(
        lambda: readings(device), energies, keeper.window_starting if announces else lambda window: None
    )
    setup = RankSetup(
        trial_rank.rank,
        device,
        trial_rank.group,
        trial_rank.control,
        source=job.source,
        observe=windows.observe,
        read_energy=windows.read_energy,
        on_epoch=keeper.epoch_ended,
        checkpoints=keeper,
        checkpoint_every_s=job.checkpoint_every_s,
    )
    output = (train if trial.epochs else run)(trial, setup)
    started_at, ended_at = output.span
    return Payload(
        tables={name: packed(name, output.tables.get(name, ())) for name in SCHEMAS},
        evidence=Evidence(
            memory={"before_bytes": before_bytes, "after_bytes": allocated_bytes()},
            **output.evidence,
        ),
        started_at=started_at,
        ended_at=ended_at,
        trace=output.trace,
    )


def _unmet_by_device(trial: Trial, trial_rank: TrialRank) -> str | None:
    """Return why the device of any rank cannot run the trial. Collective, so that no rank waits for one that cannot."""
    precision: Precision = load(PRECISIONS[trial.precision])
    if not precision.fp8_linear:  # all others run on every device, or are infeasible by a rule
        return None
    return next(filter(None, _all_gather(unmet_by(precision, trial_rank.device), trial_rank, trial)), None)


def _check_workload(job: Job, trial_rank: TrialRank) -> Payload:
    """Run a step of a user's workload on rank 0. Raises WorkloadError."""
    problem = check(job.trial, trial_rank.device, job.source) if trial_rank.rank == 0 else None
    if problem:
        raise WorkloadError(problem)
    return _empty_payload()


def _infeasible(reason: str, trial_rank: TrialRank) -> Payload:
    """Return the payload of a trial that a device cannot run."""
    return _empty_payload(Failure(trial_rank.rank, trial_rank.node_id, False, reason, reason, infeasible=True))


def _empty_payload(failure: Failure | None = None) -> Payload:
    """Return a payload without measurements."""
    now = unix_s()
    evidence = Evidence(
        before={},
        after={},
        memory={},
        threads=torch.get_num_threads(),
        peak_memory_by_device_bytes=None,
        step_flops=None,
        dataset_samples=None,
    )
    tables = {name: packed(name, ()) for name in SCHEMAS}
    return Payload(tables, evidence, started_at=now, ended_at=now, failure=failure)


# ---------------------------------------------------------------------------------------------------------- scripts


def probe_job(trial: Trial, rank: int) -> ProbeJob:
    """Return the windows that the probe measures in a user's script or train function."""
    on_gpus = trial.device == "cuda"
    few = min(SHORT_WINDOW_STEPS, trial.communication_steps)
    return ProbeJob(
        warmup_steps=max(trial.warmup_steps, DDP_WARMUP_STEPS) if on_gpus else trial.warmup_steps,
        plain_steps=trial.steps,
        phase_steps=trial.steps if trial.communication_steps else 0,
        issue_steps=few if on_gpus else 0,
        trace_steps=few if trial.world_size > 1 or trial.profile_ranks else 0,
        tokens_per_sample=trial.tokens_per_sample,
        keep_trace=trial.profiles(rank),
    )


def _measure_script(job: Job, trial_rank: TrialRank) -> Payload:
    """Run a script in a process of its own. This process does not use the GPU, so the script has all its memory."""
    trial, rank = job.trial, trial_rank.rank
    places = _all_gather((trial_rank.node_id, _gpu_id(trial_rank.device)), trial_rank, trial)
    before = readings(trial_rank.device)
    started_at = time.monotonic()
    log = log_path(trial.trial_id, rank)
    log.unlink(missing_ok=True)
    output = run_script(
        ScriptJob(
            script=trial.script,
            log=str(log),
            arguments=trial.command_line,
            # a script for one GPU may name "cuda:0"
            environment=_environment(trial, trial_rank, [places[rank]] if trial.add_ddp else places),
            directory=job.directory if os.path.isdir(job.directory) else None,
            threads=trial.cpus_per_rank,
            probe=probe_job(trial, rank),
            add_ddp=trial.add_ddp,
            start_timeout_s=job.timeout_s,
            step_timeout_s=job.timeout_s,
        ),
        place_of(rank, [node_id for node_id, _ in places], trial_rank.address),
        dist.distributed_c10d._get_default_store(),
        f"script-{trial_rank.job_number}",
        stop=lambda: time.monotonic() - started_at > job.timeout_s + STOP_GRACE_S,
    )
    after = readings(trial_rank.device)
    failure = None if output.failure is None else _failure(output.failure, trial_rank.node_id, job.timeout_s)
    failures = [failure for failure in _all_gather(failure, trial_rank, trial) if failure]
    if failures:
        return _payload(trial, output, before, after, {}, failure)
    sweep = _sweep(trial, trial_rank, output, places)
    return _payload(trial, output, before, after, {"sweep": sweep}, None)


def _measure_function(job: Job, trial_rank: TrialRank) -> Payload:
    """Call a Ray Train function in this process, whose default process group has exactly the trial's ranks."""
    trial = job.trial
    function: Callable[..., Any] = load_user_workload(trial.train_function, job.source)
    config = json.loads(trial.function_config or "{}")
    config |= {key: getattr(trial, field) for field, key in trial.bound_fields.items()}
    takes_config = bool(inspect.signature(function).parameters)
    before = readings(trial_rank.device)

    def on_any_rank(steps: Collection[int]) -> Collection[int]:
        return {step for of_rank in _all_gather(sorted(steps), trial_rank, trial) for step in of_rank}

    with (
        _shared_temporary_files(trial_rank, trial),
        probe_session(probe_job(trial, trial_rank.rank), trial_rank.rank, on_any_rank) as session,
    ):
        function(config) if takes_config else function()
    output = session.output
    assert output is not None
    release_memory()
    after = readings(trial_rank.device)
    failure = None if output.failure is None else _failure(output.failure, trial_rank.node_id, job.timeout_s)
    if any(_all_gather(failure is not None, trial_rank, trial)):
        return _payload(trial, output, before, after, {}, failure)
    sweep = _sweep(trial, trial_rank, output, ())
    return _payload(trial, output, before, after, {"sweep": sweep}, None)


@contextlib.contextmanager
def _shared_temporary_files(trial_rank: TrialRank, trial: Trial) -> Iterator[None]:
    """Let the ranks on each host put temporary files into one new folder, as Ray Train's workers share a folder."""
    nodes = _all_gather(trial_rank.node_id, trial_rank, trial)
    first = nodes.index(trial_rank.node_id)
    with contextlib.ExitStack() as held:
        own = held.enter_context(scratch_folder("function")) if trial_rank.rank == first else ""
        held.enter_context(temporary_files_in(_all_gather(own, trial_rank, trial)[first]))
        yield


def _payload(
    trial: Trial,
    output: ScriptOutput,
    before: dict[str, Any],
    after: dict[str, Any],
    more: Mapping[str, Sequence[Any]],
    failure: Failure | None,
) -> Payload:
    tables = {**output.tables, **more} if failure is None else {}
    evidence = dict(output.evidence)
    samples, tokens = evidence.get("samples_per_step"), evidence.get("tokens_per_step")
    return Payload(
        tables={name: packed(name, tables.get(name, ())) for name in SCHEMAS},
        evidence=Evidence(
            before=before,
            after=after,
            memory={"before_bytes": None, "after_bytes": None},
            threads=evidence.pop("threads", trial.cpus_per_rank),
            peak_memory_by_device_bytes=evidence.pop("peak_memory_by_device_bytes", None),
            step_flops=evidence.pop("step_flops", None),
            dataset_samples=evidence.pop("dataset_samples", None),
            tokens_per_sample=tokens / samples if tokens and samples else None,
            probe=evidence,
        ),
        started_at=output.span[0],
        ended_at=output.span[1],
        trace=output.trace,
        failure=failure,
    )


def place_of(rank: int, node_ids: Sequence[str], address: str) -> RankPlace:
    """Return the place of a trial's rank. `node_ids` has the node of each of its ranks."""
    nodes = ranks_by_node(node_ids)
    number, ranks = next((number, ranks) for number, ranks in enumerate(nodes) if rank in ranks)
    return RankPlace(
        rank=rank,
        world_size=len(node_ids),
        local_rank=ranks.index(rank),
        local_world_size=len(ranks),
        group_rank=number,
        group_world_size=len(nodes),
        address=address,
    )


def log_path(trial_id: str, rank: int) -> Path:
    """Return where a script's output goes on this host. The folder exists afterwards."""
    return log_folder() / f"{trial_id}-rank{rank}.log"


def _environment(trial: Trial, trial_rank: TrialRank, places: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the variables of a script: the GPUs of the trial's ranks on this node, and those of `script_env`.

    places: node and GPU of the ranks whose GPUs the script sees.
    """
    variables = dict(entry.split("=", 1) for entry in shlex.split(trial.script_env))
    gpus = [gpu for node_id, gpu in places if node_id == trial_rank.node_id and gpu]
    return ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}) | variables


def _gpu_id(device: torch.device) -> str:
    """Return this rank's GPU as an entry of CUDA_VISIBLE_DEVICES, "" on a CPU. Does not initialise CUDA."""
    if device.type != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[device.index].strip() if visible else str(device.index)


def _failure(failure: ScriptFailure, node_id: str, timeout_s: float) -> Failure:
    timed_out = failure.kind in ("start_timeout", "step_timeout", "stopped")
    line = f"no result within {timeout_s:g} s (--trial-timeout): {failure.line}" if timed_out else failure.line
    return Failure(
        rank=failure.rank,
        node_id=node_id,
        out_of_memory=failure.out_of_memory,
        line=redacted_line(line),
        traceback=redacted(_tail(failure.log)) if failure.log else failure.line,
        timed_out=timed_out,
        is_consequence=failure.kind == "other_rank" or is_lost_peer(failure.line),
    )


def _tail(path: str) -> str:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return content[-LOG_TAIL_BYTES:].decode(errors="replace")


def _all_gather(value: Any, trial_rank: TrialRank, trial: Trial) -> list[Any]:
    if trial.processes == 1:
        return [value]
    values: list[Any] = [None] * trial.processes
    dist.all_gather_object(values, value, group=trial_rank.control)
    return values


def _sweep(
    trial: Trial, trial_rank: TrialRank, output: ScriptOutput, places: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return the rows of sweep.parquet for the sizes of the script's own messages. Empty for one rank."""
    if trial.world_size == 1 or not trial.communication_steps:
        return []
    seen = {row["bytes"] for name in ("buckets", "collectives") for row in output.tables.get(name, ()) if row["bytes"]}
    [messages, address] = _all_gather((sorted(seen), _free_address(trial_rank)), trial_rank, trial)[0]
    sizes = sweep_sizes(trial.sweep_bytes, messages)
    if trial.door == "function" or trial_rank.device.type == "cpu":
        with without_garbage_collection():
            clock = clock_for(trial_rank.device)
            return all_reduce_sweep(
                sizes, trial_rank.rank, trial_rank.device, trial_rank.group, trial_rank.control, clock
            )
    place = place_of(trial_rank.rank, [node_id for node_id, _ in places], trial_rank.address)
    host, port = address
    variables = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    gpus = _environment(trial, trial_rank, places)
    return sweep_in_process(sizes, {**gpus, **variables}, SWEEP_TIMEOUT_S)


def _free_address(trial_rank: TrialRank) -> tuple[str, int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return trial_rank.address, listener.getsockname()[1]
