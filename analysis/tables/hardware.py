"""Tables on what training makes of the GPUs: floating-point rate, energy, GPU-hours, money, and memory on each of them."""

import pandas as pd

from analysis.measure.hardware import LEAST_SHARE, LEAST_SPAN_S, PEAKS, USE_COLUMNS, peak_bytes, use
from analysis.measure.measures import configuration_of
from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns, blocks
from analysis.text import GIB, number


def hardware(analysis: Analysis) -> Table:
    """Floating-point utilisation, energy, GPU-hours and money of every configuration on GPUs."""
    price = analysis.record.price_per_gpu_hour
    found = analysis.configurations
    nothing = pd.DataFrame(columns=list(USE_COLUMNS))
    of_trial = use(analysis.measured, analysis.results.windows, price) if len(found) else nothing
    medians = of_trial.groupby(configuration_of(found).reindex(of_trial.index)).median()
    axes = axis_columns(analysis)
    frame = found[[*(column.name for column in axes), "trial_ids", "n"]].join(medians, how="inner")
    money = "money, in the currency of --price-per-gpu-hour" if price is None else f"GPU-hours at {price:g} each"
    return Table(
        "Hardware use and cost",
        (
            *axes,
            Column("flops_per_s", "TFLOP/s a GPU", "floating-point operations of a step, counted while it ran forward and backward / plain step time / GPUs.", 1e-12, 1, optional=True),
            Column("mfu", "MFU (%)", "model FLOPs utilisation: that / the GPU's dense peak in this precision by its data sheet. None is given for a GPU that is not known.", 1e2, 1, optional=True),
            Column("power_w", "power (W)", _POWER, decimals=0, optional=True),
            Column("wh_per_million_samples", "Wh per million samples", "energy of all GPUs: power x GPU-hours per million samples. Not in it: host, network, cooling.", decimals=1, optional=True),
            Column("gpu_hours_per_million_samples", "GPU-hours per million samples", "GPUs / plain throughput."),
            Column("gpu_hours_per_epoch", "GPU-hours per epoch", "the same for all samples of the data set.", optional=True),
            Column("money_per_million_samples", "price per million samples", f"{money}.", decimals=4, optional=True),
            Column("money_per_epoch", "price per epoch", f"{money}.", optional=True),
            N_COLUMN,
        ),
        frame,
        f"Medians of the repeats. {_peaks(analysis)}{_IMPOSSIBLE if (frame['mfu'].astype(float) > 1).any() else ''}".rstrip(),
        blocks=blocks(axes),
    )  # fmt: skip


_POWER = (
    "mean of a GPU in the plain window, by NVML's energy counter read right before and right after it. In results whose "
    "counters were read only before the warm-up and after the phases window: the mean over that span. Empty where the span "
    f"lasts less than {LEAST_SPAN_S:g} s, for the counter moves every 20 to 100 ms, where its steps would at the plain step "
    f"time take less than {100 * LEAST_SHARE:g} % of it, and where a GPU was not read."
)

_IMPOSSIBLE = (
    " A utilisation above 100 % cannot be: the trial computed in other arithmetic than its precision says (TF32 in fp32, for "
    "one), or its operations were counted wrongly."
)


def _peaks(analysis: Analysis) -> str:
    """The peaks that utilisation is held against, with their source."""
    names = sorted(set(analysis.measured["device_name"].dropna()))
    said = []
    for name in names:
        if peak := PEAKS.get(name):
            rates = {"bf16": peak.bf16, "fp16": peak.fp16, "tf32": peak.tf32, "fp32": peak.fp32}
            listed = ", ".join(f"{number(rate, 1)} {kind}" for kind, rate in rates.items() if rate is not None)
            said.append(
                f"{name} at most: {listed} TFLOP/s dense, memory {peak.memory_tb_per_s:g} TB/s ({peak.source})."
            )
    return " ".join(said)


def memory_balance(analysis: Analysis) -> Table:
    """Peak memory of each GPU, and how evenly it is spread."""
    found = analysis.configurations
    rows = []
    peaks = peak_bytes(analysis.measured, analysis.results.windows)
    for index, trial_ids in found["trial_ids"].items():
        of_repeats = [peaks[trial_id] for trial_id in trial_ids if trial_id in peaks]
        if len({len(each) for each in of_repeats}) != 1 or len(of_repeats[0]) < 2:
            continue
        each = [max(values) for values in zip(*of_repeats, strict=True)]
        rows.append(
            {
                "configuration": index,
                "least_bytes": min(each),
                "most_bytes": max(each),
                "balance": max(each) / min(each) if min(each) else None,
                "first_bytes": each[0],
                "others_bytes": sum(each[1:]) / (len(each) - 1),
                "each": " ".join(number(value / GIB, 2) for value in each),
            }
        )
    axes = axis_columns(analysis)
    names = ["configuration", "least_bytes", "most_bytes", "balance", "first_bytes", "others_bytes", "each"]
    frame = pd.DataFrame(rows, columns=names).join(
        found[[*(column.name for column in axes), "n", "trial_ids"]], on="configuration"
    )
    one, several = study_ranks(analysis)
    return Table(
        f"Balance of memory over {several}",
        (
            *axes,
            Column("first_bytes", "first (GiB)", f"largest memory allocated on {one} 0; 1 GiB = 2³⁰ bytes.", 1 / GIB, 2),
            Column("others_bytes", "others (GiB)", "mean of the others.", 1 / GIB, 2),
            Column("balance", "largest / smallest", "1: every one holds as much.", decimals=2),
            Column("each", "each (GiB)", "in the order of ranks or devices."),
            N_COLUMN,
        ),
        frame,
        "Peak of the plain, phases and issue windows, and of a graph's capture; largest of the repeats.",
        blocks=blocks(axes),
    )  # fmt: skip
