"""Measure a training loop in this process: a train function that Ray Train runs, or a callback."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trainables.clock import unix_s
from trainables.messages import one_line
from trainables.probe import failures
from trainables.probe.job import ProbeJob, ScriptFailure, ScriptOutput
from trainables.probe.loop import PROBE_MODULE
from trainables.probe.output import measured, rank_tables
from trainables.probe.probe import Probe
from trainables.scratch import scratch_folder


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
