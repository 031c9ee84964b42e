"""Measure a training loop in this process: a train function that Ray Train runs, or a callback. Make its tables."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trainables.clock import unix_s
from trainables.measure.collectives import TraceRows, read_trace, trace_rows
from trainables.messages import one_line
from trainables.probe import failures
from trainables.probe.flops import traced_step_flops
from trainables.probe.job import ProbeJob, Row, ScriptFailure, ScriptOutput
from trainables.probe.loop import PROBE_MODULE
from trainables.probe.probe import Probe
from trainables.probe.rows import label_evaluations
from trainables.scratch import scratch_folder

WINDOW = "communication"
"""the window of steps that are traced"""


class EndOfMeasurement(BaseException):
    """Raised in the training loop when all windows are complete. No error: `probe_session` catches it."""


@dataclass
class Session:
    """The result of `probe_session`, complete when its context has ended."""

    output: ScriptOutput | None = None


@contextmanager
def probe_session(
    job: ProbeJob,
    rank: int,
    agree: Callable[[Collection[int]], Collection[int]] = lambda steps: steps,
) -> Iterator[Session]:
    """Measure the training loop that runs inside this context, and end it after the last window.

    agree: returns the union of all ranks' sets of steps; called after the loop has ended on this rank. Collective over
    the ranks that measured all windows. The loop is ended by `EndOfMeasurement`, raised in the last step's optimizer
    call (`steps` ends the loop without). Other exceptions of the loop leave the context; `output` has what was measured
    until then.
    """
    session = Session()
    started_at = unix_s()
    with scratch_folder("probe") as folder:
        trace_file = Path(folder) / "trace.gz"

        def on_end() -> None:
            if not probe.uses_loop:
                raise EndOfMeasurement

        probe = Probe(job, trace_file, lambda _: None, on_end)
        handle = ModuleType(PROBE_MODULE)
        vars(handle)["probe"] = probe
        sys.modules[PROBE_MODULE] = handle
        failure: tuple[Any, str] | None = None
        probe.install()
        try:
            yield session
        except EndOfMeasurement:
            pass
        except BaseException as error:
            failure = ("error", f"{type(error).__name__}: {one_line(error)}")
            raise
        finally:
            del sys.modules[PROBE_MODULE]
            probe.remove()
            if failure is None and not probe.ended:
                failure = failures.too_few_steps(probe.number, probe.needed_steps, starts_processes=False)
            result = measured(probe) if failure is None or failure[0] != "error" else {}
            evaluated = agree(result["evaluated"]) if failure is None else result.get("evaluated", ())
            found = rank_tables(result, rank, set(evaluated), trace_file, job.keep_trace)
            session.output = ScriptOutput(
                found.tables,
                found.evidence,
                (probe.started_at or started_at, unix_s()),
                None if failure is None else ScriptFailure(*failure, rank, "", None, probe.number, probe.needed_steps),
                found.trace,
            )


def measured(probe: Probe) -> dict[str, Any]:
    """Return what a probe has measured so far, as values of JSON. Waits for the device."""
    return {
        "rows": probe.rows(),
        "evaluated": sorted(probe.evaluated()),
        "evidence": probe.evidence(),
        "started_at": probe.started_at,
        "ended_at": unix_s(),
        "complete": probe.ended,
        "loop_ended": probe.ended and probe.uses_loop,
    }


@dataclass(frozen=True)
class RankTables:
    """Rows by table, the evidence, and the trace."""

    tables: dict[str, list[Row]]
    evidence: dict[str, Any]
    trace: bytes | None = None


def rank_tables(
    result: Mapping[str, Any], rank: int, evaluated: Collection[int], trace_file: Path, keep_trace: bool
) -> RankTables:
    """Return the tables and the evidence of a rank. Operations that could not be counted are taken from the trace.

    All traced steps have the time of their kernels, and those without buckets, as of FSDP2 and ZeRO, totals of their
    collectives. `result`: of `measured`. `evaluated`: the steps in which any rank evaluated.
    """
    rows = label_evaluations(result.get("rows", ()), evaluated)
    found, trace, flops = TraceRows([], [], {}, {}), None, None
    if trace_file.exists():
        numbers = [row["step"] for row in result.get("rows", ()) if row["window"] == WINDOW]
        content = trace_file.read_bytes()
        events = read_trace(content)
        found, flops = trace_rows(events, rank, numbers, WINDOW), traced_step_flops(events)
        trace = content if keep_trace else None
    last = found.last_gradients_s
    gradient_bytes = result.get("evidence", {}).get("gradient_bytes")
    reductions = [_all_gradients(row, rank, gradient_bytes) for row in rows if "reduced_s" in row]
    totals = found.totals
    if found.buckets:
        totals = {step: {"kernels_s": row["kernels_s"]} for step, row in totals.items()}
    steps = [
        {"rank": rank, "last_gradient_s": last.get(row["step"])} | row | totals.get(row["step"], {}) for row in rows
    ]
    tables = {
        "steps": [{name: value for name, value in row.items() if name != "reduced_s"} for row in steps],
        "buckets": [row for row in (*reductions, *found.buckets) if row["step"] not in evaluated],
        "collectives": [row for row in found.collectives if row["step"] not in evaluated],
    }
    evidence = dict(result.get("evidence", {}))
    if evidence and evidence["step_flops"] is None and flops is not None:
        nulls = {name: reason for name, reason in evidence["nulls"].items() if name != "step_flops"}
        evidence |= {"step_flops": flops, "nulls": nulls}
    return RankTables(tables, evidence, trace)


def _all_gradients(row: Mapping[str, Any], rank: int, gradient_bytes: int) -> Row:
    """Return a row of the buckets table for all gradients of a step of the phases window.

    It is ready with the last gradient: what was hidden before is unknown without a trace.
    """
    step = {name: row[name] for name in ("window", "step")}
    times = {"ready_s": row["last_gradient_s"], "end_s": row["reduced_s"]}
    return {"rank": rank} | step | {"bucket": 0, "bytes": gradient_bytes} | times
