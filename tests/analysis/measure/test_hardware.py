"""Hardware use: utilisation, energy, GPU-hours and cost, computed by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.measure.hardware import PEAKS, use
from analysis.measure.measures import summaries
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.verdict.card import card_of
from tests.support.frames import FIELDS, environment, grid, record, steps, write_study, write_trial

GPU = FIELDS | {"device": "cuda", "precision": "bf16", "batch_per_gpu": 100, "steps": 40, "warmup_steps": 4}
STEP_S = 0.05
PLAIN_S = 40 * STEP_S
SPAN_S = 1.05 * PLAIN_S


def with_evidence(fields: dict[str, Any], gpu: str = "NVIDIA H200", **rank_fields: Any) -> dict[str, Any]:
    """Return an environment whose ranks counted 2 TFLOP per step and whose GPUs drew 500 W in the plain window."""
    found = environment(fields, gpu)
    for number, rank in enumerate(found["ranks"]):
        rank |= {"step_flops": 2e12} | rank_fields
        rank["plain_window"] = readings(1_000.0 * number, 500.0, SPAN_S)
    return found


def readings(energy_j: float, power_w: float, span_s: float) -> dict[str, Any]:
    """Return the readings of a GPU energy counter before and after a span at constant power."""
    after = {"energy_j": energy_j + power_w * span_s, "at": 100.0 + span_s}
    return {"before": [{"energy_j": energy_j, "at": 100.0}], "after": [after]}


def study(
    directory: Path,
    trials: list[dict[str, Any]],
    gpu: str = "NVIDIA H200",
    price: float | None = None,
    **rank_fields: Any,
) -> Path:
    configuration = {"repeats": 1} | ({} if price is None else {"price-per-gpu-hour": price})
    write_study(directory, configuration=configuration)
    for fields in trials:
        trial = record(fields) | {"environment": with_evidence(fields, gpu, **rank_fields)}
        write_trial(directory, trial, steps(fields, STEP_S, instruments=1.0))
    return directory


def analysis_of(*arguments: Any, **options: Any) -> ReportInputs:
    return with_models(analyse(load(study(*arguments, **options))))


def test_peaks_are_the_dense_rates_of_the_data_sheets() -> None:
    h200 = PEAKS["NVIDIA H200"]
    assert h200.flops_per_s("bf16") == h200.flops_per_s("fp16_pure") == 1979e12 / 2
    assert h200.flops_per_s("tf32") == 989e12 / 2
    assert h200.flops_per_s("fp8") == 3958e12 / 2
    assert PEAKS["NVIDIA A100-SXM4-40GB"].flops_per_s("fp8") is None
    assert h200.flops_per_s("fp32") == 67e12
    assert h200.memory_bytes_per_s == 4.8e12
    assert PEAKS["Tesla V100-SXM2-16GB"].flops_per_s("bf16") is None  # it does not support bf16
    assert h200.flops_per_s("int4") is None
    assert all(
        peak.source.startswith("NVIDIA ") and "https://www.nvidia.com/" in peak.source for peak in PEAKS.values()
    )


@pytest.mark.parametrize("name", PEAKS)
def test_narrower_arithmetic_is_never_slower(name: str) -> None:
    peak = PEAKS[name]
    known = [rate for rate in (peak.fp32, peak.tf32, peak.bf16 or peak.fp16, peak.fp8) if rate is not None]
    assert known == sorted(known)


def test_utilisation_energy_hours_and_cost_match_hand_computed_values(tmp_path: Path) -> None:
    found = analysis_of(tmp_path / "results", grid(GPU, world_size=[1, 2]), price=3.0, dataset_samples=50_000)
    frame = TABLES["hardware"](found).frame.set_index("world_size")
    assert frame.loc[1, "flops_per_s"] == pytest.approx(2e12 / 0.05)
    assert frame.loc[2, "flops_per_s"] == pytest.approx(2e12 / 0.05)  # of each GPU
    assert frame.loc[1, "mfu"] == pytest.approx(40e12 / 989.5e12)
    assert frame.loc[2, "power_w"] == pytest.approx(500.0)
    hours = 1e6 / 2_000 / 3600  # 100 samples in 50 ms
    joules_a_sample = 500.0 * PLAIN_S / (40 * 100)
    assert frame["wh_per_million_samples"].tolist() == pytest.approx([1e6 * joules_a_sample / 3600] * 2)
    assert frame["gpu_hours_per_million_samples"].tolist() == pytest.approx([hours, hours])
    assert frame["gpu_hours_per_epoch"].tolist() == pytest.approx([hours / 20, hours / 20])
    assert frame["money_per_million_samples"].tolist() == pytest.approx([3 * hours, 3 * hours])
    assert frame["money_per_epoch"].tolist() == pytest.approx([3 * hours / 20, 3 * hours / 20])


def test_fp8_is_compared_with_the_fp8_peak_and_limit(tmp_path: Path) -> None:
    limits = {"bf16": 700e12, "fp8": 1_000e12}
    found = analysis_of(tmp_path / "results", grid(GPU, precision=["bf16", "fp8"]), matmul_flops_per_s=limits)
    table = TABLES["hardware"](found)
    frame = table.frame.set_index("precision")
    assert frame.loc["fp8", "mfu"] == pytest.approx(40e12 / 1979e12)
    assert frame.loc["fp8", "share_of_matmul"] == pytest.approx(40e12 / 1_000e12)
    assert frame.loc["bf16", "mfu"] == pytest.approx(40e12 / 989.5e12)
    assert "fp8 peak" in table.note


def test_the_table_has_formatted_cells(tmp_path: Path) -> None:
    found = analysis_of(tmp_path / "results", grid(GPU, world_size=[2]), price=3.0)
    table = TABLES["hardware"](found)
    assert table.cells().to_dict("list") == {
        "GPUs": ["2"],
        "TFLOP/s per GPU": ["40.0"],
        "MFU (%)": ["4.0"],
        "power (W)": ["500"],
        "Wh per million samples": ["69.4"],
        "GPU-hours per million samples": ["0.139"],
        "cost per million samples": ["0.4167"],
        "n": ["1"],
    }
    assert "Peak of NVIDIA H200: 989.5 bf16" in table.note
    assert dict(table.definitions())["cost per million samples"] == "at 3 per GPU-hour."


def test_the_share_of_the_matmul_limit_is_that_of_the_trials_number_format(tmp_path: Path) -> None:
    limits = {"bf16": 80e12, "fp8": 150e12}
    found = analysis_of(tmp_path / "results", grid(GPU, world_size=[1, 2]), matmul_flops_per_s=limits)
    table = TABLES["hardware"](found)
    assert table.frame["share_of_matmul"].tolist() == pytest.approx([40 / 80] * 2)
    assert table.cells()["of matmul limit (%)"].tolist() == ["50.0"] * 2
    line = next(line for line in card_of(found).lines if line.key == "bound_by")
    shares = {quantity.name: quantity.value for quantity in line.quantities}
    assert shares["share_of_matmul"] == pytest.approx(0.5)


def test_the_masked_half_of_attention_is_shown_next_to_utilisation(tmp_path: Path) -> None:
    found = analysis_of(tmp_path / "results", grid(GPU, world_size=[2]), causal_attention_flops=0.5e12)
    frame = TABLES["hardware"](found).frame
    assert frame["attention_share"].tolist() == pytest.approx([0.25])
    assert frame["hfu"].isna().all()
    assert frame["mfu_unmasked"].tolist() == pytest.approx([35e12 / 989.5e12])


def test_repeated_operations_count_as_use_of_the_hardware_only(tmp_path: Path) -> None:
    frame = TABLES["hardware"](analysis_of(tmp_path / "results", [GPU], recomputed_flops=0.5e12)).frame
    assert frame["mfu"].tolist() == pytest.approx([40e12 / 989.5e12])
    assert frame["hfu"].tolist() == pytest.approx([50e12 / 989.5e12])


@pytest.mark.parametrize("limits", [{"fp16": 80e12}, None])
def test_without_a_limit_in_its_number_format_a_trial_has_no_share_of_it(tmp_path: Path, limits: Any) -> None:
    found = analysis_of(tmp_path / "results", [GPU], matmul_flops_per_s=limits)
    assert "of matmul limit (%)" not in TABLES["hardware"](found).cells()


@pytest.mark.parametrize("gpu", ["NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090"])
def test_an_unknown_device_has_flops_but_no_utilisation(tmp_path: Path, gpu: str) -> None:
    found = analysis_of(tmp_path / "results", [GPU], gpu)
    cells = TABLES["hardware"](found).cells()
    assert cells["TFLOP/s per GPU"].tolist() == ["40.0"]
    assert "MFU (%)" not in cells


def test_an_impossible_utilisation_is_flagged(tmp_path: Path) -> None:
    possible = TABLES["hardware"](analysis_of(tmp_path / "possible", [GPU]))
    impossible = TABLES["hardware"](analysis_of(tmp_path / "impossible", [GPU], step_flops=60e12))
    assert impossible.cells()["MFU (%)"].tolist() == ["121.3"]
    assert "above 100 % is impossible" in impossible.note
    assert "impossible" not in possible.note


def test_without_a_price_there_is_no_money(tmp_path: Path) -> None:
    cells = TABLES["hardware"](analysis_of(tmp_path / "results", [GPU])).cells()
    assert not cells.columns.str.startswith("cost").any()


def test_the_sum_is_unknown_if_one_rank_has_no_count(tmp_path: Path) -> None:
    results = load(study(tmp_path / "results", [GPU | {"world_size": 2}]))
    measured = summaries(results.trials, results.windows)
    measured["environment"].iloc[0]["ranks"][1]["step_flops"] = None
    assert use(measured, results.windows)["mfu"].isna().all()


@pytest.mark.parametrize("after_j", [None, 5.0])
def test_a_missing_or_reset_energy_counter_gives_no_energy(tmp_path: Path, after_j: float | None) -> None:
    results = load(study(tmp_path / "results", [GPU | {"world_size": 2}]))
    measured = summaries(results.trials, results.windows)
    measured["environment"].iloc[0]["ranks"][1]["plain_window"]["after"][0]["energy_j"] = after_j
    found = use(measured, results.windows).iloc[0]
    assert found[["power_w", "wh_per_million_samples"]].isna().all()
    assert found["flops_per_s"] > 0


@pytest.mark.parametrize(
    ("steps_run", "span_s", "power_w"),
    [
        (20, 1.0, 500.0),
        (20, 1.1, 500.0),
        (18, 0.95, None),  # too short for a counter that moves every 100 ms
        (40, 2.3, None),  # the window fills less than 90 % of it
    ],
)
def test_energy_requires_a_span_filled_by_the_plain_window(
    tmp_path: Path, steps_run: int, span_s: float, power_w: float | None
) -> None:
    found = power_of(tmp_path, GPU | {"steps": steps_run}, plain_window=readings(7.0, 500.0, span_s))
    assert found == (None if power_w is None else pytest.approx(power_w))


@pytest.mark.parametrize(("span_s", "power_w"), [(4.6, 400.0), (4.7, None), (53.0, None)])
def test_a_span_that_states_its_steps_requires_them_to_fill_it(
    tmp_path: Path, span_s: float, power_w: float | None
) -> None:
    read = readings(7.0, 400.0, span_s) | {"steps": 84}  # of 50 ms
    found = power_of(tmp_path, GPU, plain_window=read)
    assert found == (None if power_w is None else pytest.approx(power_w))


def test_one_rank_with_several_gpus_has_the_energy_of_all_or_none(tmp_path: Path) -> None:
    fields = GPU | {"world_size": 2, "parallel": "dp"}
    first, second = (readings(7.0, watts, SPAN_S) for watts in (500.0, 300.0))
    both = {when: first[when] + second[when] for when in ("before", "after")}
    assert power_of(tmp_path / "all", fields, plain_window=both) == pytest.approx(400.0)
    assert power_of(tmp_path / "first", fields, plain_window=first) is None


def power_of(directory: Path, fields: dict[str, Any], **rank_fields: Any) -> float | None:
    """Return the power of a trial whose only recorded rank has these values.

    Without power there is no energy, but FLOP/s remain.
    """
    results = load(study(directory, [fields]))
    measured = summaries(results.trials, results.windows)
    ranks = measured["environment"].iloc[0]["ranks"]
    ranks[0] |= rank_fields
    del ranks[1:]
    found = use(measured, results.windows).iloc[0]
    assert found["flops_per_s"] > 0
    assert np.isnan(found["wh_per_million_samples"]) == np.isnan(found["power_w"])
    return None if np.isnan(found["power_w"]) else float(found["power_w"])


def test_cpu_ranks_have_no_hardware_table(tmp_path: Path) -> None:
    write_trial(write_study(tmp_path / "results"), record(FIELDS), steps(FIELDS, 0.1))
    table = TABLES["hardware"](with_models(analyse(load(tmp_path / "results"))))
    assert (len(table.frame), table.empty) == (0, "")


def test_memory_balance_covers_ranks_and_the_devices_of_one_rank(tmp_path: Path) -> None:
    ddp, dp = (GPU | {"world_size": 2, "parallel": name} for name in ("ddp", "dp"))
    directory = study(tmp_path / "results", [ddp])
    rank_steps = steps(dp, STEP_S)
    trial = record(dp) | {"environment": with_evidence(dp)}
    trial["environment"]["ranks"] = [
        trial["environment"]["ranks"][0] | {"peak_memory_by_device_bytes": [3 * 2**30, 2**30]}
    ]
    write_trial(directory, trial, rank_steps[rank_steps["rank"] == 0])
    cells = TABLES["memory_balance"](with_models(analyse(load(directory)))).cells()
    assert cells.to_dict("list") == {
        "parallel": ["ddp", "dp"],
        "GPUs": ["2", "2"],
        "first (GiB)": ["2.17", "3.00"],
        "others (GiB)": ["2.17", "1.00"],
        "largest / smallest": ["1.00", "3.00"],
        "all (GiB)": ["2.17 2.17", "3.00 1.00"],
        "n": ["1", "1"],
    }
