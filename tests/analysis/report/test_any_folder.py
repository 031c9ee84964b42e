"""Any change to the records and tables of a results folder gives a report or one line, without a warning of a library.

The limit is of CPU time, because other programs on the machine make a report slow, but not expensive. Continuous
integration tries 100 changes (.ci/run). All of them, in half an hour:

    FOLDER_EXAMPLES=2000 pytest -s tests/analysis/report/test_any_folder.py
"""

import copy
import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from analysis.read.results import ResultsError, load_reduced
from analysis.read.schema import SCHEMA_VERSION
from analysis.report.report import write_report
from tests.support.frames import FIELDS, RECORDED, communication, record, steps
from tests.support.trainings import TRAINING, epochs

EXAMPLES = int(os.environ.get("FOLDER_EXAMPLES", "8"))
LONGEST_CPU_S = 10.0
LONGEST_S = 120
"""more than a report takes on a busy machine: beyond it, one hangs"""
MOST_BYTES = 2**30


class Content(NamedTuple):
    """What a results folder holds: study.json, and record and tables of each trial."""

    study: dict[str, Any]
    records: list[dict[str, Any]]
    tables: list[dict[str, pd.DataFrame]]


def timed(**changes: Any) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    fields = FIELDS | {"steps": 9, "communication_steps": 2, "sweep_bytes": 1024} | changes
    frame = steps(fields, 0.1 / fields["world_size"], noise=0.02, rng=np.random.default_rng(fields["repeat"]))
    if fields["world_size"] == 1:
        return record(fields), {"steps": frame}
    more, buckets, sweep = communication(fields, last_gradient_s=0.04, bucket_bytes=(1024, 512))
    return record(fields), {"steps": pd.concat([frame, more], ignore_index=True), "buckets": buckets, "sweep": sweep}


def trained(seed: int) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    fields = TRAINING | {"seed": seed, "repeat": seed}
    frame = pd.DataFrame({"rank": [0], "window": "train", "step": 0, "samples": 128, "window_s": np.nan})
    return record(fields) | {"trial_id": f"training-{seed}"}, {"steps": frame, "epochs": epochs(fields, 0.9)}


def of_trials(*trials: tuple[dict[str, Any], dict[str, pd.DataFrame]]) -> Content:
    study = {"schema_version": SCHEMA_VERSION, "name": "default", "question": "?", "command": "run", "fields": RECORDED}
    study |= {"configuration": {"repeats": 2, "planned_trials": ["a"]}, "versions": {}, "notes": ["a note"]}
    return Content(study, [record for record, _ in trials], [tables for _, tables in trials])


STUDIES = (
    of_trials(*(timed(world_size=size, repeat=repeat) for size in (1, 2) for repeat in (0, 1))),
    of_trials(*(timed(world_size=size, device="cuda") for size in (1, 2))),
    of_trials(trained(0), trained(1)),
)

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", "\udcff", "\x1b[2J", "$\\frac{$", "![](http://x)", "=1+1", "a\nb", "nan", "../x", "x" * 5000, "cuda", "plain"]
)
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 1, 2, 2**31, 2**62, 2**63, 10**30, -0.0, 1e-300, 1e300, float("inf"), float("nan")])
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry of nested JSON."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def json_changes(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with an entry changed, removed or added."""
    changed = copy.deepcopy(value)
    path = draw(st.sampled_from(list(places(value))))
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    kind = draw(st.sampled_from(["change", "change", "change", "remove", "add"]))
    if kind == "remove":
        del parent[path[-1]]
    elif kind == "add" and isinstance(parent, dict):
        parent[draw(TEXTS | st.sampled_from(["step_s", "n", "efficiency", "configuration"]))] = draw(JSON)
    else:
        parent[path[-1]] = draw(JSON)
    return changed


ROWS: tuple[Callable[[pd.DataFrame], pd.DataFrame], ...] = (
    lambda frame: frame.iloc[:0],
    lambda frame: frame.iloc[: len(frame) // 2],
    lambda frame: frame.iloc[1:],
    lambda frame: pd.concat([frame, frame]),
    lambda frame: frame.iloc[::-1],
    lambda frame: frame.sample(frac=1, random_state=0),
    lambda frame: frame.assign(extra="a", trial_id="b"),
)


@st.composite
def frame_changes(draw: st.DrawFn, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with other rows, or with another value in all, some or one of the rows of a column."""
    column = draw(st.sampled_from(list(frame.columns)))
    kind = draw(st.sampled_from(["rows", "drop", "values", "values", "values", "values"]))
    if kind == "rows":
        return draw(st.sampled_from(ROWS))(frame)
    if kind == "drop":
        return frame.drop(columns=column)
    value = draw(st.none() | NUMBERS | TEXTS | st.just([1]) | st.just({"a": 1}))
    rows = draw(st.sampled_from([slice(None), slice(0, 1), slice(0, None, 2), slice(len(frame) // 2, None)]))
    values = list(frame[column])
    values[rows] = [value] * len(values[rows])
    numbers = [float(item) for item in values if isinstance(item, int | float) and not isinstance(item, bool)]
    if len(numbers) == len(values) and draw(st.booleans()):
        return frame.assign(**{column: np.array(numbers)})
    return frame.assign(**{column: pd.Series(values, index=frame.index, dtype=object)})


@st.composite
def contents(draw: st.DrawFn) -> Content:
    """Return a study with one to three changes."""
    study, records, tables = copy.deepcopy(draw(st.sampled_from(STUDIES)))
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(records) - 1))
        kind = draw(st.sampled_from(["record", "record", "table", "table", "study"]))
        if kind == "study":
            study = draw(json_changes(study))
        elif kind == "record":
            records[number] = draw(json_changes(records[number]))
        else:
            name = draw(st.sampled_from(sorted(tables[number])))
            tables[number][name] = draw(frame_changes(tables[number][name]))
    return Content(study, records, tables)


def write(content: Content, directory: Path) -> None:
    """Write the folder. A table that no Parquet file can hold is text instead."""
    (directory / "study.json").write_text(json.dumps(content.study))
    for number, (trial, tables) in enumerate(zip(content.records, content.tables, strict=True)):
        name = trial.get("trial_id")
        is_plain = isinstance(name, str) and name.isprintable() and 0 < len(name) < 200 and "/" not in name
        folder = directory / "trials" / (str(name) if is_plain and name not in (".", "..") else str(number))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trial.json").write_text(json.dumps(trial))
        for table, frame in tables.items():
            try:
                frame.to_parquet(folder / f"{table}.parquet", index=False)
            except Exception:  # noqa: BLE001 - pyarrow refuses a mixture of types
                (folder / f"{table}.parquet").write_text("no table")


def peak_bytes() -> int:
    """Return the largest resident memory of this process since `forget_peak`."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    """Let the largest resident memory be the current one (Linux, proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


class Cost(NamedTuple):
    """What one report took."""

    cpu_s: float
    wall_s: float
    bytes: int


def hangs(*_: object) -> None:
    raise TimeoutError(f"no report after {LONGEST_S} s")


@pytest.fixture
def costs() -> Iterator[list[Cost]]:
    """Collect the cost of every example, and print the largest. A report that hangs raises."""
    before = signal.signal(signal.SIGALRM, hangs)
    collected: list[Cost] = []
    yield collected
    signal.signal(signal.SIGALRM, before)
    cpu_s, wall_s, size = (max(values) for values in zip(*collected, strict=True))
    print(f"{len(collected)} reports: at most {cpu_s:.2f} s of CPU, {wall_s:.2f} s, {size / 2**20:.0f} MiB each")


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[phase for phase in Phase if phase != Phase.explain],  # it traces every line after a first failure
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(contents())
@pytest.mark.timeout(7200, method="thread")  # the examples have a limit by signal
def test_a_changed_folder_gives_a_report_or_one_line(no_figures: None, costs: list[Cost], content: Content) -> None:
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("error")
        write(content, Path(name))
        forget_peak()
        start_s, start_cpu_s, before_bytes = time.monotonic(), time.process_time(), peak_bytes()
        signal.alarm(LONGEST_S)
        try:
            report = write_report(name)
        except ResultsError as refusal:
            assert str(refusal).isprintable()
            assert name in str(refusal)
        else:
            assert Path(report.path).read_text().startswith("<!")
        finally:
            signal.alarm(0)
        costs.append(
            Cost(time.process_time() - start_cpu_s, time.monotonic() - start_s, max(peak_bytes() - before_bytes, 0))
        )
        assert costs[-1].cpu_s < LONGEST_CPU_S
        assert costs[-1].wall_s < LONGEST_S
        assert costs[-1].bytes < MOST_BYTES


@pytest.mark.parametrize("content", STUDIES, ids=["CPU ranks", "GPUs", "training"])
def test_the_unchanged_folders_have_no_damaged_trial(content: Content, tmp_path: Path) -> None:
    write(content, tmp_path)
    results = load_reduced(tmp_path)
    assert results.damaged == ()
    assert len(results.trials) == len(content.records)


def test_scripts_whose_batch_no_probe_has_seen_are_reported_without_a_law(tmp_path: Path, no_figures: None) -> None:
    content = copy.deepcopy(STUDIES[0])
    for trial in content.records:
        trial["trial"]["script"] = "train.py"
    write(content, tmp_path)
    assert Path(write_report(tmp_path).path).read_text().startswith("<!")
