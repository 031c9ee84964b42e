"""Complete tables by batch size and by number of ranks, for studies with round step times."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.figures.batch_size import batch_size as batch_figure
from analysis.predict.inputs import with_models
from analysis.read.results import load
from analysis.report.sections import TABLES
from analysis.study import analyse
from tests.support.frames import FIELDS, environment, grid, record, steps, write_results, write_study, write_trial

GPU = FIELDS | {"device": "cuda", "steps": 4}


def measured_batches(directory: Path, step_s: dict[int, float]) -> Path:
    write_study(directory)
    for batch, seconds in step_s.items():
        fields = GPU | {"batch_per_gpu": batch}
        write_trial(directory, record(fields), steps(fields, seconds))
    return directory


def test_batch_table_and_figure_extend_to_out_of_memory(tmp_path: Path) -> None:
    directory = measured_batches(tmp_path / "results", {64: 0.064, 128: 0.08, 256: 0.15})
    write_trial(directory, record(GPU | {"batch_per_gpu": 512}, "out_of_memory", "rank 0: out of memory"))
    write_trial(directory, record(GPU | {"batch_per_gpu": 1024}, "pruned", "batch 512 ran out of memory before"))
    analysis = with_models(analyse(load(directory)))
    assert TABLES["batch_size"](analysis).cells().to_dict("list") == {
        "batch per GPU": ["64", "128", "256", "512", "1,024"],
        "throughput (samples/s)": ["1,000", "1,600", "1,707", "–", "–"],
        "time per sample (µs)": ["1,000", "625", "586", "–", "–"],
        "of the best (%)": ["58.6", "93.8", "100.0", "–", "–"],
        "peak memory (GiB)": ["1.75 (1\u00a0%)", "2.50 (2\u00a0%)", "4.00 (3\u00a0%)", "–", "–"],
        "outcome": [
            "measured", "measured", "measured: the largest tried that fits", "out of memory",
            "not tried: a smaller batch ran out of memory",
        ],
        "n": ["1", "1", "1", "–", "–"],
    }  # fmt: skip
    figure = batch_figure(analysis)
    assert figure is not None
    (axis,) = figure.axes
    assert np.asarray(axis.collections[-1].get_offsets())[:, 0].tolist() == [512]  # the cross
    assert np.asarray(axis.lines[0].get_ydata()) == pytest.approx([1000, 1600, 256 / 0.15])


def test_without_out_of_memory_no_batch_is_the_largest_that_fits(tmp_path: Path) -> None:
    analysis = with_models(analyse(load(measured_batches(tmp_path / "results", {64: 0.064, 128: 0.08}))))
    assert TABLES["batch_size"](analysis).cells()["outcome"].tolist() == ["measured", "measured"]


def test_single_batch_has_neither_table_nor_figure(tmp_path: Path) -> None:
    analysis = with_models(analyse(load(measured_batches(tmp_path / "results", {64: 0.064}))))
    assert TABLES["batch_size"](analysis).frame.empty
    assert batch_figure(analysis) is None


TIMES = {("none", 1): 0.08, ("ddp", 1): 0.1, ("ddp", 2): 0.125, ("ddp", 4): 0.16}


def strategies(directory: Path, samples: int | None = None, batches: tuple[int, ...] = (100,)) -> Path:
    """Write a study of plain training on one GPU and DDP on 1, 2 and 4."""
    write_study(directory)
    for (parallel, world_size), step_s in TIMES.items():
        for fields in grid(GPU | {"parallel": parallel, "world_size": world_size}, batch_per_gpu=batches):
            trial = record(fields) | {"environment": environment(fields)}
            for rank in trial["environment"]["ranks"] if samples else ():
                rank["dataset_samples"] = samples
            write_trial(directory, trial, steps(fields, step_s * fields["batch_per_gpu"] / 100))
    return directory


def test_speed_up_is_relative_to_both_baselines_on_one_gpu(tmp_path: Path) -> None:
    table = TABLES["speed_up_weak"](with_models(analyse(load(strategies(tmp_path / "results")))))
    assert table.cells().to_dict("list") == {
        "parallel": ["ddp", "ddp"],
        "batch per GPU": ["100", "100"],
        "baseline": ["none", "ddp"],
        "1 GPU (ms)": ["80.0", "100.0"],
        "2 GPUs (ms)": ["125.0", "125.0"],
        "speed-up on 2": ["1.28", "1.60"],
        "4 GPUs (ms)": ["160.0", "160.0"],
        "speed-up on 4": ["2.00", "2.50"],
        "n": ["1", "1"],
    }


def test_efficiency_is_relative_to_plain_training_first(tmp_path: Path) -> None:
    cells = TABLES["weak_scaling"](with_models(analyse(load(strategies(tmp_path / "results"))))).cells()
    assert list(cells.columns)[-3:] == ["efficiency, plain GPU (%)", "efficiency (%)", "n"]
    assert cells["efficiency, plain GPU (%)"].tolist() == ["80.0", "64.0", "50.0"]
    assert cells["efficiency (%)"].tolist() == ["100.0", "80.0", "62.5"]


def test_without_plain_training_there_is_one_efficiency(tmp_path: Path) -> None:
    trials = grid(GPU | {"parallel": "ddp"}, world_size=[1, 2])
    directory = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1 * fields["world_size"]})
    cells = TABLES["weak_scaling"](with_models(analyse(load(directory)))).cells()
    assert [name for name in cells.columns if name.startswith("efficiency")] == ["efficiency (%)"]


def test_times_are_per_epoch_if_the_data_length_is_known(tmp_path: Path) -> None:
    cells = TABLES["speed_up_weak"](
        with_models(analyse(load(strategies(tmp_path / "results", samples=10_000))))
    ).cells()
    assert cells[["1 GPU (s)", "2 GPUs (s)", "4 GPUs (s)"]].to_numpy().tolist() == [
        ["8.00", "6.25", "4.00"],
        ["10.00", "6.25", "4.00"],
    ]


def test_epoch_time_is_shown_with_and_without_loading(tmp_path: Path) -> None:
    analysis = with_models(analyse(load(strategies(tmp_path / "results", samples=10_000))))
    [row] = analysis.configurations.query("parallel == 'none'").to_dict("records")
    waits = row["load_wait_s"] / row["phases_step_s"]
    assert 0 < waits < 1
    cells = TABLES["phases"](analysis).cells()
    [cell] = cells[cells["parallel"] == "none"].to_dict("records")
    assert cell["epoch (s)"] == "8.00"
    assert float(cell["without loading (s)"]) == pytest.approx(8 * (1 - waits), abs=0.01)
    unknown = TABLES["phases"](with_models(analyse(load(strategies(tmp_path / "unknown"))))).cells()
    assert not {"epoch (s)", "without loading (s)"} & set(unknown.columns)


def test_strong_scaling_compares_equal_global_batches(tmp_path: Path) -> None:
    table = TABLES["speed_up_strong"](with_models(analyse(load(strategies(tmp_path / "results", batches=(100, 200))))))
    cells = table.cells()
    # 200 samples: 200 ms on one GPU (none: 160), and 2 x 100 in 125 ms; 400 samples: nothing on one GPU
    assert cells.to_dict("list") == {
        "parallel": ["ddp", "ddp"],
        "global batch": ["200", "200"],
        "baseline": ["none", "ddp"],
        "1 GPU (ms)": ["160", "200"],
        "2 GPUs (ms)": ["125", "125"],
        "speed-up on 2": ["1.28", "1.60"],
        "n": ["1", "1"],
    }


def test_times_in_speed_up_tables_have_three_digits(tmp_path: Path) -> None:
    cells = TABLES["speed_up_weak"](with_models(analyse(load(strategies(tmp_path / "results", samples=1000))))).cells()
    assert cells["1 GPU (s)"].tolist() == ["0.800", "1.000"]
    assert cells["4 GPUs (s)"].tolist() == ["0.400", "0.400"]


def test_speed_up_borrows_a_baseline_with_another_interconnect_or_timing(tmp_path: Path) -> None:
    """One GPU uses no interconnect, and timing settings do not change a step. A trace makes no second series."""
    directory = write_study(tmp_path / "results")
    ways = (("auto", "", 1, 0.1), ("auto", "", 2, 0.125), ("auto", "all", 2, 0.125), ("socket", "all", 2, 0.2))
    for repeat, (interconnect, traced, world_size, step_s) in enumerate(ways):
        how = {"interconnect": interconnect, "profile_ranks": traced, "world_size": world_size, "repeat": repeat}
        write_trial(directory, record(GPU | how), steps(GPU | how, step_s))
    analysis = with_models(analyse(load(directory)))
    table = TABLES["speed_up_weak"](analysis)
    cells = table.cells()[["profile ranks", "interconnect", "1 GPU (ms)", "2 GPUs (ms)", "speed-up on 2"]]
    assert cells.to_numpy().tolist() == [
        ["–", "auto", "100", "125", "1.60"],
        ["all", "socket (emulated)", "100", "200", "1.00"],
    ]
    weak = analysis.scaling[(analysis.scaling["scaling"] == "weak") & (analysis.scaling["world_size"] == 2)]
    assert table.frame["speed_up_2"].tolist() == pytest.approx(weak["speed_up"].tolist())
    assert "borrows" in table.note


def test_speed_up_uses_its_own_baseline_if_there_is_one(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    ways = (("auto", 1, 0.1), ("socket", 1, 0.11), ("auto", 2, 0.125), ("socket", 2, 0.2))
    for repeat, (interconnect, world_size, step_s) in enumerate(ways):
        how = {"interconnect": interconnect, "world_size": world_size, "repeat": repeat}
        write_trial(directory, record(GPU | how), steps(GPU | how, step_s))
    cells = TABLES["speed_up_weak"](with_models(analyse(load(directory)))).cells()
    assert cells["1 GPU (ms)"].tolist() == ["100", "110"]


def test_speed_up_has_an_interval_if_there_are_repeats(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1}

    directory = write_results(tmp_path / "results", grid(GPU, world_size=[1, 2], repeat=range(3)), law)
    row = TABLES["speed_up_weak"](with_models(analyse(load(directory)))).frame.iloc[0]
    assert row["speed_up_2_low"] < row["speed_up_2"] < row["speed_up_2_high"]
    assert (row["n"], len(row["trial_ids"])) == (3, 6)


def test_gradient_accumulation_counts_in_the_global_batch(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1}

    directory = write_results(tmp_path / "results", grid(GPU | {"accumulation_steps": 4}, world_size=[1, 2]), law)
    assert with_models(analyse(load(directory))).configurations["global_batch"].tolist() == [128, 256]


def test_study_without_results_has_none_of_these_tables(tmp_path: Path) -> None:
    empty = with_models(analyse(load(write_study(tmp_path / "results"))))
    for name in ("speed_up_weak", "speed_up_strong", "batch_size", "settings", "precision", "ladder", "bandwidth",
                 "hardware", "memory_balance", "trials"):  # fmt: skip
        table = TABLES[name](empty)
        assert (len(table.frame), table.empty) == (0, ""), name
        assert isinstance(table.cells(), pd.DataFrame)
        assert table.to_csv().endswith("\n")
