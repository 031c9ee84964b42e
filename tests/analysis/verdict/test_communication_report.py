"""Communication in the report: labels, sentences, and no sections if nothing was measured."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest

from analysis.predict.inputs import with_models
from analysis.read.fields import fields_of
from analysis.read.results import load
from analysis.report.report import write_report
from analysis.report.sections import PLOTS, TABLES
from analysis.study import analyse
from analysis.text import SLOWDOWN_LABELS, RankNouns, field_label, number, size, value_label
from analysis.verdict.answer import limits
from analysis.verdict.communication import audit, sentences
from analysis.verdict.trust import trust
from tests.support.cards import RESULTS
from tests.support.frames import MIB, RECORDED, grid, record, trial_id, write_results
from tests.support.report import show_figures

GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}
OURS = {"slowdown", "exposed_cost", "communication", "bucket_utilisation", "ceiling", "sweep"}
RANKS = RankNouns.of(["cuda"], fields_of({"fields": RECORDED}).labels)
LATE_RANK = {"last_gradient_s": 0.08, "bucket_bytes": [8 * MIB], "straggler": 1, "late_s": 0.020, "tail_s": 0.02}


def late(directory: Path, base: dict[str, Any] = GPU, **axes: Any) -> Path:
    """Write a study of 1 and 2 ranks in which rank 1 is 20 ms late."""

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1 if fields["world_size"] == 1 else 0.125, "communication": LATE_RANK}

    return write_results(directory, grid(base, **({"world_size": [1, 2]} | axes)), law, spread=0.0)


def test_sentences_report_slowdown_late_rank_exposed_time_and_bandwidth(tmp_path: Path) -> None:
    found = with_models(analyse(load(late(tmp_path / "results"))))
    slowdown, late_rank, exposed, utilisation = (line.replace("\u00a0", " ") for line in sentences(found))
    assert "25.0 ms (25 %) longer on 2 GPUs than on 1 GPU" in slowdown
    listed = dict(reversed(part.split(" ms ")) for part in re.findall(r"-?[\d.]+ ms [a-z ]+?(?=,| and|;)", slowdown))
    assert float(listed[SLOWDOWN_LABELS["wait_s"]]) == pytest.approx(20 * 125 / 121.1, abs=0.1), "of a plain step"
    assert float(listed[SLOWDOWN_LABELS["transfer_s"]]) == pytest.approx(1.1 * 125 / 121.1, abs=0.1)
    assert float(listed[SLOWDOWN_LABELS["load_s"]]) == pytest.approx(0.5 + 0.25, abs=0.06), (
        "wait for the batch, and its copy"
    )
    assert slowdown.endswith(" remain unexplained.")
    assert late_rank.startswith("Rank 1 ") and "(2 GPUs)" in late_rank
    assert late_rank.count("20.0 ms") == 1
    assert re.findall(r"[\d.]+ (?:%|ms)", exposed) == ["17 %", "21.1 ms", "0 %"]
    assert re.findall(r"\d+ %", utilisation) == ["80 %"]
    assert not any("grows most" in line for line in limits(found)), "the communication breakdown explains it better"


@pytest.mark.filterwarnings("error")
def test_an_all_reduce_without_duration_has_no_hidden_share(tmp_path: Path) -> None:
    found = with_models(analyse(load(late(tmp_path / "results"))))
    found.communication.exposed.loc[:, ["exposed_s", "communication_s", "hidden_s"]] = 0.0
    [line] = [line for line in sentences(found) if line.startswith("Exposed communication")]
    assert "0 %" in line.replace("\u00a0", " ") and "hides" not in line


def test_slowdown_without_communication_breakdown_is_explained_by_phases(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        if fields["world_size"] == 1:
            return {"step_s": 0.1}
        return {"step_s": 0.2} if fields["parallel"] == "dp" else {"step_s": 0.125, "communication": LATE_RANK}

    trials = grid(GPU, world_size=[1, 2], parallel=["ddp", "dp"])
    found = with_models(analyse(load(write_results(tmp_path / "results", trials, law, spread=0.0))))
    assert sentences(found)[0].startswith("Largest relative slowdown (ddp)")
    loss, phase = limits(found)[-1].split(". ")
    assert "(dp)" in loss and "100.4 ms longer on 2 GPUs" in loss
    assert phase.endswith(" backward, by 60.2 ms.")


def test_late_rank_that_waits_for_its_batch_is_reported(tmp_path: Path) -> None:
    results = load(late(tmp_path / "results"))
    slow = (results.steps["window"] == "phases") & (results.steps["rank"] == 1)
    results.steps.loc[slow, "load_wait_s"] += 0.020
    late_rank = sentences(with_models(analyse(results)))[1]
    assert late_rank.count("20.0\u00a0ms") == 2
    assert late_rank.endswith("; it waits 20.0\u00a0ms longer for its batch.")


def test_largest_reason_for_the_difference_estimate_is_named(tmp_path: Path) -> None:
    cells = TABLES["exposed_cost"](with_models(analyse(load(late(tmp_path / "results"))))).cells()
    (row,) = cells.to_dict("records")
    assert row["live (ms)"] == row["by difference (ms)"] == "21.1"
    assert row["N minus 1 GPU (ms)"] == "25.0"
    assert row["largest reason for the difference"] == "unexplained, +3.2 ms"


def test_forced_interconnects_are_marked_as_emulated_everywhere(tmp_path: Path) -> None:
    directory = late(tmp_path / "results", GPU | {"interconnect": "socket"}, batch_per_gpu=[32, 64])
    table = TABLES["ceiling"](with_models(analyse(load(directory))))
    assert table.cells()["interconnect"].tolist() == ["socket (emulated)"]
    assert value_label("interconnect", "no_p2p", RANKS) == "no_p2p (emulated)"
    assert value_label("batch_per_gpu", 32768, RANKS) == f"batch 32,768 per {RANKS[0]}"
    assert value_label("image_size", 224.0, RANKS) == "image size 224"
    assert value_label("NCCL_P2P_DISABLE", "1", RANKS) == "NCCL_P2P_DISABLE=1"
    assert [value_label("world_size", size, RANKS) for size in (1, 4)] == ["1 GPU", "4 GPUs"]
    assert [value_label("cpus_per_rank", count, RANKS) for count in (1, 2)] == [
        "1 CPU core per rank",
        "2 CPU cores per rank",
    ]
    assert value_label("script", "/home/me/train.py", RANKS) == "train.py"
    assert [field_label(name, RANKS) for name in ("world_size", "batch_per_gpu")] == ["GPUs", "batch per GPU"]
    page = Path(write_report(directory).path).read_text()
    texts = [
        page,
        *(path.read_text() for path in (directory / "report").rglob("*") if path.suffix in (".md", ".csv", ".tex")),
    ]
    assert re.search(r"socket \(emulated\)", page)
    for written in texts:
        shown = re.sub(r"<pre>.*?</pre>", "", written, flags=re.DOTALL)
        # Commands that rerun a trial, and ids of trials, need the bare name.
        shown = re.sub(r"-(\{\})?-interconnect socket|\d-socket\b", "", unquote(shown))
        assert len(re.findall(r"\bsocket\b", shown)) == len(re.findall(r"\bsocket \(emulated\)", shown))


def test_every_table_distinguishes_interconnects(tmp_path: Path) -> None:
    fast, slow = (grid(GPU | {"interconnect": name}, world_size=[1, 2]) for name in ("auto", "socket"))
    slow = [fields | {"model": "vgg"} for fields in slow]  # so that ids of trials differ
    law = {"step_s": 0.1, "communication": {"last_gradient_s": 0.08}}
    analysis = with_models(
        analyse(load(write_results(tmp_path / "results", [*fast, *slow], lambda _: dict(law), spread=0.0)))
    )
    for name in OURS:
        assert set(TABLES[name](analysis).cells()["interconnect"]) == {"auto", "socket (emulated)"}


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("base", [GPU, {}], ids=["gpu", "cpu"])
def test_one_rank_or_no_breakdown_means_no_communication_section(
    tmp_path: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_figures(monkeypatch, OURS)

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1}

    old = write_results(tmp_path / "old", grid(base | {"steps": 4}, world_size=[1, 2]), law)
    alone = late(tmp_path / "one", base | {"steps": 4}, world_size=[1])
    for directory in (old, alone):
        page = Path(write_report(directory).path).read_text()
        written = {path.stem for path in (directory / "report").rglob("*.*")}
        assert not OURS & written
        assert not any(f'id="{name}"' in page for name in OURS)
        assert sentences(with_models(analyse(load(directory)))) == []


def test_cpu_ranks_have_all_communication_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show_figures(monkeypatch, {"slowdown", "bus_bandwidth"})
    directory = late(tmp_path / "results", {"steps": 4})
    page = Path(write_report(directory).path).read_text()
    assert all(f'id="{name}"' in page for name in OURS)
    assert "queueing" not in TABLES["communication"](with_models(analyse(load(directory)))).cells()
    assert {"slowdown.svg", "bus_bandwidth.svg"} <= {path.name for path in (directory / "report/figures").iterdir()}


def test_buckets_are_drawn_in_the_panel_of_their_rank_group(tmp_path: Path) -> None:
    sizes = {32: 8 * MIB, 64: 16 * MIB}
    trials = grid(GPU, world_size=[2], batch_per_gpu=list(sizes))
    results = load(
        write_results(
            tmp_path / "results",
            trials,
            lambda t: {"step_s": 0.1, "communication": LATE_RANK | {"bucket_bytes": [sizes[t["batch_per_gpu"]]]}},
        )
    )
    other = results.trials.index[results.trials["batch_per_gpu"] == 64][0]
    elsewhere = json.dumps(results.trials.at[other, "environment"]).replace("GPU-0-", "GPU-1-")
    results.trials.at[other, "environment"] = json.loads(elsewhere)
    figure = PLOTS["bus_bandwidth"](with_models(analyse(results)))
    assert figure is not None
    crosses = [
        [np.asarray(line.get_xdata()).tolist() for line in axis.lines if line.get_marker() == "x"]
        for axis in figure.axes
    ]
    assert [axis.get_title() for axis in figure.axes] == ["place 1", "place 2"]
    assert crosses == [[[8 * MIB]], [[16 * MIB]]]


@pytest.mark.parametrize("name", ["slowdown", "bus_bandwidth"])
def test_without_communication_breakdown_there_is_no_figure(tmp_path: Path, name: str) -> None:
    directory = late(tmp_path / "results", world_size=[1])
    assert PLOTS[name](with_models(analyse(load(directory)))) is None


def test_trials_with_measurement_overhead_above_two_percent_are_listed(tmp_path: Path) -> None:
    costs = {0: 1.019, 1: 1.03}

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        measured = {"last_gradient_s": 0.08, "communication_ratio": costs[fields["repeat"]]}
        return {"step_s": 0.1, "instruments": 1.0, "communication": measured}

    trials = grid(GPU, world_size=[2], repeat=range(2))
    found = with_models(analyse(load(write_results(tmp_path / "results", trials, law, spread=0.0))))
    table = TABLES["audit"](found)
    assert table.frame["trial_id"].tolist() == [trial_id(trials[1])]
    assert table.cells()["communication / plain"].tolist() == ["1.030"]
    line = audit(found)
    assert line is not None
    assert line.startswith("In 1 of 2 trials")
    assert "2\u00a0%" in line and "3.0\u00a0%" in line
    assert line in trust(found)


def test_sizes_and_rounded_negative_numbers_are_formatted() -> None:
    assert [size(value) for value in (4, 1024, 25.4 * MIB, 2**30)] == [
        "4\u00a0B",
        "1\u00a0KiB",
        "25.4\u00a0MiB",
        "1\u00a0GiB",
    ]
    assert number(-0.0004, 2) == "0.00"


@pytest.mark.parametrize("name", ["buckets", "sweep"])
def test_damaged_communication_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    directory = late(tmp_path / "results")
    (path,) = directory.rglob(f"{name}.parquet")
    path.write_bytes(path.read_bytes()[:100])
    results = load(directory)
    [line] = results.damaged
    assert line.startswith(f"{path}: not readable as Parquet (")
    assert "\n" not in line
    assert path.parent.name not in set(results.trials["trial_id"])


def test_traces_are_ordered_by_rank(tmp_path: Path) -> None:
    directory = late(tmp_path / "results")
    traces = directory / "trials" / record(grid(GPU, world_size=[2])[0])["trial_id"] / "traces"
    traces.mkdir()
    for name in ("rank10.json.gz", "rank2.json.gz", "notes.txt"):
        (traces / name).write_bytes(b"")
    found = load(directory).trials.set_index("world_size")["trace_paths"]
    assert found[2] == (f"{traces}/rank2.json.gz", f"{traces}/rank10.json.gz")
    assert found[1] == ()


def test_a_late_rank_of_own_code_whose_load_wait_is_unknown_has_a_sentence() -> None:
    """Of users' own code, the load wait of the communication window may be unknown."""
    analysis = analyse(load(RESULTS / "doors" / "study"))
    rows = analysis.communication.exposed
    latest = rows[rows["waited_for_rank"].notna()].sort_values("lateness_s").iloc[-1]
    assert pd.isna(latest["late_by_load_s"])
    (text,) = [text for text in sentences(analysis) if "usually arrives last" in text]
    assert "longer for its batch" not in text


def test_a_study_whose_traces_slow_its_steps_has_no_bandwidth_in_training(tmp_path: Path) -> None:
    """As one of a script: the trace shows its buckets, but not how long ranks wait for each other."""
    found = with_models(analyse(load(late(tmp_path / "results"))))
    traffic = dataclasses.replace(found.communication, exposed=found.communication.exposed.iloc[:0])
    assert len(traffic.buckets)
    assert TABLES["bandwidth"](dataclasses.replace(found, communication=traffic)).frame.empty
