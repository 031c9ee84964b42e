"""What the report says about communication: labelled, in words, and absent where nothing was measured."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from analysis.load.results import ResultsError, load
from analysis.predict.inputs import with_models
from analysis.report.report import write_report
from analysis.report.sections import PLOTS, TABLES
from analysis.study import analyse
from analysis.text import number, size, value_label
from analysis.verdict.answer import limits
from analysis.verdict.communication import audit, sentences
from analysis.verdict.trust import trust
from tests.support.frames import MIB, grid, record, trial_id, write_results

GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}
OURS = {"slowdown", "exposed_cost", "communication", "bucket_utilisation", "ceiling", "sweep"}
RANKS = ("GPU", "GPUs")
LATE_RANK = {"last_gradient_s": 0.08, "bucket_bytes": [8 * MIB], "straggler": 1, "late_s": 0.020}


def late(directory: Path, base: dict[str, Any] = GPU, **axes: Any) -> Path:
    """1 and 2 ranks, of which rank 1 is 20 ms late."""

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1 if fields["world_size"] == 1 else 0.125, "account": LATE_RANK}

    return write_results(directory, grid(base, **({"world_size": [1, 2]} | axes)), law, spread=0.0)


def test_the_rank_that_was_late_and_the_slowdown_are_put_into_words(tmp_path: Path) -> None:
    found = with_models(analyse(load(late(tmp_path / "results"))))
    assert sentences(found) == [
        (
            "The largest slowdown: a step takes 25.0\u00a0ms longer on 2 GPUs than on 1 GPU, of which 20.0\u00a0ms exposed wait, "
            "1.1\u00a0ms exposed wire and 0.5\u00a0ms load; 3.4\u00a0ms remain unexplained."
        ),
        "Rank 1 arrived last (2 GPUs): the other waited for it 20.0\u00a0ms at one bucket, and 20.0\u00a0ms a step after the last gradient.",
        (
            "In the mean of the ranks, all-reduces that the backward pass does not hide take 9\u00a0% of a step, 11.1\u00a0ms (2 GPUs); "
            "0\u00a0% of their time is hidden there."
        ),
        "While they transfer, gradient buckets run at 80\u00a0% of the speed that the same ranks reach alone.",
    ]
    assert not any("weak scaling loses most" in line for line in limits(found))  # the account explains it better


def test_a_series_without_an_account_that_loses_most_is_explained_by_its_phases(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        if fields["world_size"] == 1:
            return {"step_s": 0.1}
        return {"step_s": 0.2} if fields["parallel"] == "dp" else {"step_s": 0.125, "account": LATE_RANK}

    trials = grid(GPU, world_size=[1, 2], parallel=["ddp", "dp"])
    found = with_models(analyse(load(write_results(tmp_path / "results", trials, law, spread=0.0))))
    assert sentences(found)[0].startswith("The largest slowdown (ddp)")
    assert limits(found)[-1] == (
        "Where weak scaling loses most (dp), a step takes 100.4 ms longer on 2 GPUs; the phase that grows most is backward, by 60.2 ms."
    )


def test_a_late_rank_that_waits_for_its_batch_is_called_that(tmp_path: Path) -> None:
    results = load(late(tmp_path / "results"))
    slow = (results.steps["window"] == "phases") & (results.steps["rank"] == 1)
    results.steps.loc[slow, "load_wait_s"] += 0.020
    text = " ".join(sentences(with_models(analyse(results))))
    assert (
        "the other waited for it 20.0\u00a0ms at one bucket, and 20.0\u00a0ms a step after the last gradient; it waits 20.0\u00a0ms longer for its batch."
        in text
    )


def test_the_reason_for_the_course_s_larger_number_is_named(tmp_path: Path) -> None:
    cells = TABLES["exposed_cost"](with_models(analyse(load(late(tmp_path / "results"))))).cells()
    (row,) = cells.to_dict("records")
    assert row["live (ms)"] == row["by difference (ms)"] == "11.1"
    assert row["N minus 1 GPU (ms)"] == "25.0"
    assert row["largest reason why they differ"] == "a late rank, +10.0 ms"


def test_an_interconnect_that_is_not_nccl_s_own_choice_is_labelled_emulated_everywhere(tmp_path: Path) -> None:
    directory = late(tmp_path / "results", GPU | {"interconnect": "socket"}, batch_per_gpu=[32, 64])
    table = TABLES["ceiling"](with_models(analyse(load(directory))))
    assert table.cells()["interconnect"].tolist() == ["socket (emulated)"]
    assert value_label("interconnect", "no_p2p", RANKS) == "no_p2p (emulated)"
    page = Path(write_report(directory).path).read_text()
    texts = [
        page,
        *(path.read_text() for path in (directory / "report").rglob("*") if path.suffix in (".md", ".csv", ".tex")),
    ]
    assert re.search(r"socket \(emulated\)", page)
    for written in texts:
        shown = re.sub(r"<pre>.*?</pre>", "", written, flags=re.DOTALL)
        shown = re.sub(
            r"-(\{\})?-interconnect socket", "", unquote(shown)
        )  # commands that run a trial again need the bare name
        assert len(re.findall(r"\bsocket\b", shown)) == len(re.findall(r"\bsocket \(emulated\)", shown))


def test_interconnects_side_by_side_are_told_apart_in_every_table(tmp_path: Path) -> None:
    fast, slow = (grid(GPU | {"interconnect": name}, world_size=[1, 2]) for name in ("auto", "socket"))
    slow = [fields | {"model": "vgg"} for fields in slow]  # so that ids of trials differ
    law = {"step_s": 0.1, "account": {"last_gradient_s": 0.08}}
    analysis = with_models(
        analyse(load(write_results(tmp_path / "results", [*fast, *slow], lambda _: dict(law), spread=0.0)))
    )
    for name in OURS:
        assert set(TABLES[name](analysis).cells()["interconnect"]) == {"auto", "socket (emulated)"}


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("base", [GPU, {}], ids=["gpu", "cpu"])
def test_one_rank_and_old_folders_have_no_section_on_communication(tmp_path: Path, base: dict[str, Any]) -> None:
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


def test_all_sections_are_there_for_ranks_on_cpus_too(tmp_path: Path) -> None:
    directory = late(tmp_path / "results", {"steps": 4})
    page = Path(write_report(directory).path).read_text()
    assert all(f'id="{name}"' in page for name in OURS)
    assert "queueing" not in TABLES["communication"](with_models(analyse(load(directory)))).cells()
    assert {"slowdown.svg", "bus_bandwidth.svg"} <= {path.name for path in (directory / "report/figures").iterdir()}


def test_buckets_are_drawn_at_the_place_where_they_ran(tmp_path: Path) -> None:
    sizes = {32: 8 * MIB, 64: 16 * MIB}
    trials = grid(GPU, world_size=[2], batch_per_gpu=list(sizes))
    results = load(
        write_results(
            tmp_path / "results",
            trials,
            lambda t: {"step_s": 0.1, "account": LATE_RANK | {"bucket_bytes": [sizes[t["batch_per_gpu"]]]}},
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
def test_without_an_account_there_is_no_figure(tmp_path: Path, name: str) -> None:
    directory = late(tmp_path / "results", world_size=[1])
    assert PLOTS[name](with_models(analyse(load(directory)))) is None


def test_trials_whose_instruments_cost_more_than_two_percent_are_listed(tmp_path: Path) -> None:
    costs = {0: 1.019, 1: 1.03}

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        measured = {"last_gradient_s": 0.08, "communication_ratio": costs[fields["repeat"]]}
        return {"step_s": 0.1, "instruments": 1.0, "account": measured}

    trials = grid(GPU, world_size=[2], repeat=range(2))
    found = with_models(analyse(load(write_results(tmp_path / "results", trials, law, spread=0.0))))
    table = TABLES["audit"](found)
    assert table.frame["trial_id"].tolist() == [trial_id(trials[1])]
    assert table.cells()["communication / plain"].tolist() == ["1.030"]
    line = audit(found)
    assert line is not None
    assert line.startswith("In 1 of 2 trials the instruments cost more than 2\u00a0% of a step (at most 3.0\u00a0%")
    assert line in trust(found)


def test_sizes_and_small_negative_numbers_read_well() -> None:
    assert [size(value) for value in (4, 1024, 25.4 * MIB, 2**30)] == [
        "4\u00a0B",
        "1\u00a0KiB",
        "25.4\u00a0MiB",
        "1\u00a0GiB",
    ]
    assert number(-0.0004, 2) == "0.00"


@pytest.mark.parametrize("name", ["buckets", "sweep"])
def test_a_damaged_file_of_the_account_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    directory = late(tmp_path / "results")
    (path,) = directory.rglob(f"{name}.parquet")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ResultsError) as caught:
        load(directory)
    assert str(caught.value).startswith(f"{path}: not readable as Parquet (")
    assert "\n" not in str(caught.value)


def test_traces_are_found_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    directory = late(tmp_path / "results")
    traces = directory / "trials" / record(grid(GPU, world_size=[2])[0])["trial_id"] / "traces"
    traces.mkdir()
    for name in ("rank10.json.gz", "rank2.json.gz", "notes.txt"):
        (traces / name).write_bytes(b"")
    found = load(directory).trials.set_index("world_size")["trace_paths"]
    assert found[2] == (f"{traces}/rank2.json.gz", f"{traces}/rank10.json.gz")
    assert found[1] == ()
