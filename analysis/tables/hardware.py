"""Tables of hardware use: floating-point rate, energy, GPU-hours, cost, and memory per GPU."""

import pandas as pd

from analysis.measure.hardware import LEAST_SHARE, LEAST_SPAN_S, PEAKS, USE_COLUMNS, peak_bytes, use
from analysis.measure.measures import configuration_of
from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns, blocks
from analysis.text import GIB, number


def hardware(analysis: Analysis) -> Table:
    """Tabulate floating-point utilisation, energy, GPU-hours and cost of every configuration on GPUs."""
    price = analysis.record.price_per_gpu_hour
    configurations = analysis.configurations
    if configurations.empty:
        trials = pd.DataFrame(columns=list(USE_COLUMNS))
    else:
        trials = use(analysis.measured, analysis.results.windows, price)
    medians = trials.groupby(configuration_of(configurations).reindex(trials.index)).median()
    axes = axis_columns(analysis)
    frame = configurations[[*(column.name for column in axes), "trial_ids", "n"]].join(medians, how="inner")
    impossible = _IMPOSSIBLE if (frame["mfu"].astype(float) > 1).any() else ""
    cost = "in the currency of --price-per-gpu-hour." if price is None else f"at {price:g} per GPU-hour."
    return Table(
        "Hardware use and cost",
        (
            *axes,
            Column(
                "flops_per_s",
                "TFLOP/s per GPU",
                "floating-point operations per step, counted during its forward and backward pass / plain step time "
                "/ GPUs.",
                1e-12,
                1,
            ),
            Column(
                "mfu",
                "MFU (%)",
                "model FLOPs utilisation: TFLOP/s / the GPU's dense peak in this precision according to its data "
                "sheet; empty for unknown GPUs.",
                1e2,
                1,
            ),
            Column(
                "hfu",
                "HFU (%)",
                "hardware FLOPs utilisation: MFU with the operations that activation checkpointing repeats.",
                1e2,
                1,
            ),
            Column(
                "mfu_unmasked",
                "without masked attention (%)",
                "the same without the masked half of causal attention, which MFU counts.",
                1e2,
                1,
            ),
            Column(
                "attention_share",
                "attention (%)",
                "share of causal attention in the operations.",
                1e2,
                1,
            ),
            Column(
                "share_of_matmul",
                "of matmul limit (%)",
                "TFLOP/s / that of a large matrix product in this precision, measured on the same ranks.",
                1e2,
                1,
            ),
            Column("power_w", "power (W)", _POWER, decimals=0),
            Column(
                "wh_per_million_samples",
                "Wh per million samples",
                "energy of all GPUs: power × GPU-hours per million samples; without host, network and cooling.",
                decimals=1,
            ),
            Column("gpu_hours_per_million_samples", "GPU-hours per million samples", "GPUs / plain throughput."),
            Column("gpu_hours_per_epoch", "GPU-hours per epoch", "for all samples of the data set."),
            Column("money_per_million_samples", "cost per million samples", cost, decimals=4),
            Column("money_per_epoch", "cost per epoch", cost),
            N_COLUMN,
        ),
        frame,
        f"Medians of the repeats. {_peaks(analysis)}{_FP8 if _uses_fp8(analysis) else ''}{impossible}".rstrip(),
        blocks=blocks(axes),
    )


_POWER = (
    "mean per GPU in the plain window, from NVML's energy counter read right before and after it. Results whose "
    "counters "
    "were read only before the warm-up and after the phases window: mean over that span. Empty if the span lasts less "
    f"than {LEAST_SPAN_S:g} s (the counter updates every 20 to 100 ms), if its steps would take less than "
    f"{100 * LEAST_SHARE:g} % of it at the plain step time, or if a GPU was not read."
)

_FP8 = (
    " With precision fp8, utilisation refers to the fp8 peak and the fp8 matmul limit for all operations, although "
    "attention and the output layer compute in bf16."
)

_IMPOSSIBLE = (
    " A utilisation above 100 % is impossible: either the trial computed in another arithmetic than its precision "
    "states "
    "(such as TF32 for fp32), or its operations were counted incorrectly."
)


def _uses_fp8(analysis: Analysis) -> bool:
    return "precision" in analysis.configurations and bool((analysis.configurations["precision"] == "fp8").any())


def _peaks(analysis: Analysis) -> str:
    """Return the peak rates that utilisation refers to, with their source."""
    sentences = []
    for name in sorted(set(analysis.measured["device_name"].dropna())):
        if peak := PEAKS.get(name):
            rates = {"bf16": peak.bf16, "fp16": peak.fp16, "tf32": peak.tf32, "fp32": peak.fp32, "fp8": peak.fp8}
            listed = ", ".join(f"{number(rate, 1)} {kind}" for kind, rate in rates.items() if rate is not None)
            sentences.append(
                f"Peak of {name}: {listed} TFLOP/s dense, memory {peak.memory_tb_per_s:g} TB/s ({peak.source})."
            )
    return " ".join(sentences)


def memory_balance(analysis: Analysis) -> Table:
    """Tabulate the peak memory of each rank or device, and its balance."""
    configurations = analysis.configurations
    rows = []
    peaks = peak_bytes(analysis.measured, analysis.results.windows)
    for index, trial_ids in configurations["trial_ids"].items():
        repeats = [peaks[trial_id] for trial_id in trial_ids if trial_id in peaks]
        if len({len(devices) for devices in repeats}) != 1 or len(repeats[0]) < 2:
            continue
        devices = [max(values) for values in zip(*repeats, strict=True)]
        rows.append(
            {
                "configuration": index,
                "least_bytes": min(devices),
                "most_bytes": max(devices),
                "balance": max(devices) / min(devices) if min(devices) else None,
                "first_bytes": devices[0],
                "others_bytes": sum(devices[1:]) / (len(devices) - 1),
                "each": " ".join(number(value / GIB, 2) for value in devices),
            }
        )
    axes = axis_columns(analysis)
    names = ["configuration", "least_bytes", "most_bytes", "balance", "first_bytes", "others_bytes", "each"]
    frame = pd.DataFrame(rows, columns=names).join(
        configurations[[*(column.name for column in axes), "n", "trial_ids"]], on="configuration"
    )
    one, several = study_ranks(analysis)
    return Table(
        f"Memory balance across {several}",
        (
            *axes,
            Column("first_bytes", "first (GiB)", f"peak memory allocated on {one} 0; 1 GiB = 2³⁰ bytes.", 1 / GIB, 2),
            Column("others_bytes", "others (GiB)", "mean of the others.", 1 / GIB, 2),
            Column("balance", "largest / smallest", "1 if perfectly balanced.", decimals=2),
            Column("each", "all (GiB)", "in the order of ranks or devices."),
            N_COLUMN,
        ),
        frame,
        "Peak of the plain, phases and issue windows, and of a graph's capture; largest of the repeats.",
        blocks=blocks(axes),
    )  # fmt: skip
