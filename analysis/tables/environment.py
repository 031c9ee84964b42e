"""What the numbers rest on: hosts, GPUs and ranks, their state before and after each trial, and what was wrong with it."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd

from analysis.load.environment import WHEN, done_environments, reading, slowed_by, used_gpus, used_nodes
from analysis.study import Analysis
from analysis.tables.table import Column, Table
from analysis.text import GIB, join

_GPU_STATE = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")


def _range(name: str, when: str, header: str, decimals: int, meaning: str) -> Column:
    low, high = f"{name}_{when}_low", f"{name}_{when}_high"
    return Column(low, header, meaning, decimals=decimals, up_to=high, optional=True)


_TRIALS = Column("trials", "trials", "done trials that ran there.", decimals=0)

_HOST_COLUMNS = (
    Column("host", "host", "its name."),
    Column("cpu_model", "CPU", "model, as the system names it."),
    Column("cpu_count", "cores", "those that ranks may use.", decimals=0),
    Column("memory_bytes", "memory (GiB)", "1 GiB = 2³⁰ bytes.", 1 / GIB, 0),
    _range("load_average_1min", "before", "load before", 1, "processes that run or wait to, as a mean over 1 minute."),
    _range("load_average_1min", "after", "load after", 1, "the same, right after the timed windows; the study's own count."),
    _TRIALS,
)  # fmt: skip

_GPU_COLUMNS = (
    Column("host", "host", "that holds it."),
    Column("uuid", "UUID", "by which the driver knows the GPU."),
    Column("name", "GPU", "its model."),
    Column("driver", "driver", "its version."),
    Column("pcie", "PCIe", "generation and lanes, at most; idle links step down.", optional=True),
    Column("nvlinks", "NVLinks", "links that are up.", decimals=0, optional=True),
    Column("nvlink_version", "NVLink version", "of the links that are up.", optional=True),
    _range("sm_clock_mhz", "before", "SM clock before (MHz)", 0, "of the multiprocessors, before the warm-up."),
    _range("sm_clock_mhz", "after", "after (MHz)", 0, "the same, right after the timed windows."),
    _range("memory_clock_mhz", "after", "memory clock (MHz)", 0, "after."),
    _range("power_w", "after", "power (W)", 0, "after."),
    _range("temperature_c", "after", "temperature (°C)", 0, "after."),
    Column("slowed_by", "slowed down by", "as NVML names it, and in how many trials it was seen, before or after.", optional=True),
    _TRIALS,
)  # fmt: skip

_RANK_COLUMNS = (
    Column("rank", "rank", "number, from 0.", decimals=0),
    Column("host", "host", "that it ran on."),
    Column("device", "device", "that it computed on, by its UUID where it has one."),
    Column("threads", "threads", "of the rank's own process, without its loaders.", decimals=0),
    Column("affinity", "may run on CPUs", "cores that the system lets its process use.", optional=True),
    Column("peak_memory_bytes", "peak allocated (GiB)", "the most that tensors held in any of the trials.", 1 / GIB, 2, optional=True),
    Column("peak_reserved_bytes", "peak reserved (GiB)", "the most that PyTorch's allocator held for them.", 1 / GIB, 2, optional=True),
    _TRIALS,
)  # fmt: skip


def hosts(analysis: Analysis) -> Table:
    """Every host that held a rank, and its load."""
    rows = []
    for _, environment in done_environments(analysis.results.trials):
        for node in used_nodes(environment):
            there = [rank for rank in environment["ranks"] if rank.get("node_id") == node.get("node_id")]
            facts = {name: node.get(name) for name in ("host", "cpu_model", "cpu_count", "memory_bytes")}
            rows.append(facts | _spans(there, ["load_average_1min"]))
    return _table("Hosts", _HOST_COLUMNS, rows, ["host", "cpu_model", "cpu_count", "memory_bytes"])


def gpus(analysis: Analysis) -> Table:
    """Every GPU that a rank held, by UUID, and its state before and after the windows of its trials."""
    rows = []
    for _, environment in done_environments(analysis.results.trials):
        host = {node.get("node_id"): node.get("host") for node in used_nodes(environment)}
        for rank, gpu in used_gpus(environment):
            generation, width = gpu.get("pcie_generation"), gpu.get("pcie_width")
            facts = {
                "host": host.get(rank.get("node_id")),
                "uuid": rank["gpu_uuid"],
                "name": gpu.get("name") or rank.get("device"),
                "driver": gpu.get("driver"),
                "pcie": f"{generation} x{width}" if generation and width else None,
                "nvlinks": gpu.get("nvlinks"),
                "nvlink_version": gpu.get("nvlink_version"),
            }
            rows.append(facts | _spans([rank], _GPU_STATE) | {"slowed_by": slowed_by(rank)})
    return _table(
        "GPUs",
        _GPU_COLUMNS,
        rows,
        ["host", "uuid", "name", "driver", "pcie", "nvlinks", "nvlink_version"],
        "What the driver (NVML) says of each GPU that a rank held, found by its UUID; from the lowest to the highest of all trials.",
    )


def ranks(analysis: Analysis) -> Table:
    """Every rank and where it ran, with its peak memory over all trials."""
    held = analysis.results.windows.groupby(["trial_id", "rank"])[["peak_memory_bytes", "peak_reserved_bytes"]]
    peaks: dict[Any, dict[Any, Any]] = held.max().to_dict("index")
    rows: list[dict[str, Any]] = []
    for trial_id, environment in done_environments(analysis.results.trials):
        host = {node.get("node_id"): node.get("host") for node in used_nodes(environment)}
        for number_of_rank, rank in enumerate(environment.get("ranks") or ()):
            facts = {
                "rank": number_of_rank,
                "host": host.get(rank.get("node_id")),
                "device": rank.get("gpu_uuid") or rank.get("device"),
                "threads": rank.get("threads"),
                "affinity": _as_ranges(rank.get("affinity") or ()),
            }
            rows.append({**facts, **peaks.get((trial_id, number_of_rank), {})})
    return _table("Ranks", _RANK_COLUMNS, rows, ["rank", "host", "device", "threads", "affinity"])


def _table(
    title: str, columns: tuple[Column, ...], rows: list[dict[str, Any]], keys: list[str], note: str = ""
) -> Table:
    """Rows of single trials as one for each value of `keys`: lowest `_low`, highest `_high` and `_bytes`, their number."""
    needed = dict.fromkeys(name for column in columns for name in (column.name, column.up_to) if name)
    if not rows:
        return Table(title, columns, pd.DataFrame(columns=list(needed)), note)
    found = pd.DataFrame(rows)
    grouped = found.groupby(keys, dropna=False, sort=True)
    frame = grouped.size().rename("trials").to_frame()
    for name in found.columns.difference(keys):
        if name == "slowed_by":
            frame[name] = grouped[name].agg(_counted)
        else:
            frame[name] = (
                found[name]
                .astype(float)
                .groupby([found[key] for key in keys], dropna=False)
                .agg("min" if name.endswith("_low") else "max")
            )
    return Table(title, columns, frame.reset_index(), note)


def _spans(ranks: list[dict[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Lowest and highest of each reading before and after, over some ranks of a trial."""
    spans = {}
    for name in names:
        for when in WHEN:
            seen = [value for rank in ranks if (value := reading(rank, when, name)) is not None]
            spans[f"{name}_{when}_low"] = min(seen, default=float("nan"))
            spans[f"{name}_{when}_high"] = max(seen, default=float("nan"))
    return spans


def _counted(reasons: pd.Series) -> str | None:
    """What slowed a GPU down, with the number of trials: "power limit (3)"; "nothing" where someone looked."""
    seen = reasons.dropna()
    counts = Counter(reason for of_trial in seen for reason in of_trial)
    return join([f"{reason} ({count})" for reason, count in counts.most_common()]) or ("nothing" if len(seen) else None)


def _as_ranges(cpus: Iterable[int]) -> str | None:
    """CPU numbers, runs of them drawn together: "0–7, 16"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs) or None
