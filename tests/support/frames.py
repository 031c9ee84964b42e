"""Synthetic results folders: trials whose step times follow a stated law, with noise."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.read.fields import fields_of
from analysis.read.schema import SCHEMA_VERSION
from study.options import recorded_fields
from trainables.trial import Trial

MIB = 2**20
H200 = "NVIDIA H200"
CPU = "AMD EPYC 9554 64-Core Processor"

FIELDS: dict[str, Any] = Trial(model="resnet18_small", communication_steps=6, sweep_bytes=2**28).model_dump()
RECORDED = recorded_fields()
DECLARED = fields_of({"fields": RECORDED})
"""the declaration of trial fields in a study's results"""

USUAL_VALUES = {
    "parallel": "ddp", "execution": "eager", "storage": "jpeg", "pin_memory": True, "non_blocking": True,
    "interconnect": "auto",
}  # fmt: skip
"""fields that are only part of an id if they have another value"""


def grid(base: dict[str, Any], **axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the product of the axes over `base`."""
    return [FIELDS | base | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def trial_id(fields: dict[str, Any]) -> str:
    """Return a readable id. It is unlike that of real trials."""
    names = ("model", "precision", "world_size", "batch_per_gpu", "loader_workers", "repeat")
    unusual = [name for name, usual in USUAL_VALUES.items() if fields.get(name, usual) != usual]
    named = (f"{name}-{fields[name]}" if isinstance(fields[name], bool) else str(fields[name]) for name in unusual)
    return "-".join([*(str(fields[name]) for name in names), *named])


def environment(fields: dict[str, Any], gpu: str = H200, host: str = "node-a") -> dict[str, Any]:
    cuda = fields["device"] == "cuda"
    per_node = fields["world_size"] // fields["nodes"]
    nodes = [
        {
            "node_id": f"node{i}",
            "host": f"{host}{i}",
            "cpu_model": CPU,
            "cpu_count": 16,
            "memory_bytes": 128 * 2**30,
            "gpus": [
                {
                    "name": gpu,
                    "uuid": f"GPU-{i}-{k}",
                    "driver": "570.86",
                    "memory_bytes": 141 * 10**9,
                    "pcie_generation": 5,
                    "pcie_width": 16,
                    "nvlinks": 18,
                    "nvlink_version": "4.0",
                }
                for k in range(8 if cuda else 0)
            ],
        }
        for i in range(fields["nodes"])
    ]
    ranks = [
        {
            "rank": rank,
            "node_id": f"node{rank // per_node}",
            "device": gpu if cuda else "cpu",
            "gpu_uuid": f"GPU-{rank // per_node}-{rank % per_node}" if cuda else None,
            "threads": fields["cpus_per_rank"],
            "affinity": list(range(16)),
            "niceness": 0,
            "before": _reading(cuda, sm_clock_mhz=1980, power_w=120.5, temperature_c=31),
            "after": _reading(cuda, sm_clock_mhz=1965, power_w=612.0, temperature_c=55),
        }
        for rank in range(fields["world_size"])
    ]
    versions = {"python": "3.11.9", "torch": "2.11.0", "cuda": "13.0" if cuda else None, "nccl": None, "ray": "2.56.0"}
    return {
        "nodes": nodes,
        "ranks": ranks,
        "versions": versions,
        "variables": {"OMP_NUM_THREADS": "1"},
        "set_by_study": [],
        "git": {"commit": "0123abcd", "dirty": False},
        "measuring_code": "c0de",
    }


def _reading(cuda: bool, **gpu_values: float) -> dict[str, Any]:
    """Return what a rank reads from its device before or after its windows."""
    gpu: dict[str, Any] = gpu_values | {"memory_clock_mhz": 3201, "throttle_reasons": []}
    return (gpu if cuda else dict.fromkeys(gpu)) | {"load_average_1min": 3.5}


def steps(
    fields: dict[str, Any],
    step_s: float,
    shares: tuple[float, ...] = (0.02, 0.01, 0.28, 0.02, 0.6, 0.07),
    *,
    instruments: float = 1.004,
    launch_ratio: float = 0.5,
    previous_done: float = 0.1,
    busy_ratio: float = 0.95,
    synced_ratio: float = 1.02,
    peak_bytes: int | None = None,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
) -> pd.DataFrame:
    """Return steps.parquet of a trial: each step takes `step_s` on every rank, split into six phases by `shares`.

    launch_ratio: host time to issue a step / its duration on an idle device. previous_done: share of steps that end
    after the device has finished the previous step. busy_ratio: share of each phase after the copy in which the device
    runs kernels. synced_ratio: duration of a step that waits for its copy / of one that does not; the forward pass
    contains the difference. peak_bytes: of memory; grows with the batch if not given. CPU trials have none of these,
    and no transfers or memory; their transfer share is 0.
    """
    rng = rng or np.random.default_rng(0)
    cuda = fields["device"] == "cuda"
    copies = _copies(fields)
    counts = _window_steps(fields)
    window = np.repeat(list(counts), list(counts.values()))
    total = len(window)
    plain, phases, issue, busy, synced = (
        window == name for name in ("plain", "phases", "issue", "busy", "transfer_synced")
    )
    durations_s = step_s * np.exp(noise * rng.standard_normal(total)) * np.where(phases | synced, instruments, 1.0)
    window_s = np.select([plain, phases], [durations_s[plain].sum(), durations_s[phases].sum()], np.nan)
    window_s = np.where(synced, durations_s[synced].sum() * synced_ratio, window_s)
    columns: dict[str, Any] = {
        "rank": np.int32(0),
        "window": window.astype(object),
        "step": np.arange(total, dtype=np.int32),
        "samples": _samples(fields),
        "window_s": window_s,
        "loss": 2.3 * np.exp(-0.01 * np.arange(total)),
    }
    instrumented = np.where(plain, np.nan, durations_s)
    names = ["load_wait_s", "host_to_device_s", "forward_s", "loss_s", "backward_s", "optimizer_s"]
    parts = {name: instrumented * share for name, share in zip(names, shares, strict=True)}
    for name in names:
        parts[name] = np.where(busy, parts[name] * busy_ratio if name in names[2:] else np.nan, parts[name])
    if not copies:
        parts["host_to_device_s"] = np.full(total, np.nan)
    columns |= parts
    columns["step_s"] = np.where(busy, np.nan, instrumented * (sum(shares) - (0.0 if copies else shares[1])))
    wait_s = np.where(synced, durations_s * (synced_ratio - 1), 0.0)
    columns["forward_s"] += wait_s
    columns["step_s"] += wait_s
    columns["host_to_device_bytes"] = _value_if(
        ~plain & ~busy & copies, fields["batch_per_gpu"] * fields["image_size"] ** 2 * 4
    )
    columns["host_load_s"] = instrumented * shares[0]
    call_s = np.where(synced, parts["host_to_device_s"], 20e-6)
    columns["host_transfer_s"] = np.where((phases | synced) & copies, call_s, np.nan)
    columns["previous_step_done"] = pd.array(
        [
            bool(done) if known else None
            for done, known in zip(rng.random(total) < previous_done, phases & cuda, strict=True)
        ],
        dtype="boolean",
    )
    launch_shares = {"forward": 0.38, "loss": 0.02, "backward": 0.4, "optimizer": 0.2, "step": 1.0}
    for name, share in launch_shares.items():
        columns[f"{name}_launch_s"] = np.where(issue, durations_s * launch_ratio * share, np.nan)
    peak_bytes = peak_bytes or 2**30 + 12 * MIB * fields["batch_per_gpu"]
    columns["peak_memory_bytes"] = _value_if(np.full(total, cuda), peak_bytes)
    columns["peak_reserved_bytes"] = _value_if(np.full(total, cuda), peak_bytes + 256 * MIB)
    # Ranks are synchronised, so the noise of a step is the same on all.
    frame = pd.DataFrame(columns)
    return pd.concat([frame.assign(rank=np.int32(rank)) for rank in range(fields["world_size"])], ignore_index=True)


def _samples(fields: dict[str, Any]) -> np.int32:
    """Return the samples of a rank per step."""
    return np.int32(fields["batch_per_gpu"] * fields.get("accumulation_steps", 1))


def _window_steps(fields: dict[str, Any]) -> dict[str, int]:
    """Return the number of steps of each window, in order."""
    timed = {"warmup": fields["warmup_steps"], "plain": fields["steps"], "phases": fields["steps"]}
    on_cuda = {"issue": 5, "busy": 5} if fields["device"] == "cuda" else {}
    return timed | on_cuda | ({"transfer_synced": 10} if _copies(fields) else {})


def _copies(fields: dict[str, Any]) -> bool:
    """Return True if each step copies a batch to a device."""
    return bool(fields["device"] == "cuda" and fields["dataset"] != "synthetic")


def communication(
    fields: dict[str, Any],
    *,
    last_gradient_s: float,
    bucket_bytes: Iterable[int] = (32 * MIB, 28 * MIB, 25 * MIB, 8 * MIB),
    latency_s: float = 50e-6,
    bandwidth: float = 10e9,
    contention: float = 1.25,
    straggler: int | None = None,
    late_s: float = 0.0,
    slowed_s: float = 0.0,
    tail_s: float = 0.001,
    plain_step_s: float | None = None,
    communication_ratio: float = 1.003,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the rows that several ranks add to steps.parquet, and their buckets.parquet and sweep.parquet.

    An all-reduce alone takes latency_s + bytes / bandwidth; in training `contention` times that. Buckets are ready at
    equal intervals until `last_gradient_s`, and `late_s` later on the straggler, by which time the others have lost
    `slowed_s`, evenly since their first bucket: the straggler is that much later at first. An all-reduce starts when
    the last rank is ready, and on CUDA also after the previous one. After the last gradient and all-reduce, the
    optimizer takes `tail_s`.
    """
    rng = rng or np.random.default_rng(0)
    cuda, ranks, count = fields["device"] == "cuda", range(fields["world_size"]), fields["communication_steps"]
    sizes = np.array(list(bucket_bytes))
    late = {rank: late_s + slowed_s if rank == straggler else 0.0 for rank in ranks}
    steps = np.linspace(0.0, slowed_s, len(sizes))
    delays = {rank: np.full(len(sizes), late[rank]) if rank == straggler else steps for rank in ranks}
    first = sum(_window_steps(fields).values())
    rows, buckets = [], []
    for number in range(count):
        factor = float(np.exp(noise * rng.standard_normal()))
        ready = factor * last_gradient_s * np.arange(1, len(sizes) + 1) / len(sizes)
        transfer_s = factor * contention * (latency_s + sizes / bandwidth)
        end, free = np.empty(len(sizes)), 0.0
        for k, ready_everywhere in enumerate(ready + np.max(list(delays.values()), axis=0)):
            end[k] = max(ready_everywhere, free if cuda else 0.0) + transfer_s[k]
            free = end[k]
        last = float(ready[-1])
        for rank in ranks:
            common = {
                "rank": np.int32(rank),
                "samples": _samples(fields),
            }
            done_s = max(float(end.max()), last + delays[rank][-1]) + tail_s
            windows = {
                "synchronised": {"step_s": done_s},
                "no_sync": {"step_s": last + late[rank] + tail_s},
                "communication": {"step_s": done_s, "last_gradient_s": last + delays[rank][-1]},
            }
            for i, (window, columns) in enumerate(windows.items()):
                rows.append(common | columns | {"window": window, "step": first + i * count + number})
            buckets += [
                {
                    "rank": rank,
                    "window": "communication",
                    "step": first + 2 * count + number,
                    "bucket": k,
                    "bytes": sizes[k],
                    "ready_s": ready[k] + delays[rank][k],
                    "end_s": end[k],
                }
                for k in range(len(sizes))
            ]
    frame = pd.DataFrame(rows)
    in_window = frame["window"] == "communication"
    mean_step_s = plain_step_s * communication_ratio if plain_step_s else frame.loc[in_window, "step_s"].mean()
    frame["window_s"] = np.where(in_window, count * mean_step_s, np.nan)
    powers = [4**k for k in range(1, 20) if 4**k <= fields["sweep_bytes"]]
    sweep = pd.DataFrame(
        [
            {"rank": rank, "bytes": size, "repetition": repetition, "seconds": latency_s + size / bandwidth}
            for size in sorted({*powers, *sizes.tolist()})
            for repetition in range(5)
            for rank in ranks
        ]
    )
    sweep["seconds"] *= np.exp(noise * rng.standard_normal(len(sweep)))
    return frame, pd.DataFrame(buckets), sweep


def _value_if(conditions: Any, value: int) -> Any:
    """Return `value` for each true condition, null for the others."""
    return pd.array([value if condition else None for condition in conditions], dtype="Int64")


def record(fields: dict[str, Any], status: str = "done", reason: str | None = None, **more: Any) -> dict[str, Any]:
    """Return trial.json of a trial."""
    ran = status not in ("infeasible", "pruned")
    return {
        "schema_version": SCHEMA_VERSION,
        "trial_id": trial_id(fields),
        "trial": fields,
        "status": status,
        "reason": reason,
        "worker_group": f"group-{fields['repeat']}" if ran else None,
        "started_at": 1.7e9 + 10.0 * fields["repeat"] if ran else None,
        "duration_s": 4.2 if ran else None,
        "environment": environment(fields) if ran else {},
        "log": "error.log" if status in ("failed", "timeout") else None,
    } | more


def write_study(
    directory: Path, name: str = "default", question: str = "How does training scale?", **more: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    study = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "question": question,
        "configuration": {"repeats": 3},
        "versions": {"python": "3.11.9", "torch": "2.11.0"},
        "command": f"python -m study.scaling run {name}",
        "fields": RECORDED,
    } | more
    (directory / "study.json").write_text(json.dumps(study))
    return directory


def write_trial(
    directory: Path,
    trial: dict[str, Any],
    frame: pd.DataFrame | None = None,
    buckets: pd.DataFrame | None = None,
    sweep: pd.DataFrame | None = None,
) -> Path:
    folder = directory / "trials" / trial["trial_id"]
    folder.mkdir(parents=True)
    for name, content in (("steps", frame), ("buckets", buckets), ("sweep", sweep)):
        if content is not None:
            content.to_parquet(folder / f"{name}.parquet")
    (folder / "trial.json").write_text(json.dumps(trial))
    return folder


def write_results(
    directory: Path,
    trials: list[dict[str, Any]],
    law: Callable[[dict[str, Any]], dict[str, Any]],
    spread: float = 0.006,
    noise: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write a folder of completed trials. `law` returns the keyword arguments of `steps` for a trial's fields.

    Step times vary between repeats with a log-normal spread. If `law` also returns `communication`, the keyword
    arguments of that function, trials on several ranks get a communication breakdown.
    """
    rng = np.random.default_rng(seed)
    write_study(directory)
    for fields in trials:
        arguments = law(fields)
        communication_arguments = arguments.pop("communication", None)
        arguments["step_s"] *= float(np.exp(spread * rng.standard_normal()))
        frame = steps(fields, **arguments, noise=noise, rng=rng)
        if communication_arguments is None or fields["world_size"] == 1:
            write_trial(directory, record(fields), frame)
            continue
        more, buckets, sweep = communication(
            fields, **{"plain_step_s": arguments["step_s"], "noise": noise, "rng": rng} | communication_arguments
        )
        write_trial(directory, record(fields), pd.concat([frame, more], ignore_index=True), buckets, sweep)
    return directory


def cpu_law(fields: dict[str, Any]) -> dict[str, Any]:
    """Model two ranks on two cores: compute grows with the batch, bf16 is slower, and the all-reduce takes 25 ms."""
    compute = 0.004 * fields["batch_per_gpu"] * (1.35 if fields["precision"] == "bf16" else 1.0)
    load = {1: 0.010, 2: 0.004}.get(fields["loader_workers"], 0.02)
    communication = 0.025 if fields["world_size"] > 1 else 0.0
    step_s = compute + load + communication
    parts = (
        np.array([load, 0.0, 0.32 * compute, 0.01 * compute, 0.6 * compute + communication, 0.07 * compute]) / step_s
    )
    last_gradient_s = 0.93 * step_s - communication
    communication_arguments = {
        "last_gradient_s": last_gradient_s,
        "bandwidth": 2e9,
        "bucket_bytes": (40 * MIB, 4 * MIB),
        "tail_s": 0.01,
    }
    return {"step_s": step_s, "shares": tuple(parts), "communication": communication_arguments}


def gpu_law(fields: dict[str, Any]) -> dict[str, Any]:
    """Model ResNet-50: the host needs 14 ms to issue a step (20 ms with DDP), all else grows with the batch."""
    several = fields["world_size"] > 1
    compute = 0.0002 * fields["batch_per_gpu"] * (1.9 if fields["precision"] == "fp32" else 1.0) + 0.001
    host = 0.020 if several else 0.014
    load = max(0.0003, 0.00009 * fields["batch_per_gpu"] / fields["loader_workers"] * 2 - compute * 0.2)
    communication = 0.0006 * fields["world_size"] if several else 0.0
    device = compute + communication + 0.0004
    step_s = max(host, device) + load
    issued = step_s - load - 0.0004
    parts = np.array([load, 0.0004, 0.28 * issued, 0.02 * issued, 0.62 * issued, 0.08 * issued])
    bound = host >= device
    late = {"straggler": 3, "late_s": 0.004} if fields["world_size"] == 4 and fields["loader_workers"] == 4 else {}
    return {
        "communication": {"last_gradient_s": 0.9 * step_s, "tail_s": 0.08 * step_s, "bandwidth": 150e9} | late,
        "step_s": step_s,
        "shares": tuple(parts / step_s),
        "launch_ratio": 0.99 if bound else host / device,
        "previous_done": 0.95 if bound else 0.02,
        "busy_ratio": compute / issued,
    }


def cpu_study(directory: Path) -> Path:
    """Write 48 trials: 1 and 2 CPU ranks x 2 batches x 2 loader worker counts x 2 precisions x 3 repeats."""
    trials = grid(
        {},
        world_size=[1, 2],
        batch_per_gpu=[32, 64],
        loader_workers=[1, 2],
        precision=["fp32", "bf16"],
        repeat=range(3),
    )
    return write_results(directory, trials, cpu_law, spread=0.02, noise=0.02)


def gpu_study(directory: Path) -> Path:
    """Write 108 trials: 1, 2, 4 GPUs x 3 batches x 2 worker counts x 2 precisions x 3 repeats. Some did not finish."""
    base = {"device": "cuda", "model": "resnet50", "image_size": 224, "cpus_per_rank": 8, "steps": 30}
    trials = grid(
        base,
        world_size=[1, 2, 4],
        batch_per_gpu=[32, 128, 512],
        loader_workers=[4, 8],
        precision=["bf16", "fp32"],
        repeat=range(3),
    )
    unfinished = [
        t for t in trials if t["batch_per_gpu"] == 512 and t["precision"] == "fp32" and t["loader_workers"] == 8
    ]
    write_results(directory, [t for t in trials if t not in unfinished], gpu_law, noise=0.02)
    for fields in unfinished:
        if fields["repeat"] == 0:
            reason = "rank 0: CUDA out of memory. Tried to allocate 3.06 GiB"
            write_trial(directory, record(fields, "out_of_memory", reason))
        elif fields["repeat"] == 1:
            write_trial(directory, record(fields, "failed", "rank 2: RuntimeError: <b>loader</b> died & left"))
        else:
            write_trial(directory, record(fields, "pruned", "batch 512 ran out of memory before"))
    infeasible = FIELDS | base | {"world_size": 8, "batch_per_gpu": 32, "loader_workers": 4, "precision": "bf16"}
    write_trial(directory, record(infeasible, "infeasible", "needs 8 GPUs; the cluster has 4"))
    return directory


if __name__ == "__main__":
    import sys

    cpu_study(Path(sys.argv[1]) / "cpu")
    gpu_study(Path(sys.argv[1]) / "gpu")
