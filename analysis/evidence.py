"""What the numbers rest on: hosts, GPUs and ranks, their state before and after each trial, and what was wrong with it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from analysis.columns import GIB
from analysis.environments import commit, used_gpus, used_nodes
from analysis.formatting import join, number, percent
from analysis.scaling import Analysis
from analysis.table import Column, Table

CLOCK_FALL = 0.05
"""Part of its clock by which a GPU may be slower after a trial's windows than before them."""


MOST_NAMED = 3
"""trials by their names in one sentence"""

_GPU_STATE = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
_WHEN = ("before", "after")


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
    for _, environment in _done(analysis):
        for node in used_nodes(environment):
            there = [rank for rank in environment["ranks"] if rank.get("node_id") == node.get("node_id")]
            facts = {name: node.get(name) for name in ("host", "cpu_model", "cpu_count", "memory_bytes")}
            rows.append(facts | _spans(there, ["load_average_1min"]))
    return _table("Hosts", _HOST_COLUMNS, rows, ["host", "cpu_model", "cpu_count", "memory_bytes"])


def gpus(analysis: Analysis) -> Table:
    """Every GPU that a rank held, by UUID, and its state before and after the windows of its trials."""
    rows = []
    for _, environment in _done(analysis):
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
            rows.append(facts | _spans([rank], _GPU_STATE) | {"slowed_by": _slowed_by(rank)})
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
    for trial_id, environment in _done(analysis):
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


def commits(analysis: Analysis) -> str | None:
    """A sentence where trials of several commits are compared whose measuring code is not known to be the same."""
    done = _done(analysis)
    seen = Counter(name for _, environment in done if (name := commit(environment)))
    if len(seen) < 2 or all(environment.get("measuring_code") for _, environment in done):
        return None
    listed = join([f"{name} ({count})" for name, count in seen.most_common()])
    return (
        f"The trials ran under {len(seen)} commits of this program: {listed}. Not all have a digest of the code that measures, "
        "so whether it was the same is not known."
    )


def doubts(analysis: Analysis) -> list[str]:
    """Sentences on trials whose hosts or GPUs were not in the state that a measurement wants."""
    slowed: Counter[str] = Counter()
    slowed_trials: list[str] = []
    fallen_trials: list[str] = []
    loaded_trials = yielding_trials = 0
    most_loaded, most_fallen = (0.0, 1.0), (1.0, 1.0)
    done = _done(analysis)
    for trial_id, environment in done:
        own = environment.get("ranks") or []
        yielding_trials += any((rank.get("niceness") or 0) > 0 for rank in own)
        reasons = {reason for rank in own for reason in _slowed_by(rank) or ()}
        slowed.update(reasons)
        slowed_trials += [trial_id] * bool(reasons)
        cores = {node.get("node_id"): node.get("cpu_count") for node in used_nodes(environment)}
        loads = [
            (float(load), float(count))
            for rank in own
            for when in _WHEN
            if (load := _read(rank, when, "load_average_1min")) is not None
            and (count := cores.get(rank.get("node_id")))
        ]
        loaded_trials += any(load > count for load, count in loads)
        most_loaded = max([most_loaded, *loads], key=lambda pair: pair[0] / pair[1])
        clocks = [
            (float(before), float(after))
            for rank in own
            for name in ("sm_clock_mhz", "memory_clock_mhz")
            if (before := _read(rank, "before", name)) and (after := _read(rank, "after", name))
        ]
        fallen_trials += [trial_id] * any(after < (1 - CLOCK_FALL) * before for before, after in clocks)
        most_fallen = min([most_fallen, *clocks], key=lambda pair: pair[1] / pair[0])
    lines = [line for line in (commits(analysis), _unlike_nodes(done)) if line]
    if slowed_trials:
        listed = join([f"{reason} ({count})" for reason, count in slowed.most_common()])
        lines.append(
            f"In {len(slowed_trials)} of {len(done)} trials a GPU was slowed down: {listed}. Such numbers say as much about power and "
            f"cooling as about the code. Seen in {named(slowed_trials)}."
        )
    if fallen_trials:
        lines.append(
            f"In {len(fallen_trials)} of {len(done)} trials a GPU's clock fell by more than {percent(CLOCK_FALL)} between before and after, at "
            f"most from {number(most_fallen[0], 0)} to {number(most_fallen[1], 0)} MHz: warm it up longer, or lock its clocks. "
            f"Seen in {named(fallen_trials)}."
        )
    if loaded_trials:
        lines.append(
            f"In {loaded_trials} of {len(done)} trials the load average of a host was above its number of cores, at most {number(most_loaded[0], 1)} "
            f"on {number(most_loaded[1], 0)}: processes waited for a core, those of the study among them."
        )
    if yielding_trials:
        lines.append(
            f"In {yielding_trials} of {len(done)} trials ranks ran at a higher niceness than 0, as Ray's workers do by default: every other "
            "process of the host came before them. Start Ray with RAY_worker_niceness=0 in its environment."
        )
    return lines


def named(trial_ids: Sequence[str]) -> str:
    """Trials by their names, of many the first."""
    first, more = list(trial_ids[:MOST_NAMED]), len(trial_ids) - MOST_NAMED
    return join([*first, f"{more} more"] if more > 0 else first)


def _unlike_nodes(done: list[tuple[str, dict[str, Any]]]) -> str | None:
    """One sentence on trials whose nodes were not of one kind, naming in what and how; None where all were.

    Memory counts as unlike from 5 % on: hosts of one kind reserve a little more or less of it.
    """
    unlike: dict[str, str] = {}
    concerned = 0
    for _, environment in done:
        nodes = used_nodes(environment)
        gib = [round((node.get("memory_bytes") or 0) / GIB) for node in nodes]
        if gib and max(gib) <= 1.05 * min(gib):
            gib = gib[:1] * len(gib)
        facts: list[dict[str, Any]] = [
            {
                "CPU": node.get("cpu_model"),
                "cores": node.get("cpu_count"),
                "memory": f"{memory_gib} GiB",
                "GPUs": join(sorted({str(gpu.get("name")) for gpu in node.get("gpus") or ()})) or "none",
                "driver": join(sorted({str(gpu.get("driver")) for gpu in node.get("gpus") or ()})) or "none",
                **(node.get("versions") or {}),
            }
            for node, memory_gib in zip(nodes, gib, strict=True)
        ]
        names = dict.fromkeys(name for each in facts for name in each)
        differing = [name for name in names if len({each.get(name) for each in facts}) > 1]
        concerned += bool(differing)
        for name in differing:
            by_value = {str(each.get(name)): node.get("host") for node, each in zip(nodes, facts, strict=True)}
            unlike.setdefault(name, join([f"{value} on {host}" for value, host in by_value.items()]))
    if not concerned:
        return None
    listed = "; ".join(f"{name}: {values}" for name, values in unlike.items())
    return (
        f"In {concerned} of {len(done)} trials the nodes were unlike ({listed}): the slowest of them sets the pace of all, so such "
        "numbers hold for this mixture only."
    )


def _done(analysis: Analysis) -> list[tuple[str, dict[str, Any]]]:
    """Trial and environment of each trial with a result."""
    trials = analysis.results.trials
    done = trials[trials["status"] == "done"]
    return list(zip(done["trial_id"], done["environment"], strict=True))


def _read(rank: dict[str, Any], when: str, name: str) -> Any:
    """What a rank read before or after its windows; None where it did not, as in results older than such readings."""
    return (rank.get(when) or {}).get(name)


def _spans(ranks: list[dict[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Lowest and highest of each reading before and after, over some ranks of a trial."""
    spans = {}
    for name in names:
        for when in _WHEN:
            seen = [value for rank in ranks if (value := _read(rank, when, name)) is not None]
            spans[f"{name}_{when}_low"] = min(seen, default=float("nan"))
            spans[f"{name}_{when}_high"] = max(seen, default=float("nan"))
    return spans


def _slowed_by(rank: dict[str, Any]) -> list[str] | None:
    """What slowed the rank's GPU down when it was looked at; None where nobody could look."""
    seen = [reasons for when in _WHEN if (reasons := _read(rank, when, "throttle_reasons")) is not None]
    return sorted({str(reason) for reasons in seen for reason in reasons}) if seen else None


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
