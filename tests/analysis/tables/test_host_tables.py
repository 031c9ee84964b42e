"""Tables of launching and computing a step, and of copying its batch, compared with values computed by hand."""

from pathlib import Path
from typing import Any

import pytest

from analysis.compare.bottleneck import issue_ratio
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.verdict.bottleneck import host_bound
from tests.support.frames import FIELDS, cpu_study, grid, record, steps, write_results, write_study, write_trial

GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8, "image_size": 100}
SHARES = (0.0, 0.1, 0.25, 0.05, 0.5, 0.1)


def analysed(directory: Path, trials: list[dict[str, Any]], **law: Any) -> ReportInputs:
    """Analyse trials of 100 ms per step, without noise and measurement overhead."""
    laws = {"step_s": 0.1, "shares": SHARES, "instruments": 1.0} | law
    return with_models(analyse(load(write_results(directory, trials, lambda fields: dict(laws), spread=0.0))))


@pytest.fixture
def bound(tmp_path: Path) -> ReportInputs:
    """One GPU whose host needs 96 ms to launch 36 ms of kernels."""
    return analysed(tmp_path / "results", grid(GPU), launch_ratio=0.96, previous_done=1.0, busy_ratio=0.4)


def test_launch_and_kernel_times_share_a_cell(bound: ReportInputs) -> None:
    assert TABLES["host"](bound).cells().iloc[0].to_dict() == {
        "GPUs": "1",
        "forward (ms)": "36.48 / 10.00",
        "loss (ms)": "1.92 / 2.00",
        "backward (ms)": "38.40 / 20.00",
        "optimizer (ms)": "19.20 / 4.00",
        "all (ms)": "96.00 / 36.00",
        "launch / kernels": "2.67",
        "step (ms)": "100.00",
        "GPU busy (%)": "46",
        "GPU idle (%)": "100",
        "host-bound": "yes",
        "n": "1",
    }


def test_csv_contains_both_numbers_of_a_pair(bound: ReportInputs) -> None:
    assert "If kernel times were not measured" not in TABLES["host"](bound).to_markdown()
    heads, values = (line.split(",") for line in TABLES["host"](bound).to_csv().splitlines())
    row = dict(zip(heads, values, strict=False))
    assert (float(row["forward_launch_s"]), float(row["forward_busy_s"])) == pytest.approx((0.03648, 0.01))


def test_host_bound_sentence_states_the_ratio_and_a_suggestion(bound: ReportInputs) -> None:
    text = host_bound(bound)
    assert text is not None
    facts = ("1 of 1 configurations", "1 GPU: it needs 96.0 ms", "2.7 times the 36.0 ms", "46\u00a0%")
    assert [fact for fact in facts if fact not in text] == []
    assert "a larger batch, compilation or CUDA graphs" in text


def test_host_that_runs_ahead_is_not_host_bound(tmp_path: Path) -> None:
    found = analysed(tmp_path / "results", grid(GPU), launch_ratio=0.3, previous_done=0.0)
    assert host_bound(found) is None
    assert issue_ratio(found.configurations).tolist() == pytest.approx([0.03 / (0.9 * 0.095)])
    assert TABLES["host"](found).cells().iloc[0]["host-bound"] == "no"


def test_results_older_than_the_busy_window_still_show_what_issuing_takes(tmp_path: Path) -> None:
    fields = FIELDS | GPU
    directory = write_study(tmp_path / "results")
    old = steps(fields, 0.1, SHARES, launch_ratio=0.96, previous_done=1.0)
    old = old[~old["window"].isin(["busy", "transfer_synced"])]
    write_trial(directory, record(fields), old.drop(columns=["loss_s", "loss_launch_s"]))
    found = with_models(analyse(load(directory)))
    cells = TABLES["host"](found).cells().iloc[0]
    assert (cells["forward (ms)"], cells["all (ms)"]) == ("36.48 / –", "96.00 / –")
    assert "loss (ms)" not in cells, "a workload's step may contain its loss"
    # Without kernel times another rule decides, which the note explains.
    assert "If kernel times were not measured" in TABLES["host"](found).to_markdown()
    assert "GPU busy (%)" not in cells
    text = host_bound(found)
    assert text is not None
    assert "96.0 ms to launch a step of 100.0 ms." in text
    assert TABLES["transfer"](found).cells().iloc[0]["step (ms)"] == "100.40 / –"


def test_batch_copied_ahead_has_no_copy_in_its_step(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for fields in grid(GPU, copy_ahead=[False, True]):
        frame = steps(fields, 0.1, SHARES, instruments=1.0)
        if fields["copy_ahead"]:
            frame.loc[frame["host_to_device_bytes"].notna(), "host_to_device_bytes"] = 0
        write_trial(directory, record(fields) | {"trial_id": f"ahead-{fields['copy_ahead']}"}, frame)
    cells = TABLES["transfer"](with_models(analyse(load(directory)))).cells()
    assert cells[["copy ahead", "batch (MB)", "copy (GB/s)"]].to_numpy().tolist() == [
        ["no", "1.28", "0.1"],
        ["yes", "0.00", "–"],
    ]


def test_cpu_ranks_have_no_gpu_tables(tmp_path: Path) -> None:
    found = with_models(analyse(load(cpu_study(tmp_path / "results"))))
    for name in ("host", "transfer", "gpus"):
        table = TABLES[name](found)
        assert table.frame.empty
        assert table.empty == ""


def test_data_on_the_device_has_no_copy(tmp_path: Path) -> None:
    found = analysed(tmp_path / "results", grid(GPU | {"dataset": "synthetic"}))
    assert TABLES["transfer"](found).frame.empty
    assert len(TABLES["host"](found).frame) == 1


def test_copies_with_and_without_waiting_share_a_cell(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for fields in grid(GPU, pin_memory=[True, False], non_blocking=[True, False]):
        hides = fields["pin_memory"] and fields["non_blocking"]
        frame = steps(fields, 0.1, SHARES, instruments=1.0, synced_ratio=1.1 if hides else 1.0)
        if not hides:
            frame.loc[frame["window"] == "phases", "host_transfer_s"] = 0.01
        write_trial(directory, record(fields) | {"trial_id": f"{fields['pin_memory']}-{fields['non_blocking']}"}, frame)
    table = TABLES["transfer"](with_models(analyse(load(directory))))
    cells = table.cells()
    assert cells[
        ["pin memory", "non blocking", "host in the call (ms)", "cost of waiting (ms)"]
    ].to_numpy().tolist() == [
        ["no", "no", "10.00 / 10.00", "0.00"],
        ["no", "yes", "10.00 / 10.00", "0.00"],
        ["yes", "no", "10.00 / 10.00", "0.00"],
        ["yes", "yes", "0.02 / 10.00", "10.00"],
    ]
    assert cells.iloc[3].to_dict() == {
        "GPUs": "1",
        "pin memory": "yes",
        "non blocking": "yes",
        "copy ahead": "no",
        "batch (MB)": "1.28",
        "copy (GB/s)": "0.1",
        "host in the call (ms)": "0.02 / 10.00",
        "copy (ms)": "10.00 / 10.00",
        "forward (ms)": "25.00 / 35.00",
        "step (ms)": "100.00 / 110.00",
        "cost of waiting (ms)": "10.00",
        "n": "1",
    }
