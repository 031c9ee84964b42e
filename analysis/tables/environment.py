"""Tables of the hardware under the results: hosts, GPUs and ranks, with their state before and after each trial."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd

from analysis.read.environment import WHEN, done_environments, reading, slowed_by, used_gpus, used_nodes
from analysis.study import Analysis
from analysis.tables.table import Column, Table
from analysis.text import GIB, join

_GPU_STATE = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")


def _range(name: str, when: str, header: str, decimals: int, meaning: str) -> Column:
    low, high = f"{name}_{when}_low", f"{name}_{when}_high"
    return Column(low, header, meaning, decimals=decimals, up_to=high)


_TRIALS = Column("trials", "trials", "number of done trials.", decimals=0)

_HOST_COLUMNS = (
    Column("host", "host", "its name."),
    Column("cpu_model", "CPU", "model, as reported by the system."),
    Column("cpu_count", "cores", "available to ranks.", decimals=0),
    Column("memory_bytes", "memory (GiB)", "1 GiB = 2³⁰ bytes.", 1 / GIB, 0),
    _range("load_average_1min", "before", "load before", 1, "running or runnable processes, mean over 1 minute."),
    _range(
        "load_average_1min", "after", "load after", 1, "the same, right after the timed windows; includes the study."
    ),
    _TRIALS,
)

_GPU_COLUMNS = (
    Column("host", "host", "host of the GPU."),
    Column("uuid", "UUID", "identifies the GPU to the driver."),
    Column("name", "GPU", "model."),
    Column("driver", "driver", "version."),
    Column("pcie", "PCIe", "maximum generation and lanes; idle links step down."),
    Column("nvlinks", "NVLinks", "number of active links.", decimals=0),
    Column("nvlink_version", "NVLink version", "of the active links."),
    _range("sm_clock_mhz", "before", "SM clock before (MHz)", 0, "clock of the multiprocessors before the warm-up."),
    _range("sm_clock_mhz", "after", "SM clock after (MHz)", 0, "the same, right after the timed windows."),
    _range("memory_clock_mhz", "after", "memory clock (MHz)", 0, "right after the timed windows."),
    _range("power_w", "after", "power (W)", 0, "right after the timed windows."),
    _range("temperature_c", "after", "temperature (°C)", 0, "right after the timed windows."),
    Column(
        "slowed_by",
        "throttled by",
        "reasons reported by NVML before or after, with the number of trials.",
    ),
    _TRIALS,
)

_RANK_COLUMNS = (
    Column("rank", "rank", "number, from 0.", decimals=0),
    Column("host", "host", "host of the rank."),
    Column("device", "device", "UUID, or name if it has none."),
    Column("threads", "threads", "of the rank's process, without its loaders.", decimals=0),
    Column("affinity", "CPU affinity", "cores that its process may use."),
    Column(
        "peak_memory_bytes",
        "peak allocated (GiB)",
        "maximum memory of tensors in any trial.",
        1 / GIB,
        2,
    ),
    Column(
        "peak_reserved_bytes",
        "peak reserved (GiB)",
        "maximum memory held by PyTorch's allocator.",
        1 / GIB,
        2,
    ),
    _TRIALS,
)


def hosts(analysis: Analysis) -> Table:
    """Tabulate every host that ran a rank, with its load."""
    rows = []
    for _, environment in done_environments(analysis.results.trials):
        for node in used_nodes(environment):
            ranks_on_node = [rank for rank in environment["ranks"] if rank.get("node_id") == node.get("node_id")]
            facts = {name: node.get(name) for name in ("host", "cpu_model", "cpu_count", "memory_bytes")}
            rows.append(facts | _spans(ranks_on_node, ["load_average_1min"]))
    return _table("Hosts", _HOST_COLUMNS, rows, ["host", "cpu_model", "cpu_count", "memory_bytes"])


def gpus(analysis: Analysis) -> Table:
    """Tabulate every GPU by UUID, with its state before and after the windows of its trials."""
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
        "Readings of the driver (NVML) for each GPU of a rank, identified by UUID; ranges over all trials.",
    )


def ranks(analysis: Analysis) -> Table:
    """Tabulate every rank with its host, device and peak memory over all trials."""
    by_rank = analysis.results.windows.groupby(["trial_id", "rank"])[["peak_memory_bytes", "peak_reserved_bytes"]]
    peaks: dict[Any, dict[Any, Any]] = by_rank.max().to_dict("index")
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
    """Aggregate rows of single trials by `keys`: minimum of `_low` columns, maximum of others, and number of trials."""
    needed = dict.fromkeys(name for column in columns for name in (column.name, column.up_to) if name)
    if not rows:
        return Table(title, columns, pd.DataFrame(columns=list(needed)), note)
    trials = pd.DataFrame(rows)
    grouped = trials.groupby(keys, dropna=False, sort=True)
    frame = grouped.size().rename("trials").to_frame()
    for name in trials.columns.difference(keys):
        if name == "slowed_by":
            frame[name] = grouped[name].agg(_counted)
        else:
            values = trials[name].astype(float).groupby([trials[key] for key in keys], dropna=False)
            frame[name] = values.agg("min" if name.endswith("_low") else "max")
    return Table(title, columns, frame.reset_index(), note)


def _spans(ranks: list[dict[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Return minimum and maximum of each reading before and after, over the given ranks of a trial."""
    spans = {}
    for name in names:
        for when in WHEN:
            values = [value for rank in ranks if (value := reading(rank, when, name)) is not None]
            spans[f"{name}_{when}_low"] = min(values, default=float("nan"))
            spans[f"{name}_{when}_high"] = max(values, default=float("nan"))
    return spans


def _counted(reasons: pd.Series) -> str | None:
    """Return throttle reasons with the number of trials: "power limit (3)"; "nothing" if read but never throttled."""
    known = reasons.dropna()
    counts = Counter(reason for trial_reasons in known for reason in trial_reasons)
    return join([f"{reason} ({count})" for reason, count in counts.most_common()]) or (
        "nothing" if len(known) else None
    )


def _as_ranges(cpus: Iterable[int]) -> str | None:
    """Format CPU numbers as ranges: "0–7, 16"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs) or None
