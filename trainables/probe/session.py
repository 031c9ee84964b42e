"""Measure a training loop in this process, such as a Ray Train function, and end it when its windows are complete."""

import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainables.probe import failures
from trainables.probe.collectives import collective_rows
from trainables.probe.job import ProbeJob, Row, ScriptFailure, ScriptOutput
from trainables.probe.loop import PROBE_MODULE
from trainables.probe.probe import Probe
from trainables.probe.rows import label_evaluations


class SessionEnded(BaseException):
    """All windows are complete. Raised within the last step, so that the loop ends at the same step on all ranks."""


def run_function(
    function: Callable[[], Any], job: ProbeJob, rank: int, gather: Callable[[Any], list[Any]]
) -> ScriptOutput:
    """Call a function that trains, and return what was measured of its steps. Collective over the ranks of the trial.

    `gather` returns the values of all ranks. Exceptions of the function are raised. A function that returns before the
    last window has a `failure`.
    """
    started_at = time.time()
    with tempfile.TemporaryDirectory(prefix="scaling-study-function-") as folder:
        trace_path = Path(folder, "trace.gz")
        probe = Probe(job, trace_path, lambda number: None, _end)
        with _installed(probe):
            _call(function)
        failure = None if probe.ended else _too_few_steps(probe, rank)
        failed = any(gather(failure is not None))
        evaluated = {step for steps in gather(sorted(probe.evaluated())) for step in steps}
        rows = [] if failed else label_evaluations(probe.rows(), evaluated)
        collectives: list[Row] = []
        trace = None
        if trace_path.exists() and not failed:
            collectives = collective_rows(
                trace_path, rank, [row["step"] for row in probe.rows() if row["window"] == "communication"]
            )
            trace = trace_path.read_bytes() if job.keep_trace else None
    evidence = probe.evidence() | ({} if probe.uses_loop else {"entry": "function"})
    tables = {"steps": [{"rank": rank} | row for row in rows], "buckets": [], "collectives": collectives}
    return ScriptOutput(tables, evidence, (probe.started_at or started_at, time.time()), failure, trace)


def _end() -> None:
    raise SessionEnded


def _call(function: Callable[[], Any]) -> None:
    """Call the function until it returns or its last window ends. Its frames are freed with the exception."""
    try:
        function()
    except SessionEnded:
        return


@contextmanager
def _installed(probe: Probe) -> Iterator[None]:
    handle = types.ModuleType(PROBE_MODULE)
    vars(handle)["probe"] = probe
    sys.modules[PROBE_MODULE] = handle
    probe.install()
    try:
        yield
    finally:
        probe.remove()
        del sys.modules[PROBE_MODULE]


def _too_few_steps(probe: Probe, rank: int) -> ScriptFailure:
    kind, line = failures.too_few_steps(probe.number, probe.needed_steps, starts_processes=False)
    line = line.replace("the script", "the train function")
    return ScriptFailure(kind, line, rank, log="", steps_run=probe.number, steps_needed=probe.needed_steps)
