"""Results folders that somebody forged or damaged: the trial is left out with one line, and the others are reported."""

import gzip
import importlib
import json
import os
import pkgutil
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import analysis
from analysis.measure.measures import MEASURES
from analysis.measure.trace import TraceError, read_kernels
from analysis.read.results import OUTCOME_COLUMNS, ResultsError, load, load_reduced
from analysis.read.validate import json_file
from analysis.read.validate.records import is_reserved
from analysis.report.report import write_report
from scripts.claims.sources import committed_results
from study.scaling import main
from study.store.packing import pack
from tests.support.frames import FIELDS, RECORDED, communication, record, steps, trial_id, write_study, write_trial
from trainables.fields import TrialFields
from trainables.registry import AHEAD_BATCHES

ONE = FIELDS | {"steps": 12, "world_size": 2, "communication_steps": 2}
OTHER = ONE | {"repeat": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of two done trials on two ranks, with a communication breakdown."""
    directory = write_study(tmp_path / "results")
    for fields in (ONE, OTHER):
        more, buckets, sweep = communication(fields, last_gradient_s=0.05)
        write_trial(directory, record(fields), pd.concat([steps(fields, 0.1), more], ignore_index=True), buckets, sweep)
    return directory


def path_of(folder: Path, name: str) -> Path:
    return folder / "trials" / trial_id(ONE) / name


def damaged(folder: Path) -> str:
    """Return the line about the damaged trial. Both readers leave it out of every frame, and keep the other."""
    results, reduced = load(folder), load_reduced(folder)
    assert results.damaged == reduced.damaged
    for frame in (results.trials, results.steps, results.buckets, results.sweep, reduced.trials, reduced.windows):
        assert set(frame["trial_id"]) == {trial_id(OTHER)}
    [line] = results.damaged
    assert "\n" not in line
    assert line.startswith(f"{folder}/")
    return line


def change(content: Any, name: str, value: Any) -> None:
    """Set an entry of nested JSON: `environment.ranks.0.before`."""
    *parents, last = [int(part) if part.isdigit() else part for part in name.split(".")]
    for parent in parents:
        content = content[parent]
    content[last] = value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trial.batch_per_gpu", 2**62),
        ("trial.batch_per_gpu", 10**30),
        ("trial.batch_per_gpu", True),
        ("trial.accumulation_steps", -1),
        ("trial.accumulation_steps", 0),
        ("trial.learning_rate", float("inf")),
        ("trial.model", 3),
        ("trial.model", {"name": "mlp"}),
        ("trial.model", "x" * 10_000),
        ("trial.nodes", 3),
        ("trial.pin_memory", "yes"),
        ("trial.world_size", 1),
        ("trial.step_s", 0.1),
        ("trial.bindings", "'"),
        ("trial.function_config", "[1"),
        ("trial_id", "../x"),
        ("status", "finished"),
        ("started_at", -1.0),
        ("environment.nodes", {"node_id": "a"}),
        ("environment.nodes.0.cpu_count", "16"),
        ("environment.nodes.0.gpus", [1]),
        ("environment.ranks", []),
        ("environment.ranks.0", None),
        ("environment.ranks.0.before", [1]),
        ("environment.ranks.0.before.load_average_1min", {"a": 1}),
        ("environment.ranks.0.affinity", 3),
        ("environment.ranks.0.step_flops", -5.0),
        ("environment.versions", ["torch"]),
        ("environment.git", "0123"),
        ("environment.variables", {f"NCCL_{number}": "" for number in range(10_001)}),
        ("environment.nodes", [{}] * 70_000),
        ("trial", ONE | {f"field_{number}": 1 for number in range(1_001)}),
    ],
)
def test_a_record_with_a_wrong_value_is_left_out(folder: Path, name: str, value: Any) -> None:
    path = path_of(folder, "trial.json")
    content = json.loads(path.read_text())
    change(content, name, value)
    path.write_text(json.dumps(content))
    assert damaged(folder).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a": ' * 100 + "1" + "}" * 100,
        '{"schema_version": 3, "a": ' + "9" * 5_000 + "}",
        '{"schema_version": 3',
        "\udcff",
        "null",
    ],
    ids=["deep", "deeper than any record", "digits", "truncated", "undecodable", "null"],
)
def test_a_record_that_is_no_mapping_of_plain_values_is_left_out(folder: Path, text: str) -> None:
    path = path_of(folder, "trial.json")
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert damaged(folder).startswith(f"{path}: ")


def test_a_record_that_is_too_large_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(folder, "trial.json")
    content = json.loads(path.read_text())
    assert json_file.MAX_BYTES == 16 * 2**20
    monkeypatch.setattr(json_file, "MAX_BYTES", 100_000)
    path.write_text(json.dumps(content | {"environment": content["environment"] | {"x": "a" * 100_000}}))
    assert "larger than" in damaged(folder)


def test_a_record_of_too_many_values_is_not_read(folder: Path) -> None:
    """Three megabytes of empty mappings would take a gigabyte and many seconds."""
    path = path_of(folder, "trial.json")
    content = json.loads(path.read_text())
    text = json.dumps(content | {"environment": content["environment"] | {"x": []}})
    path.write_text(text.replace('"x": []', f'"x": [{"{}," * 1_000_000}{{}}]'))
    tracemalloc.start()
    line = damaged(folder)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert "more than 1000000 values" in line


def test_numbers_that_are_not_finite_are_unknown_in_an_environment(folder: Path) -> None:
    path = path_of(folder, "trial.json")
    path.write_text(path.read_text().replace('"load_average_1min": 3.5', '"load_average_1min": 1e999'))
    results = load(folder)
    assert results.damaged == ()
    assert results.trials["environment"].iloc[0]["ranks"][0]["before"]["load_average_1min"] is None


def test_texts_are_printable(folder: Path) -> None:
    path = path_of(folder, "trial.json")
    content = json.loads(path.read_text())
    content["environment"]["nodes"][0]["cpu_model"] = "a\x1b[2J\udcff\nb\x9b"
    path.write_text(json.dumps(content))
    assert load(folder).trials.set_index("trial_id").loc[trial_id(ONE), "device_name"] == "a[2J\\udcff b"


def rows_three_times(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([frame, frame, frame])


def set_to(column: str, value: Any, window: str = "plain") -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return a function that sets a column in the rows of a window."""
    return lambda frame: frame.assign(**{column: frame[column].mask(frame["window"] == window, value)})


def with_more_plain_steps(frame: pd.DataFrame) -> pd.DataFrame:
    plain = frame[frame["window"] == "plain"]
    return pd.concat([frame, *(plain.assign(step=plain["step"] + 1000 * i) for i in range(1, 9))])


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (rows_three_times, "two rows have the same rank, window, step"),
        (lambda frame: frame[frame["rank"] == 0], "a rank has no steps"),
        (lambda frame: frame[(frame["rank"] == 0) | (frame["window"] != "plain")], "a rank has no plain window"),
        (lambda frame: pd.concat([frame, frame[frame["rank"] == 1].assign(rank=2)]), "rank that the trial does not"),
        (lambda frame: frame.iloc[:0], "has no rows"),
        (lambda frame: frame[frame["window"] != "plain"], "has no plain window"),
        (lambda frame: frame.assign(window=None), "window is null"),
        (lambda frame: frame.assign(window="secret"), "unknown window"),
        (lambda frame: frame.assign(window=list(range(len(frame)))), "not readable"),
        (lambda frame: frame.assign(window="x" * 5000), "text of more than"),
        (lambda frame: frame.assign(step=pd.Series(2**40, index=frame.index)), "not readable"),
        (lambda frame: frame.assign(samples=[{"a": 1}] * len(frame)), "not readable"),
        (lambda frame: frame.assign(step_s="slow"), "not readable"),
        (lambda frame: frame.iloc[[*range(0, 10), *range(11, len(frame))]], "steps"),
        (with_more_plain_steps, "more steps than planned"),
        (set_to("window_s", 0.0), "window_s is not positive"),
        (set_to("window_s", -1.0), "window_s is not positive"),
        (set_to("window_s", 1e-300), "window_s is shorter than a femtosecond"),
        (set_to("window_s", np.inf), "window_s is not finite"),
        (set_to("samples", 0), "no sample was processed"),
        (set_to("step_s", np.inf, "phases"), "step_s is not finite"),
        (set_to("backward_s", 1e300, "phases"), "backward_s is too large"),
        (lambda frame: frame.assign(window_s=frame["window_s"] + frame["step"]), "differs within a window"),
        (lambda frame: frame.assign(peak_memory_bytes=-5), "peak_memory_bytes is negative"),
    ],
)  # fmt: skip
def test_steps_that_do_not_fit_their_trial_are_left_out(
    folder: Path, forge: Callable[[pd.DataFrame], pd.DataFrame], reason: str
) -> None:
    path = path_of(folder, "steps.parquet")
    forge(pd.read_parquet(path)).to_parquet(path)
    line = damaged(folder)
    assert line.startswith(f"{path}: ")
    assert reason in line


@pytest.mark.parametrize(
    ("name", "column", "value", "reason"),
    [
        ("buckets", "bytes", -5, "bytes is negative"),
        ("buckets", "end_s", np.inf, "end_s is not finite"),
        ("buckets", "bucket", 0, "two rows have the same"),
        ("sweep", "seconds", 0.0, "seconds is not positive"),
        ("sweep", "rank", -1, "rank is negative"),
        ("sweep", "bytes", 0, "bytes is not positive"),
        ("sweep", "seconds", None, "seconds is null"),
        ("buckets", "ready_s", None, "ready_s is null"),
    ],
)
def test_other_tables_are_checked_too(folder: Path, name: str, column: str, value: Any, reason: str) -> None:
    path = path_of(folder, f"{name}.parquet")
    pd.read_parquet(path).assign(**{column: value}).to_parquet(path)
    assert reason in damaged(folder)


def test_rows_in_another_order_give_the_same_report(folder: Path) -> None:
    before = load_reduced(folder)
    path = path_of(folder, "steps.parquet")
    pd.read_parquet(path).sample(frac=1, random_state=0).to_parquet(path)
    after = load_reduced(folder)
    assert after.damaged == ()
    keys = ["trial_id", "rank", "window"]
    pd.testing.assert_frame_equal(
        after.windows.sort_values(keys, ignore_index=True), before.windows.sort_values(keys, ignore_index=True)
    )
    pd.testing.assert_frame_equal(after.shapes, before.shapes)


def test_losses_that_are_not_finite_are_unknown(folder: Path) -> None:
    path = path_of(folder, "steps.parquet")
    pd.read_parquet(path).assign(loss=np.inf).to_parquet(path)
    results = load_reduced(folder)
    assert results.damaged == ()
    losses = results.losses.loc[results.losses["trial_id"] == trial_id(ONE), "loss"]
    assert len(losses) and losses.isna().all()


def test_a_table_that_declares_too_many_rows_is_not_read(folder: Path) -> None:
    """A few kilobytes of compressed nulls can claim memory without bound.

    Its rows take several times `most_bytes`, which is more than what other code of this process allocates meanwhile.
    """
    path = path_of(folder, "steps.parquet")
    count, most_bytes = 20_000_000, 100e6
    zeros = np.zeros(count, np.int32)
    window = pa.DictionaryArray.from_arrays(zeros, ["plain"])
    bomb = pa.table({"rank": zeros, "step": np.arange(count, dtype=np.int32), "window": window})
    bomb = bomb.append_column("samples", pa.nulls(count, pa.int32())).append_column("window_s", pa.nulls(count))
    pq.write_table(bomb, path, compression="zstd")
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    line = damaged(folder)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < most_bytes
    assert pa.total_allocated_bytes() - before < most_bytes
    assert line.startswith(f"{path}: declares {count} rows; this trial has at most ")


def test_a_long_text_is_in_memory_only_once(folder: Path) -> None:
    path = path_of(folder, "steps.parquet")
    frame = pd.read_parquet(path)
    pq.write_table(pa.Table.from_pandas(frame.assign(window="x" * 100_000)), path, compression="zstd")
    assert "text of more than" in damaged(folder)


def test_a_copied_trial_is_left_out_though_it_bears_a_name_of_its_own(folder: Path) -> None:
    """A copy would count as one more repeat and narrow the intervals."""
    copy = folder / "trials" / "copy"
    shutil.copytree(path_of(folder, "").parent / trial_id(ONE), copy)
    content = json.loads((copy / "trial.json").read_text())
    (copy / "trial.json").write_text(json.dumps(content | {"trial_id": "copy"}))
    results = load(folder)
    assert len(results.trials) == 2
    [line] = results.damaged
    assert "has the same fields as " in line and "so one is a copy" in line


def test_a_loop_of_links_and_undecodable_names_are_passed_over(folder: Path) -> None:
    (folder / "trials" / "loop").symlink_to(folder / "trials")
    for link in (folder / "trials" / "itself", path_of(folder, "itself"), path_of(folder, "traces")):
        link.symlink_to(link.name)
    os.mkdir(os.fsencode(folder / "trials") + b"/bad\xff")
    (path_of(folder, "") / "deeper").mkdir()
    (path_of(folder, "") / "deeper" / "trial.json").write_text("{}")
    results = load(folder)
    assert len(results.trials) == 2
    assert results.damaged == ()


@pytest.mark.parametrize("path", ["a\0b", "bad\udcff", "a\x1b[2Jb"])
def test_a_path_that_no_folder_can_have_is_one_line(path: str) -> None:
    with pytest.raises(ResultsError) as caught:
        load(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", {"a": 1}),
        ("question", ["?"]),
        ("fields", {"step_s": {"default": 1}}),
        ("fields", {"steps": {"order": 3}}),
        ("fields", {"steps": {"only_with": ["a"]}}),
        ("fields", {"steps": {"kind": 2}}),
    ],
)
def test_a_damaged_study_is_one_line(folder: Path, name: str, value: Any) -> None:
    path = folder / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ResultsError) as caught:
        load(folder)
    assert str(caught.value).startswith(f"{path}: {name}")
    assert "\n" not in str(caught.value)


def test_a_study_of_an_older_version_is_one_line_with_its_path(folder: Path) -> None:
    path = folder / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fields": None}))
    with pytest.raises(ResultsError) as caught:
        write_report(folder)
    assert str(caught.value).startswith(f"{path} does not describe the fields of its trials")


def test_a_damaged_trial_of_a_packed_study_is_left_out(folder: Path) -> None:
    path = path_of(folder, "steps.parquet")
    frame = pd.read_parquet(path)
    set_to("window_s", -1.0)(frame).to_parquet(path)
    pack(str(folder))
    results = load(folder)
    assert set(results.trials["trial_id"]) == set(results.steps["trial_id"]) == {trial_id(OTHER)}
    [line] = results.damaged
    assert line.startswith(f"{folder}/steps.parquet: window_s is not positive of {trial_id(ONE)}; ")


def test_a_report_lists_the_trials_that_were_left_out(folder: Path, no_figures: None) -> None:
    path_of(folder, "trial.json").write_text("[]")
    write_report(folder)
    page = (folder / "report" / "report.md").read_text()
    assert "1 damaged trial is left out" in page
    assert "must be a mapping" in page


def test_a_trace_that_expands_without_bound_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.measure.trace.MAX_TRACE_BYTES", 1_000_000)
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b" " * 2_000_000))
    with pytest.raises(TraceError, match="more than 1000000 bytes"):
        read_kernels(str(path), 2)


def columns_of_the_analysis() -> set[str]:
    """Return the columns that modules of the analysis list in constants, besides the fields of a trial."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(analysis.__path__, "analysis.")]
    lists = [value for module in modules for name, value in vars(module).items() if name.endswith("COLUMNS")]
    names = {name for listed in lists if isinstance(listed, tuple | list) for name in listed if isinstance(name, str)}
    return names - set(TrialFields.model_fields)


@pytest.mark.parametrize("name", ["exposed", "gpu_hours_per_epoch", "hfu", "in_order", "how"])
def test_a_field_with_the_name_of_a_column_leaves_its_trial_out(folder: Path, name: str) -> None:
    content = json.loads(path_of(folder, "trial.json").read_text())
    content["trial"][name] = 1
    path_of(folder, "trial.json").write_text(json.dumps(content))
    assert f"trial.{name}: no field of a trial can have this name" in damaged(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("script_flags", " ".join(f"--a{number} 1" for number in range(5000))),
        ("script_env", " ".join(f"A{number}=1" for number in range(5000))),
        ("function_config", json.dumps({f"a{number}": 1 for number in range(5000)})),
    ],
)
def test_a_script_with_thousands_of_flags_is_left_out(folder: Path, name: str, value: str) -> None:
    content = json.loads(path_of(folder, "trial.json").read_text())
    content["trial"] |= {"script": "train.py", name: value}
    path_of(folder, "trial.json").write_text(json.dumps(content))
    assert f"trial.{name}: has " in damaged(folder)


def test_many_unknown_fields_give_a_report_without_a_warning(folder: Path, no_figures: None) -> None:
    for number, path in enumerate(sorted(folder.glob("trials/*/trial.json"))):
        content = json.loads(path.read_text())
        content["trial"] |= {f"unknown{field}": number for field in range(120)}
        path.write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(folder)


def test_no_field_of_a_trial_has_the_name_of_a_column_of_the_analysis() -> None:
    assert [name for name in TrialFields.model_fields if is_reserved(name)] == []
    assert [name for name in (*MEASURES, *OUTCOME_COLUMNS, *columns_of_the_analysis()) if not is_reserved(name)] == []
    assert set(RECORDED) == set(TrialFields.model_fields)
    assert AHEAD_BATCHES == 3


def test_the_status_of_a_folder_with_damaged_records_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path_of(folder, "trial.json").write_text("[" * 100_000)
    (folder / "trials" / "loop").symlink_to(folder / "trials")
    os.mkdir(os.fsencode(folder / "trials") + b"/bad\xff")
    study = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(study | {"command": "run\x1b[2J\udcff", "name": "a\x9bb"}))
    assert main(["status", str(folder)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert all(line.isprintable() for line in lines)
    assert f"damaged, will run again: {trial_id(ONE)}" in shown.out
    assert "study ab: 1 done" in shown.out


@pytest.mark.parametrize("argument", ["a\0b", "bad\udcff"])
@pytest.mark.parametrize("command", [["convert", "--storage", "lmdb", "src"], ["report"], ["status"], ["pack"]])
def test_an_argument_that_is_no_text_is_one_line(
    command: list[str], argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: argument ") and error.count("\n") == 1 and error[:-1].isprintable()


RESULTS = Path(__file__).parent.parent.parent.parent / "benchmarks" / "results"
COMMITTED = sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("study.json"))


@pytest.mark.xdist_group("committed studies")
@pytest.mark.parametrize("committed", COMMITTED)
def test_no_trial_of_the_committed_results_is_damaged(committed: str) -> None:
    assert committed_results(committed).damaged == ()
