"""Packing and unpacking a results folder: nothing is lost, and every reader accepts both forms."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from analysis.compare.folders import compare
from analysis.export import main as export
from analysis.read import packed, parquet
from analysis.read.packed import PackedTrial, trials_from_table, trials_table
from analysis.read.results import ResultsError, load, load_reduced
from analysis.read.schema import SCHEMAS
from analysis.report.report import write_report
from study.cli.status import status_of
from study.scaling import main
from study.store import packing
from study.store.packing import pack, same_table, unpack
from study.store.result import TrialResult
from study.store.store import Store, StoreError
from study.store.tables import parquet_bytes
from tests.support.frames import FIELDS, cpu_study, record, steps, write_study, write_trial
from trainables.trial import Trial

STUDY: dict[str, Any] = {
    "name": "default", "question": "How?", "configuration": {}, "versions": {}, "command": "python -m study.scaling",
}  # fmt: skip
SHAPE = {"study.json", "trials.parquet", *(f"{name}.parquet" for name in SCHEMAS)}
FRAMES = ("trials", "steps", "buckets", "collectives", "sweep", "epochs", "windows", "shapes", "losses")


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> dict[str, Any]:
    """Return path -> JSON value, table or bytes of every file."""
    found: dict[str, Any] = {}
    for name in files_below(folder):
        path = folder / name
        if path.suffix == ".json":
            found[name] = json.loads(path.read_text())
        else:
            found[name] = pq.ParquetFile(path).read() if path.suffix == ".parquet" else path.read_bytes()
    return found


def assert_same(one: Path, other: Path) -> None:
    a, b = contents(one), contents(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert same_table(value, b[name]) if isinstance(value, pa.Table) else value == b[name], name


def write_stored_study(folder: Path) -> Path:
    """Write a study as the store does: trials with all tables, with a log, and without results."""
    store = Store.open(str(folder), **STUDY)
    number = {"rank": [0], "window": ["plain"], "step": [0], "samples": [8], "window_s": [1.0]}
    measured = pa.table(number | {"loss": [float("nan")]})
    buckets = pa.table({name: ["plain"] if name == "window" else [1] for name in SCHEMAS["buckets"].names})
    texts = ("window", "operation", "group")
    collectives = pa.table({name: ["x"] if name in texts else [1] for name in SCHEMAS["collectives"].names})
    sweep = pa.table({name: [1] for name in SCHEMAS["sweep"].names})
    epochs = pa.table({name: [1] for name in ("epoch", "step", "samples")})
    done: dict[str, Any] = {"status": "done", "started_at": 1e9, "duration_s": 2.0, "environment": {"nodes": []}}
    tables = {"steps": measured, "buckets": buckets, "collectives": collectives, "sweep": sweep, "epochs": epochs}
    store.save(TrialResult(trial=Trial(), **tables, **done))
    store.save(TrialResult(trial=Trial(repeat=1), steps=measured.slice(0, 0), **done))
    store.save(
        TrialResult(trial=Trial(repeat=2), status="failed", log="rank 0\ngone \udcff", started_at=1.0, duration_s=0.0)
    )
    store.save(
        TrialResult(trial=Trial(world_size=2), status="infeasible", reason="1 GPU", started_at=1.0, duration_s=0.0)
    )
    return folder


def test_a_study_is_restored_from_at_most_seven_files(tmp_path: Path) -> None:
    folder, packed, again = write_stored_study(tmp_path / "a"), tmp_path / "b", tmp_path / "c"
    before = contents(folder)
    pack(str(folder), str(packed))
    assert {path.name for path in packed.iterdir()} == SHAPE
    unpack(str(packed), str(again))
    assert_same(folder, again)
    assert before.keys() == contents(folder).keys()


def test_a_study_is_packed_and_unpacked_in_place(tmp_path: Path) -> None:
    folder, copy = write_stored_study(tmp_path / "a"), tmp_path / "copy"
    (folder / "report").mkdir()
    (folder / "report" / "index.html").write_text("kept")
    shutil.copytree(folder, copy)
    pack(str(folder))
    assert set(files_below(folder)) == SHAPE | {"report/index.html"}
    unpack(str(folder))
    assert_same(folder, copy)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.usefixtures("no_figures")
def test_every_reader_accepts_a_packed_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, packed = cpu_study(tmp_path / "a"), tmp_path / "b"
    without_unknown_columns(folder)
    pack(str(folder), str(packed))
    for read in (load, load_reduced):
        one, other = read(folder), read(packed)
        assert one.study == other.study
        for name in FRAMES:
            pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name))
    reports = [
        Path(write_report(of, tmp_path / f"report-{of.name}").path).with_name("report.md") for of in (folder, packed)
    ]
    assert reports[0].read_text() == reports[1].read_text()
    assert status_of(str(folder)) == status_of(str(packed))
    assert (compare(folder, packed).rows["throughput_samples_per_s_ratio"] == 1).all()
    assert main(["predict", str(packed), "--gpus", "4", "--json"]) == main(
        ["predict", str(folder), "--gpus", "4", "--json"]
    )
    capsys.readouterr()
    for of in (folder, packed):
        assert export([str(of), "--tensorboard", str(tmp_path / f"events-{of.name}")]) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == 1


def without_unknown_columns(folder: Path) -> None:
    """Hand-made tables may have columns and types that the store would not write."""
    for path in folder.glob("trials/*/*.parquet"):
        table = pq.ParquetFile(path).read()
        known = [name for name in table.column_names if name in SCHEMAS[path.stem].names]
        path.write_bytes(parquet_bytes(path.stem, table.select(known)))


def test_packed_steps_are_read_in_portions_of_complete_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, packed = cpu_study(tmp_path / "a"), tmp_path / "b"
    without_unknown_columns(folder)
    monkeypatch.setattr(packing, "ROWS_AT_ONCE", 150)
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 150)
    pack(str(folder), str(packed))
    assert pq.ParquetFile(packed / "steps.parquet").num_row_groups > 5
    one, other = load_reduced(folder), load_reduced(packed)
    for name in FRAMES:
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name))
    unpack(str(packed), str(tmp_path / "c"))
    assert_same(folder, tmp_path / "c")


def test_row_groups_that_split_a_trial_are_refused(tmp_path: Path) -> None:
    folder = write_stored_study(tmp_path / "a")
    pack(str(folder))
    path = folder / "steps.parquet"
    table = pq.ParquetFile(path).read()
    trials = pq.ParquetFile(folder / "trials.parquet").read()
    doubled = pa.array([None if rows is None else 2 * rows for rows in trials["rows.steps"].to_pylist()], pa.int64())
    place = trials.column_names.index("rows.steps")
    pq.write_table(trials.set_column(place, trials.schema.field(place), doubled), folder / "trials.parquet")
    pq.write_table(pa.concat_tables([table, table]), path, row_group_size=1)
    with pytest.raises(ResultsError, match=r"row groups"):
        load_reduced(folder)


def test_no_trial_can_be_added_to_a_packed_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_stored_study(tmp_path / "a")
    pack(str(folder))
    with pytest.raises(StoreError, match=rf"is packed.*scaling unpack {folder}"):
        Store.open(str(folder), **STUDY)
    assert main(["run", "default", "--out", str(folder), "--gpus", "1", "--quiet"]) == 2
    assert f"python -m study.scaling unpack {folder}" in capsys.readouterr().err
    assert Store.at(str(folder)).statuses() == Store.at(str(folder)).statuses()


def test_traces_are_left_out_and_removed_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_stored_study(tmp_path / "a")
    trace = folder / "trials" / Trial().trial_id / "traces" / "rank0.json.gz"
    trace.parent.mkdir()
    trace.write_bytes(b"x" * 1000)
    assert main(["pack", str(folder), str(tmp_path / "b")]) == 0
    assert "left out: 1 profiler traces, 0.0 MB" in capsys.readouterr().err
    before = files_below(folder)
    assert main(["pack", str(folder)]) == 2
    assert "--drop-traces" in capsys.readouterr().err
    assert files_below(folder) == before
    assert main(["pack", str(folder), "--drop-traces"]) == 0
    assert set(files_below(folder)) == SHAPE


def test_other_files_of_a_trial_are_never_removed(tmp_path: Path) -> None:
    folder = write_stored_study(tmp_path / "a")
    (folder / "trials" / Trial().trial_id / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"notes\.txt"):
        pack(str(folder), drop_traces=True)
    assert pack(str(folder), str(tmp_path / "b")).left_out


@pytest.mark.parametrize("name", ["steps", "trials"])
def test_nothing_is_removed_if_the_packed_files_differ(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_stored_study(tmp_path / "a")
    before = contents(folder)
    if name == "steps":
        monkeypatch.setattr(packing, "same_table", lambda one, other: False)
    else:
        monkeypatch.setattr(packing, "read_trials", lambda system, root: [])
    with pytest.raises(StoreError, match="nothing was removed"):
        pack(str(folder))
    assert before.keys() <= contents(folder).keys()
    store = Store.at(str(folder))
    assert (store.is_packed, len(store.records())) == (False, 4)


def test_a_kill_before_the_last_file_leaves_the_study_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_stored_study(tmp_path / "a")
    before = Store.at(str(folder)).records()

    def die(*_: Any) -> pa.Table:
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "_trials_table", die)
    with pytest.raises(KeyboardInterrupt):
        pack(str(folder))
    store = Store.at(str(folder))
    assert (store.is_packed, store.records()) == (False, before)


def test_damaged_trials_are_not_packed(tmp_path: Path) -> None:
    folder = write_stored_study(tmp_path / "a")
    (folder / "trials" / Trial().trial_id / "trial.json").write_text("{")
    with pytest.raises(StoreError, match=f"damaged trials: {Trial().trial_id}"):
        pack(str(folder))


def test_a_folder_in_an_object_store_is_packed_and_unpacked(tmp_path: Path) -> None:
    folder = write_stored_study(tmp_path / "a")
    memory = fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem()))
    fs.copy_files(str(folder), "bucket", source_filesystem=fs.LocalFileSystem(), destination_filesystem=memory)
    store = Store("bucket", memory, "bucket")
    before = store.records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "at", lambda out: store)
        pack("bucket")
        assert store.is_packed
        assert store.records() == before
        unpack("bucket")
    assert not store.is_packed
    assert store.scan() == (before, [])


def wider(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    return pa.table(dict(zip(table.column_names, table.columns, strict=True)) | columns)


def same_text(length: int, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * length]))


def errors_of_readers(folder: Path) -> list[str]:
    """Return the one-line error of each reader about a damaged packed folder."""
    lines = []
    for read in (load, load_reduced):
        with pytest.raises(ResultsError) as caught:
            read(folder)
        lines.append(str(caught.value))
    with pytest.raises((StoreError, ResultsError)) as caught_too:
        unpack(str(folder), str(folder.with_name("unpacked")))
    lines.append(str(caught_too.value))
    assert all("\n" not in line for line in lines)
    return lines


@pytest.mark.parametrize("kept_bytes", [0, 100])
@pytest.mark.parametrize("name", ["trials", "steps"])
def test_a_truncated_packed_file_is_named(tmp_path: Path, name: str, kept_bytes: int) -> None:
    folder = write_stored_study(tmp_path / "a")
    pack(str(folder))
    path = folder / f"{name}.parquet"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert all(str(path) in line for line in errors_of_readers(folder)[:2])


def test_a_missing_or_different_packed_table_is_named(tmp_path: Path) -> None:
    folder = write_stored_study(tmp_path / "a")
    pack(str(folder))
    path = folder / "sweep.parquet"
    table = pq.ParquetFile(path).read()
    pq.write_table(pa.concat_tables([table, table]), path)
    with pytest.raises(ResultsError, match=rf"{path}: holds 2 rows, though trials.parquet lists 1"):
        load(folder)
    path.unlink()
    assert all("restore it from a copy" in line for line in errors_of_readers(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns(["trial_id"]),
        lambda table: table.drop_columns(["rows.steps"]),
        lambda table: pa.concat_tables([table, table]),
        lambda table: table.append_column("x.y", pa.array([1] * len(table))),
        lambda table: table.set_column(
            0, pa.field("trial_id", pa.string(), metadata={b"encoding": b"json"}), table["trial_id"]
        ),
        lambda table: pa.table({"a": [1]}),
        lambda table: table.append_column("*", pa.array([1] * len(table))),
    ],
)  # fmt: skip
def test_a_malformed_trials_file_is_a_one_line_error(tmp_path: Path, change: Any) -> None:
    folder = write_stored_study(tmp_path / "a")
    pack(str(folder))
    path = folder / "trials.parquet"
    pq.write_table(change(pq.ParquetFile(path).read()), path)
    assert all(str(path) in line for line in errors_of_readers(folder))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: pa.concat_tables([table] * 400), "trials of"),
        (
            lambda table: wider(table, {f"trial.f{i}": pa.array([i] * len(table)) for i in range(900)}),
            "values are read",
        ),
        (lambda table: wider(table, {"trial.note": same_text(2**19, len(table))}), "bytes of text in"),
    ],
    ids=["trials", "columns", "a text that the file holds once"],
)
def test_a_trials_file_that_expands_beyond_the_limits_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    for name, limit in {"MAX_TRIALS": 1_000, "MAX_CELLS": 40_000, "MAX_TEXT_BYTES": 2**24}.items():
        monkeypatch.setattr(packed, name, limit)
    folder = write_stored_study(tmp_path / "a")
    pack(str(folder))
    path = folder / "trials.parquet"
    table = pq.ParquetFile(path).read()
    table = pa.concat_tables([table] * (100 // len(table)))
    pq.write_table(table, path)
    assert not any(reason in line for line in errors_of_readers(folder))
    pq.write_table(change(table), path)
    for line in errors_of_readers(folder):
        assert str(path) in line
        assert reason in line


def test_a_trial_id_with_a_path_is_not_unpacked(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "a")
    trial = record(FIELDS | {"steps": 3})
    write_trial(folder, trial | {"trial_id": "x"}, steps(FIELDS | {"steps": 3}, 0.1))
    without_unknown_columns(folder)
    pack(str(folder))
    table = pq.ParquetFile(folder / "trials.parquet").read()
    place = table.column_names.index("trial_id")
    pq.write_table(table.set_column(place, "trial_id", pa.array(["../../x"])), folder / "trials.parquet")
    with pytest.raises(StoreError, match="cannot be a folder name"):
        unpack(str(folder), str(tmp_path / "b"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["status", "seed", "nodes", "a.b", "*", "", "trial", "environment", "\ud800"])
MAPPING = st.dictionaries(KEYS, JSON, max_size=4)
RECORDS = st.builds(
    lambda top, trial, environment: top | {"trial": trial, "environment": environment, "status": "done"},
    MAPPING,
    MAPPING,
    MAPPING,
)
ROWS = st.dictionaries(st.sampled_from(list(SCHEMAS)), st.integers(0, 2**40))


def exact(value: Any) -> str:
    """Return JSON text, in which 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(RECORDS, st.none() | st.binary(max_size=5), ROWS), max_size=4))
def test_any_records_survive_packing(
    given_trials: list[tuple[dict[str, Any], bytes | None, dict[str, int]]],
) -> None:
    trials = [
        PackedTrial(record | {"trial_id": str(number)}, log, rows)
        for number, (record, log, rows) in enumerate(given_trials)
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(trials_table(trials), sink)
    found = trials_from_table(pq.read_table(pa.BufferReader(sink.getvalue())))
    assert [(exact(t.record), t.log, t.rows) for t in found] == [(exact(t.record), t.log, t.rows) for t in trials]


VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(),
    pa.string(): st.text(max_size=3),
    pa.bool_(): st.booleans(),
}


def table_of(name: str) -> st.SearchStrategy[pa.Table]:
    row = st.fixed_dictionaries(
        {c.name: VALUES[c.type] if not c.nullable else st.none() | VALUES[c.type] for c in SCHEMAS[name]}
    )
    return st.lists(row, max_size=3).map(lambda rows: pa.Table.from_pylist(rows, schema=SCHEMAS[name]))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({}, optional={name: table_of(name) for name in SCHEMAS}), max_size=3),
    st.integers(1, 4),
)
def test_any_tables_survive_packing(tables: list[dict[str, pa.Table]], rows_at_once: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ROWS_AT_ONCE", rows_at_once)
        folder = Path(name)
        store = Store.open(str(folder / "a"), **STUDY)
        for repeat, own in enumerate(tables):
            status = "done" if "steps" in own else "failed"
            store.save(TrialResult(trial=Trial(repeat=repeat), status=status, started_at=0.0, duration_s=0.0, **own))
        pack(str(folder / "a"), str(folder / "b"))
        unpack(str(folder / "b"), str(folder / "c"))
        assert_same(folder / "a", folder / "c")
