"""Peak rates of GPUs by their data sheets, and their use in training: FLOP/s, energy, GPU-hours, cost.

Peaks are dense: rates with 2:4 sparsity in data sheets are halved. A device is identified by the exact name reported by
its driver. Other devices, such as a MIG slice, have no known peak and therefore no utilisation.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.read.own_code import COMMAND_COLUMN
from analysis.read.reduce import require

_H100 = "NVIDIA H100 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/h200/"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/a100/"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/v100/"
_L40S = "NVIDIA L40S data sheet, https://www.nvidia.com/en-us/data-center/l40s/"
_B200 = (
    "NVIDIA HGX B200 and DGX B200 data sheets, an eighth of the machine, https://www.nvidia.com/en-us/data-center/hgx/"
)


@dataclass(frozen=True)
class Peak:
    """Peak rates of a GPU: dense TFLOP/s (10¹² per second) by kind of arithmetic, and memory TB/s (10¹²).

    fp32: outside the tensor cores. tf32, bf16, fp16, fp8: in the tensor cores, accumulated in fp32. None: not
    supported.
    """

    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float
    memory_tb_per_s: float
    source: str
    fp8: float | None = None

    def flops_per_s(self, precision: str) -> float | None:
        """Return the dense FLOP/s for a trial's `precision`; None if unknown."""
        kind = _ARITHMETIC.get(precision)
        tflops = {"fp32": self.fp32, "tf32": self.tf32, "bf16": self.bf16, "fp16": self.fp16, "fp8": self.fp8}.get(
            kind or ""
        )
        return None if tflops is None else tflops * 1e12

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the peak bandwidth of the GPU's memory."""
        return self.memory_tb_per_s * 1e12


_ARITHMETIC: Mapping[str, str] = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "bf16_master": "bf16",
    "fp16": "fp16",
    "fp16_master": "fp16",
    "fp16_pure": "fp16",
    "fp8": "fp8",
}

_H100_SXM = Peak(67, 494.5, 989.5, 989.5, 3.35, _H100, 1979)  # printed: 67; with sparsity 989, 1979, 1979, 3958
_A100_40 = Peak(19.5, 156, 312, 312, 1.555, _A100)
_V100_SXM = Peak(15.7, None, None, 125, 0.9, _V100)
_V100_PCIE = Peak(14, None, None, 112, 0.9, _V100)

PEAKS: Mapping[str, Peak] = {
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": Peak(51, 378, 756.5, 756.5, 2.0, _H100, 1513),  # with sparsity 756, 1513, 1513, 3026
    "NVIDIA H100 NVL": Peak(60, 417.5, 835.5, 835.5, 3.9, _H100, 1670.5),  # with sparsity 835, 1671, 1671, 3341
    "NVIDIA H200": Peak(67, 494.5, 989.5, 989.5, 4.8, _H200, 1979),  # with sparsity 989, 1979, 1979, 3958
    "NVIDIA H200 NVL": Peak(60, 417.5, 835.5, 835.5, 4.8, _H200, 1670.5),  # with sparsity 835, 1671, 1671, 3341
    "NVIDIA A100-SXM4-40GB": _A100_40,
    "NVIDIA A100-PCIE-40GB": _A100_40,
    "NVIDIA A100-SXM4-80GB": Peak(19.5, 156, 312, 312, 2.039, _A100),
    "NVIDIA A100 80GB PCIe": Peak(19.5, 156, 312, 312, 1.935, _A100),
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla V100S-PCIE-32GB": Peak(16.4, None, None, 130, 1.134, _V100),
    "NVIDIA L40S": Peak(91.6, 183, 362, 362, 0.864, _L40S, 733),  # with sparsity 366, 733, 733, 1466
    "NVIDIA B200": Peak(
        75, 1125, 2250, 2250, 8.0, _B200, 4500
    ),  # eight: 600; sparse 18,000, 36,000, 36,000, 72,000; 64 TB/s
}
"""By the name that NVML and torch report for a GPU."""


_CORE_FP32_PER_CYCLE, _CORE_PER_CYCLE = 512, 2048
"""Most operations of a CPU core per cycle, in fp32 and in any format, as bounds that no core exceeds. Two 512-bit
multiply-adds are 64 in fp32; matrix units do several times that, and at most 2048 in int8 (Intel 64 and IA-32
Architectures Optimization Reference Manual, on AMX)."""

_FASTEST_CORE_HZ = 6.5e9
"""No core of a server or a desktop has a higher clock."""

LEAST_SPAN_S = 1.0
"""Shorter spans may have an energy error above 10 %: the counter of a GPU updates every 20 to 100 ms (100 on an H100;
https://petsc.org/main/manualpages/Log/PetscLogGpuEnergyMeter), and a reading may be equally old.
"""

LEAST_SHARE = 0.9
"""Minimum share of a span with training at the plain pace, for its power to count as that of training."""

USE_COLUMNS = (
    "step_flops", "flops_per_s", "peak_flops_per_s", "mfu", "hfu", "mfu_unmasked", "attention_share",
    "matmul_flops_per_s", "share_of_matmul", "power_w", "wh_per_million_samples", "gpu_hours_per_million_samples",
    "gpu_hours_per_epoch", "money_per_million_samples", "money_per_epoch",
)  # fmt: skip
"""Columns of `use`."""


def use(measured: pd.DataFrame, windows: pd.DataFrame, price_per_gpu_hour: float | None = None) -> pd.DataFrame:
    """Return `USE_COLUMNS` for each done trial on GPUs, indexed by trial_id.

    measured: see `measures.summaries`. windows: see `reduce.windows`. price_per_gpu_hour: in any currency, None if
    unknown. Raises ValueError naming a missing column.

    step_flops: floating-point operations per step on all GPUs, as counted by the ranks; null if a rank has no count.
    flops_per_s: step_flops / plain step time / GPUs. mfu: flops_per_s / dense peak of the device in this precision, the
    model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B); null without a known peak. With fp8, all
    operations count against the fp8 peak, although attention and the output layer compute in bf16. hfu: hardware FLOPs
    utilisation, with the operations that activation checkpointing repeats; null if there are none. attention_share: of
    causal attention in step_flops. mfu_unmasked: mfu without its masked half. matmul_flops_per_s: the measured rate of
    a large matrix product in this precision, mean over the ranks; null if a rank has none. share_of_matmul: flops_per_s
    relative to it. power_w: see `training_power_w`. gpu_hours_per_million_samples: GPUs / throughput, in hours, times
    10⁶. wh_per_million_samples: the product of both, the energy of all GPUs. gpu_hours_per_epoch: GPU-hours for the
    samples of the data set, if a rank recorded their number (`dataset_samples`). money_*: GPU-hours times the price.
    """
    require(
        measured,
        ("trial_id", "device", "world_size", "environment", "throughput_samples_per_s", "step_s"),
        "the frame of trials",
    )
    rows = measured[measured["device"] == "cuda"].set_index("trial_id")
    result = pd.DataFrame(index=rows.index)
    gpus = rows["world_size"].astype(float)
    facts = pd.DataFrame(
        [_evidence(*each) for each in zip(rows["environment"], rows.get("precision", rows["device"]), strict=True)],
        index=rows.index,
        columns=_FACTS,
    )
    facts = facts.astype(float)
    result["step_flops"] = facts["step_flops"]
    result["flops_per_s"] = facts["step_flops"] / rows["step_s"].astype(float) / gpus
    known = [
        (peak.flops_per_s(str(precision)) if (peak := PEAKS.get(str(name))) else None)
        for name, precision in zip(rows["device_name"], rows.get("precision", rows["device"]), strict=True)
    ]
    result["peak_flops_per_s"] = pd.Series(known, index=rows.index, dtype=float)
    result["mfu"] = result["flops_per_s"] / result["peak_flops_per_s"]
    result["hfu"] = result["mfu"] * (1 + facts["recomputed_flops"] / facts["step_flops"])
    result["attention_share"] = facts["causal_attention_flops"] / facts["step_flops"]
    result["mfu_unmasked"] = result["mfu"] * (1 - result["attention_share"] / 2)
    result["matmul_flops_per_s"] = facts["matmul_flops_per_s"]
    result["share_of_matmul"] = result["flops_per_s"] / result["matmul_flops_per_s"]
    result["power_w"] = training_power_w(measured, windows)
    hours_per_sample = gpus / rows["throughput_samples_per_s"].astype(float) / 3600
    result["gpu_hours_per_million_samples"] = 1e6 * hours_per_sample
    result["wh_per_million_samples"] = result["power_w"] * result["gpu_hours_per_million_samples"]
    result["gpu_hours_per_epoch"] = facts["dataset_samples"] * hours_per_sample
    price = float("nan") if price_per_gpu_hour is None else price_per_gpu_hour
    for per in ("million_samples", "epoch"):
        result[f"money_per_{per}"] = price * result[f"gpu_hours_per_{per}"]
    return result[list(USE_COLUMNS)]


def beyond_peak(measured: pd.DataFrame) -> pd.Series:
    """Return FLOP/s over the most that the devices can do, for the trials above 1, indexed by trial_id.

    measured: see `measures.summaries`. GPUs: the data sheet. CPU ranks: all cores of their hosts at their widest
    instructions and at `_FASTEST_CORE_HZ`, which no real program reaches. Trials without a count of operations or a
    known device are left out. Beyond 1, the clock, the count or the trial is wrong.
    """
    rows = measured.set_index("trial_id")
    ratios: dict[Hashable, float] = {}
    for trial_id, row in rows.iterrows():
        flops, step_s = _evidence(row["environment"], row.get("precision"))["step_flops"], row["step_s"]
        peak = _peak_of_all(row)
        if flops and peak and pd.notna(step_s) and step_s > 0:
            ratios[trial_id] = flops / float(step_s) / peak
    result = pd.Series(ratios, dtype=float)
    return result[result > 1]


def _peak_of_all(row: pd.Series) -> float | None:
    """Return the peak FLOP/s of all devices of a trial, in its precision; None if unknown.

    A user's own code may compute in another precision than the trial's, so its peak is that of the fastest.
    """
    precision = str(row.get("precision"))
    workload = row.get("workload")
    chooses_itself = (isinstance(workload, str) and workload != "") or isinstance(row.get(COMMAND_COLUMN), dict)
    if row["device"] == "cuda":
        peak = PEAKS.get(str(row["device_name"]))
        kinds = _ARITHMETIC if chooses_itself else [precision]
        known = [] if peak is None else [flops for kind in kinds if (flops := peak.flops_per_s(kind))]
        return max(known) * float(row["world_size"]) if known else None
    cores = sum(node.get("cpu_count") or 0 for node in row["environment"].get("nodes") or ())
    is_fp32 = precision in ("fp32", "tf32") and not chooses_itself
    return cores * _FASTEST_CORE_HZ * (_CORE_FP32_PER_CYCLE if is_fp32 else _CORE_PER_CYCLE)


def training_power_w(measured: pd.DataFrame, windows: pd.DataFrame) -> pd.Series:
    """Return the mean power per GPU during training, indexed by trial_id; null if unknown.

    Takes the same frames as `use` and raises the same errors. Power is energy / time between two readings of a GPU's
    energy counter. The readings enclose the plain window, on every GPU driven by a rank, including pauses between the
    window's blocks. If they enclose other steps too, the rank's `plain_window` gives their number as `steps`. Null if a
    GPU of the trial was not read, if the span is shorter than `LEAST_SPAN_S`, or if its steps at the plain step time
    take less than `LEAST_SHARE` of it, because the span then includes other work (such as a search for algorithms).
    """
    require(measured, ("trial_id", "device", "world_size", "environment", "step_s"), "the frame of trials")
    require(windows, ("trial_id", "window", "steps"), "the frame of windows")
    rows = measured[measured["device"] == "cuda"].set_index("trial_id")
    steps = windows[windows["window"] == "plain"].groupby("trial_id")["steps"].max().reindex(rows.index).fillna(0)
    each = zip(rows["environment"], rows["world_size"], steps, rows["step_s"].astype(float), strict=True)
    return pd.Series([_mean_power_w(*of_trial) for of_trial in each], index=rows.index, dtype=float)


def _mean_power_w(environment: Mapping[str, Any], gpus: int, plain_steps: float, step_s: float) -> float | None:
    """Return the mean power per GPU, see `training_power_w`. step_s: the plain step time."""
    powers: list[float | None] = []
    for rank in environment.get("ranks") or []:
        read = rank.get("plain_window") or {"before": [{}], "after": [{}]}
        training_s = read.get("steps", plain_steps) * step_s
        spans = zip(read["before"], read["after"], strict=True)
        powers += [_power_w(before, after, training_s) for before, after in spans]
    total_w = _sum(powers)
    return None if total_w is None or len(powers) != gpus else total_w / gpus


def _power_w(before: Mapping[str, Any], after: Mapping[str, Any], training_s: float) -> float | None:
    """Return the power between two readings of a counter.

    None if the counter was reset or not read, or if the span contains other work than training.
    """
    known = [reading.get(name) for reading in (before, after) for name in ("energy_j", "at")]
    if None in known:
        return None
    joules, span_s = after["energy_j"] - before["energy_j"], after["at"] - before["at"]
    trained = span_s >= LEAST_SPAN_S and training_s >= LEAST_SHARE * span_s
    return joules / span_s if trained and joules >= 0 else None


_FACTS = ["step_flops", "causal_attention_flops", "recomputed_flops", "matmul_flops_per_s", "dataset_samples"]


def _evidence(environment: Mapping[str, Any], precision: object) -> dict[str, float | None]:
    """Return the operations of all ranks, the mean matmul limit, and the number of samples of the data set.

    None if a rank has no count, or no limit for the precision.
    """
    ranks = environment.get("ranks") or []
    kind = _ARITHMETIC.get(str(precision), "")
    limits = _sum([(rank.get("matmul_flops_per_s") or {}).get(kind) for rank in ranks])
    return {
        "step_flops": _sum([rank.get("step_flops") for rank in ranks]),
        "causal_attention_flops": _sum([rank.get("causal_attention_flops") for rank in ranks]),
        "recomputed_flops": _sum([rank.get("recomputed_flops") for rank in ranks]),
        "matmul_flops_per_s": limits / len(ranks) if limits else None,
        "dataset_samples": ranks[0].get("dataset_samples") if ranks else None,
    }


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def peak_bytes(measured: pd.DataFrame, windows: pd.DataFrame) -> dict[str, list[float]]:
    """Return the peak bytes on each device of a trial: the devices of a single rank, or one per rank."""
    by_rank = windows.dropna(subset="peak_memory_bytes").groupby(["trial_id", "rank"])["peak_memory_bytes"].max()
    found = {str(trial_id): [float(v) for v in values] for trial_id, values in by_rank.groupby(level="trial_id")}
    for trial_id, environment in zip(measured["trial_id"], measured["environment"], strict=True):
        ranks = environment.get("ranks") or []
        devices = [rank.get("peak_memory_by_device_bytes") for rank in ranks]
        if len(devices) == 1 and devices[0]:
            found[str(trial_id)] = [float(value) for value in devices[0]]
    return found
