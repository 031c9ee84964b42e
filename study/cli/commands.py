"""What the commands do: from a configuration to a plan, from a plan to results and their report."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.capacity import NodeCapacity, local_capacity
from study.cli.configuration import Configuration, resolve
from study.cli.prepared import PreparedStudy, replaced_by_workload, side_by_side, warnings
from study.cli.status import log_path
from study.errors import DOES_NOT_FIT, DONE, INTERRUPTED, SOME_FAILED
from study.options import given
from study.orchestrate.cluster import Cluster, ClusterError, connect, is_local
from study.orchestrate.protocol import KnownTrials
from study.plan.estimate import blocks, estimate
from study.plan.trials import LAYOUT_FIELDS, SETTLED, plan_trials
from study.store.records import ordered, statuses_of
from study.studies.basic import STUDIES
from trainables.rules import unmet_requirement

if TYPE_CHECKING:
    from study.store.store import Store


def configure(options: Mapping[str, Any]) -> Configuration:
    """The configuration that a command's options ask for."""
    return resolve(given(dict(options)), options["config"])


def planning_nodes(address: str | None) -> Sequence[NodeCapacity]:
    """The nodes that a run would use: this host's without ray, or those of the cluster, which is asked."""
    if is_local(address):
        return local_capacity()
    try:
        with connect(address or os.environ.get("RAY_ADDRESS") or "auto") as cluster:
            say(f"planned for {cluster.description}")
            return cluster.nodes
    except ClusterError:
        if address or os.environ.get("RAY_ADDRESS"):
            raise
        return local_capacity()  # what an ended cluster left behind; a run would start a local Ray


def prepare(configuration: Configuration, nodes: Sequence[NodeCapacity]) -> PreparedStudy:
    """The plan of a configuration on these nodes, with what its results folder already holds."""
    study_of = STUDIES[configuration.study]
    study = study_of(nodes).asking(configuration.axes, configuration.repeats)
    store = existing_store(configuration.out, study.name)
    records, damaged = store.scan() if store else ([], [])
    known = KnownTrials.of(records)
    rows = plan_trials(study, nodes, known.statuses, known.out_of_memory)
    if store and damaged:
        _say_damaged(store, damaged, {row.trial.trial_id for row in rows if row.trial is not None})
    own = study_of(nodes)
    asked_layout = {
        name
        for name in set(configuration.axes)
        & set(LAYOUT_FIELDS)  # what is the study's own, as --print-config has it, is not asked
        if tuple(configuration.axes[name]) != tuple(own.axes.get(name, (own.base.get(name),)))
    }
    unfit = [row for row in rows if row.status == "infeasible" and not (row.trial and unmet_requirement(row.trial))]
    if not asked_layout and len(unfit) < len(rows):
        unfit = []
    if all(row.status in ("skipped", "infeasible") for row in rows):
        unfit = list(rows)
    pending = [row.trial for row in rows if row.status == "pending" and row.trial is not None]
    beside = side_by_side(configuration.max_concurrent, pending, nodes)
    found = estimate(rows, records, configuration.price_per_gpu_hour, beside)
    return PreparedStudy(configuration, study, rows, unfit, found, beside, known)


def _say_damaged(store: "Store", damaged: Sequence[str], planned: Container[str]) -> None:
    """Names damaged trials; raises StoreError for those that no run would replace: no report can be made beside them."""
    from study.store.store import StoreError

    strays = [trial_id for trial_id in damaged if trial_id not in planned]
    if strays:
        folders = ", ".join(store.trial_folder(trial_id) for trial_id in strays)
        raise StoreError(f"damaged, and not part of this plan: {folders}; remove what cannot be mended")
    say(f"{store.out}: damaged, so run again: {', '.join(damaged)}")


def existing_store(out: str, study_name: str) -> "Store | None":
    """The results that are in `out`; None where there are none yet. Raises StoreError, also for another study's."""
    if "://" not in out and not os.path.lexists(out):
        _refuse_below_a_file(out)
        return None  # where there is nothing yet, a plan is quicker without the store
    from study.store.store import Store, refuse_other_study

    store = Store.existing(out)
    if store is not None:
        refuse_other_study(out, store.study()["name"], study_name)
    return store


def _refuse_below_a_file(out: str) -> None:
    """Raises StoreError where the folder `out`, which is not there yet, could not be made."""
    nearest = next(parent for parent in Path(os.path.abspath(out)).parents if os.path.lexists(parent))
    if not os.path.isdir(nearest):
        from study.store.store import StoreError

        raise StoreError(f"{out} cannot be made: {nearest} is no folder; choose another --out")


def say_what_does_not_fit(prepared: PreparedStudy) -> None:
    """Every combination that keeps a plan from starting, and why, once each; one line where all have one reason."""
    lines = list(dict.fromkeys(f"{prepared.label(row)}: {row.reason}" for row in prepared.unfit))
    if len(lines) > 1 and len(prepared.unfit) == len(prepared.rows) and len({row.reason for row in prepared.rows}) == 1:
        lines = [f"all {len(lines)} combinations: {prepared.rows[0].reason}"]
    for line in lines:
        say(f"does not fit: {line}")
    too_small = any(row.reason.startswith("needs ") for row in prepared.unfit)
    if too_small and is_local(prepared.configuration.address):
        say("this machine alone was counted; for a cluster's nodes, run this on its head, or give --address HOST:PORT")


def say_warnings(prepared: PreparedStudy) -> None:
    """What is to be known of a plan's trials before anyone trusts them."""
    asked = prepared.configuration
    for line in warnings(asked.max_concurrent, prepared.side_by_side, prepared.pending):
        say(line)
    for line in replaced_by_workload(asked.axes, prepared.pending):
        say(line)


def run(configuration: Configuration, command: str, quiet: bool) -> int:
    """Run what is missing, write the report, print the summary; return the exit code."""
    prepared: PreparedStudy | None = None
    store: Store | None = None
    interrupted = False
    with contextlib.ExitStack() as until_reported:  # if Ray was told to end too, disconnecting may end this process
        try:
            prepared, cluster = _prepare_to_run(configuration, until_reported)
            if prepared.unfit:
                say_what_does_not_fit(prepared)
                return DOES_NOT_FIT
            store = _open(prepared, command)
            if prepared.pending:
                cluster = cluster or until_reported.enter_context(connect(configuration.address))
                until_reported.enter_context(_on_sigterm(_interrupt))
                interrupted = _measure(prepared, store, cluster, quiet)
        except KeyboardInterrupt:
            if prepared is None or store is None:
                raise
            interrupted = True
        return _report(prepared, store, interrupted, quiet, command)


def _prepare_to_run(
    configuration: Configuration, until_reported: contextlib.ExitStack
) -> tuple[PreparedStudy, Cluster | None]:
    """Return the plan and, if its nodes had to be asked for, the cluster; a local Ray starts later, if at all."""
    if is_local(configuration.address):
        prepared = prepare(configuration, local_capacity())
        if not prepared.unfit:
            _check_workload(configuration)
        return prepared, None
    _check_workload(configuration)
    cluster = until_reported.enter_context(connect(configuration.address))
    return prepare(configuration, cluster.nodes), cluster


def _report(prepared: PreparedStudy, store: "Store", interrupted: bool, quiet: bool, command: str) -> int:
    """Write the report; after an interrupt, say which command resumes. Return the exit code."""
    try:
        with _on_sigterm(signal.SIG_IGN):  # the report is what it would lead to
            exit_code = _finish(prepared, store, interrupted, quiet)
        how = "interrupted"
    except KeyboardInterrupt:
        interrupted, how = True, "interrupted before the report was written"
    if interrupted:
        say(f"{how}; resume with: {command}")
        return INTERRUPTED
    return exit_code


def _measure(prepared: PreparedStudy, store: "Store", cluster: Cluster, quiet: bool) -> bool:
    """Runs the pending trials. True where Ctrl-C ended it."""
    from study.cli.progress import Progress
    from study.orchestrate.tune import run_trials

    if not quiet:
        say(f"cluster: {cluster.description}")
        if cluster.is_local and not prepared.configuration.address:
            say(
                "no cluster was found (no --address, no RAY_ADDRESS, no Ray that runs on this host): "
                "this runs on this machine alone"
            )
        if cluster.dashboard_url:
            say(f"dashboard: {cluster.dashboard_url}")
        on_gpus = prepared.pending[0].device == "cuda"
        if not on_gpus and "world_size" in prepared.configuration.axes:
            say("no GPUs are used: --gpus counts CPU ranks")
    say_warnings(prepared)
    configuration = prepared.configuration
    chatter = os.path.join(cluster.log_dir if os.path.isdir(cluster.log_dir) else tempfile.gettempdir(), "tune.out")
    with (
        open(chatter, "a") as file,
        contextlib.redirect_stdout(file),  # Tune prints its own tables, and stdout is for results
        Progress(prepared.study.name, prepared.pending, quiet=quiet) as progress,
    ):
        return run_trials(
            prepared.study.name,
            blocks(prepared.pending, prepared.study.repeats, configuration.order_seed),
            store,
            cluster,
            isolate=configuration.isolate,
            trial_timeout_s=configuration.trial_timeout_s,
            max_concurrent=prepared.side_by_side,
            on_event=progress.on_event,
            known=prepared.known,
        )


@contextlib.contextmanager
def _on_sigterm(handler: Any) -> Iterator[None]:
    """SIGTERM goes to this handler meanwhile.

    To be entered after Ray has connected, which sets a handler of its own, one that aborts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: a handler that is not Python's


def _interrupt(number: int, frame: Any) -> None:
    """Batch systems end a job with SIGTERM: treated as Ctrl-C, it still ends with a report."""
    raise KeyboardInterrupt


def _open(prepared: PreparedStudy, command: str) -> "Store":
    """The results folder, with what is known without running anything saved in it."""
    import yaml

    from study.store import checkpoints
    from study.store.environment import package_versions
    from study.store.store import Store, TrialResult

    planned = [row.trial.trial_id for row in prepared.rows if row.trial is not None]
    rungs: dict[str, list[str]] = {}
    for row in prepared.rows:
        if prepared.study.ladder and row.trial is not None and row.case not in prepared.study.beside:
            rungs.setdefault(row.case, []).append(row.trial.trial_id)
    marked = {"rungs": [{"name": name, "trial_ids": ids} for name, ids in rungs.items()]} if rungs else {}
    store = Store.open(
        prepared.configuration.out,
        name=prepared.study.name,
        question=prepared.study.question,
        configuration=yaml.safe_load(prepared.yaml)
        | {"planned_trials": planned}
        | marked
        | dict(prepared.study.report),
        versions=package_versions(),
        command=command,
    )
    known = prepared.known.statuses
    checkpoints.drop(store, [trial_id for trial_id, status in known.items() if status in SETTLED])
    for row in prepared.rows:
        if row.trial is None or row.status not in ("infeasible", "pruned"):
            continue
        if known.get(row.trial.trial_id) != row.status:
            result = TrialResult(
                trial=row.trial, status=row.status, reason=row.reason, started_at=time.time(), duration_s=0.0
            )
            store.save(result)
            known[row.trial.trial_id] = row.status
    return store


def _finish(prepared: PreparedStudy, store: "Store", interrupted: bool, quiet: bool) -> int:
    """Writes the report, prints the summary and the report's path; gives the exit code."""
    from analysis.report.report import write_report
    from study.cli.terminal import print_summary

    out = prepared.configuration.out
    records = store.records()
    statuses = statuses_of(records)
    left = ordered(statuses.get(row.trial.trial_id, "missing") for row in prepared.rows if row.trial is not None)
    report = write_report(out, partial=interrupted and "missing" in left)
    if not quiet:
        print_summary(report.summary.columns, report.summary.rows)
        if report.summary.left_out:
            say(report.summary.left_out)
        say(", ".join(f"{count} {status.replace('_', ' ')}" for status, count in left.items()))
    for record in records:
        if record["status"] in ("failed", "timeout"):
            say(
                f"{record['status']}: {record['trial_id']}: {record['reason']}; log: {log_path(store, record) or 'none'}"
            )
    print(report.path)
    return SOME_FAILED if {"failed", "timeout", "missing"} & set(left) else DONE


def plan_as_json(prepared: PreparedStudy) -> dict[str, Any]:
    """A plan as plain values."""
    return {
        "study": prepared.study.name,
        "question": prepared.study.question,
        "out": prepared.configuration.out,
        "counts": prepared.counts,
        "estimate": prepared.estimate.__dict__,
        "trials": [
            {
                "trial_id": row.trial.trial_id if row.trial else None,
                "status": row.status,
                "reason": row.reason,
                "fields": row.trial.model_dump() if row.trial else dict(row.fields),
            }
            for row in prepared.rows
        ],
    }


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _check_workload(configuration: Configuration) -> None:
    """Imports a user's workload file here, where its error is one line, and not in every rank."""
    for spec in configuration.axes.get("workload", ()):
        from trainables.user_workload import load_user_workload

        with contextlib.redirect_stdout(sys.stderr):  # what the file prints is no result of the study's
            load_user_workload(spec)
