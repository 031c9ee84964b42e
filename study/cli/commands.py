"""The `plan` and `run` commands: from a configuration to a plan, from a plan to results and a report."""

import contextlib
import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.capacity import NodeCapacity, gpus, local_capacity
from study.cli import process
from study.cli.configuration import Configuration, resolve
from study.cli.host import cluster_lines, started_ray, watched_host
from study.cli.prepared import (
    PreparedStudy,
    concurrent_trainings,
    does_not_fit_lines,
    refuse_secrets,
    warnings,
    workload_warnings,
)
from study.cli.process import interrupt, on_ending_signals
from study.cli.progress import run_shown, waiting
from study.cli.status import failure_lines, failure_of
from study.errors import DOES_NOT_FIT, DONE, INTERRUPTED, NOT_WRITTEN, SOME_FAILED, print_to_stderr
from study.options import explicit_options
from study.orchestrate.cluster import Cluster, connect, find_cluster, has_lost_servers
from study.orchestrate.discovery.address import Target, is_local
from study.orchestrate.processes.watch import ClusterLost, ServerDied
from study.orchestrate.protocol import KnownTrials
from study.plan.estimate import blocks, estimate
from study.plan.trials import FINAL_STATUSES, LAYOUT_FIELDS, PlannedTrial, plan_trials
from study.store.records import count_statuses, statuses_of
from study.store.redaction import redacted
from study.studies.basic import STUDIES
from study.studies.own_code import own_code_study, workload_study
from study.studies.study import Study
from trainables.clock import unix_s
from trainables.rules import unmet_requirement
from trainables.scratch import user_folder

if TYPE_CHECKING:
    from study.store.store import Store


def configure(options: Mapping[str, Any]) -> Configuration:
    """Return the configuration that a command's options describe."""
    return resolve(explicit_options(dict(options)), options["config"])


def planning_nodes(address: str | None) -> Sequence[NodeCapacity]:
    """Return the nodes that a run would use: this host, without importing Ray, or those that the cluster reports."""
    target = target_of(address, quiet=False)
    if target.address is None:
        return local_capacity()
    with connect(target) as cluster:
        print_to_stderr(f"planned for {cluster.description}")
        return cluster.nodes


def target_of(address: str | None, quiet: bool) -> Target:
    """Return the cluster that a command uses. Says what it waits for, and why an address on this host is ignored."""
    say = (lambda line: None) if quiet else print_to_stderr
    if is_local(address):  # no need to import anything of Ray
        return Target()
    target = find_cluster(address, say)
    if target.ignored:
        say(f"warning: {target.ignored}; a local Ray is used; fix: {target.ignored_fix}")
    return target


def prepare(configuration: Configuration, nodes: Sequence[NodeCapacity]) -> PreparedStudy:
    """Plan a configuration on these nodes. Trials that the results folder already holds are taken into account."""
    study_of = _study_of(configuration)
    study = study_of(nodes).only(configuration.case).with_overrides(configuration.axes, configuration.repeats)
    store = existing_store(configuration.out, study.name)
    records, damaged = store.scan() if store else ([], [])
    known = KnownTrials.of(records)
    rows = plan_trials(study, nodes, known.statuses, known.out_of_memory)
    refuse_secrets(row.trial for row in rows if row.trial is not None)
    if store and damaged:
        _report_damaged(store, damaged, {row.trial.trial_id for row in rows if row.trial is not None})
    does_not_fit = _rows_that_do_not_fit(configuration, study_of(nodes), rows)
    pending = [row.trial for row in rows if row.status == "pending" and row.trial is not None]
    concurrent = concurrent_trainings(configuration.max_concurrent, pending, nodes)
    time_and_cost = estimate(rows, records, configuration.price_per_gpu_hour, concurrent)
    return PreparedStudy(configuration, study, rows, does_not_fit, time_and_cost, concurrent, known, gpus(nodes))


def _study_of(configuration: Configuration) -> Callable[[Sequence[NodeCapacity]], Study]:
    if configuration.is_named:
        return STUDIES[configuration.study]
    own = own_code_study if configuration.has_own_code else workload_study
    return functools.partial(own, name=configuration.study)


def _rows_that_do_not_fit(
    configuration: Configuration, defaults: Study, rows: Sequence[PlannedTrial]
) -> Sequence[PlannedTrial]:
    """Return the rows that keep a plan from starting.

    A study's default layout may leave some rows infeasible. A layout that the user requested may not.
    """
    if all(row.status in ("skipped", "infeasible") for row in rows):
        return list(rows)
    requested_layout = any(  # --print-config writes the study's defaults too, which are no request
        tuple(configuration.axes[name]) != tuple(defaults.axes.get(name, (defaults.base.get(name),)))
        for name in set(configuration.axes) & set(LAYOUT_FIELDS)
    )
    infeasible = [
        row for row in rows if row.status == "infeasible" and not (row.trial and unmet_requirement(row.trial))
    ]
    return infeasible if requested_layout or len(infeasible) == len(rows) else []


def _report_damaged(store: "Store", damaged: Sequence[str], planned: Container[str]) -> None:
    """Warn about damaged trials that will run again.

    Raises StoreError for those outside the plan: no run replaces them, and no report can be written with them.
    """
    from study.store.store import StoreError

    strays = [trial_id for trial_id in damaged if trial_id not in planned]
    if strays:
        folders = ", ".join(store.trial_folder(trial_id) for trial_id in strays)
        raise StoreError(f"damaged trials that are not part of this plan: {folders}; restore or remove these folders")
    print_to_stderr(f"warning: {store.out}: damaged trials will run again: {', '.join(damaged)}")


def existing_store(out: str, study_name: str) -> "Store | None":
    """Return the results folder `out`, or None if it does not exist. Raises StoreError for another study's folder."""
    if "://" not in out and not os.path.lexists(out):
        _refuse_below_a_file(out)
        return None  # planning starts faster without importing the store
    from study.store.store import Store, refuse_other_study

    store = Store.existing(out)
    if store is not None:
        refuse_other_study(out, store.name() or study_name, study_name)
    return store


def _refuse_below_a_file(out: str) -> None:
    """Raise StoreError if the folder `out` cannot be created because one of its parents is a file."""
    nearest = next(parent for parent in Path(os.path.abspath(out)).parents if os.path.lexists(parent))
    if not os.path.isdir(nearest):
        from study.store.store import StoreError

        raise StoreError(f"{out} cannot be created: {nearest} is not a folder; choose another --out")


def print_what_does_not_fit(prepared: PreparedStudy) -> None:
    """Print what keeps a plan from starting, one line per reason."""
    for line in does_not_fit_lines(prepared):
        print_to_stderr(line)


def print_warnings(prepared: PreparedStudy) -> None:
    """Print what a user should know before trusting a plan's trials."""
    configuration = prepared.configuration
    lines = warnings(configuration.max_concurrent, prepared.concurrent, prepared.pending)
    for line in (*lines, *workload_warnings(configuration.axes, prepared.pending)):
        print_to_stderr(line)


def run(configuration: Configuration, command: str, quiet: bool, strict: bool = False, table: bool = False) -> int:
    """Run the missing trials, write the report and print the summary card. Return the exit code.

    table: also print one row per configuration.

    Raises HostBusy if `strict` and something disturbs timings on this host.
    """
    from study.store.lock import hold, hold_existing

    prepared: PreparedStudy | None = None
    store: Store | None = None
    interrupted, lost = False, None
    with (
        contextlib.ExitStack() as until_reported
    ):  # disconnecting last: if Ray was stopped too, it may end this process
        until_reported.enter_context(on_ending_signals(interrupt))
        ray_log = until_reported.enter_context(process.ray_output())
        try:
            is_held = hold_existing(configuration.out, until_reported)
            prepared, target, cluster = _prepare_to_run(configuration, until_reported, quiet)
            if prepared.does_not_fit:
                print_what_does_not_fit(prepared)
                return DOES_NOT_FIT
            if not is_held:
                hold(configuration.out, until_reported)
            store = _open(prepared, command)
            process.tell_parent(out=configuration.out, command=command)
            if prepared.pending:
                until_reported.enter_context(watched_host(prepared.pending, target, cluster, quiet, strict))
                if cluster is None:
                    connection = connect(target, say=print_to_stderr, trials=prepared.pending)
                    cluster = until_reported.enter_context(started_ray(connection, quiet))
                until_reported.enter_context(on_ending_signals(interrupt))  # Ray has replaced one
                process.move_to_session(ray_log, cluster.log_dir)
                interrupted = _measure(prepared, store, cluster, quiet)
                if interrupted:
                    leave_if_servers_died(cluster, command)
            if not interrupted:
                process.collect_evidence(prepared.study.evidence, store)
        except KeyboardInterrupt:
            if prepared is None or store is None:
                raise
            interrupted = True
        except ClusterLost as error:
            assert prepared is not None and store is not None
            lost = error
            tell_cluster_lost(error, command)
        early = lost.exit_code if lost else INTERRUPTED if interrupted else None
        finish = functools.partial(_finish, prepared, store, early is not None, quiet, table)
        return end_with_report(finish, store.address("trials"), early, command)


def _prepare_to_run(
    configuration: Configuration, until_reported: contextlib.ExitStack, quiet: bool
) -> tuple[PreparedStudy, Target, Cluster | None]:
    """Return the plan, its cluster and, unless that is local, the connection. A local Ray starts later, if at all."""
    if is_local(configuration.address):
        prepared = prepare(configuration, local_capacity())
        if not prepared.does_not_fit:
            _check_workload(configuration, quiet)
        return prepared, Target(), None
    _check_workload(configuration, quiet)
    target = target_of(configuration.address, quiet)
    if target.address is None:
        return prepare(configuration, local_capacity()), target, None
    cluster = until_reported.enter_context(connect(target))
    return prepare(configuration, cluster.nodes), target, cluster


def leave_if_servers_died(cluster: Cluster, command: str) -> None:
    """End this process after an interrupt that also ended Ray's servers. Its parent writes the report."""
    if has_lost_servers(cluster):  # by a signal to every process of a job
        print_to_stderr(f"warning: interrupted; resume with: {command}")
        process.leave_report_to_parent(INTERRUPTED)


def tell_cluster_lost(lost: ClusterLost, command: str) -> None:
    """Print that the cluster is lost. If Ray is about to abort this process, end it; its parent writes the report."""
    print_to_stderr(f"error: {lost}; finished trials are saved; resume with: {command}")
    if isinstance(lost, ServerDied):
        process.leave_report_to_parent(lost.exit_code)


def end_with_report(finish: Callable[[], int], trials_folder: str, early: int | None, command: str) -> int:
    """Call `finish`, which writes the report and returns an exit code. Tell the parent the exit code and return it.

    After an interrupt or an error, print the command that resumes. early: exit code of a run that ended early, None if
    it is complete.
    """
    exit_code = _written(finish, trials_folder, early, command)
    process.tell_parent(exit_code=exit_code)  # whatever happens while this process leaves the cluster
    return exit_code


def _written(finish: Callable[[], int], trials_folder: str, early: int | None, command: str) -> int:
    from analysis.read.errors import ResultsError
    from study.store.store import StoreError

    message, exit_code = "interrupted", DONE
    try:
        with on_ending_signals(signal.SIG_IGN):  # they mean: end with a report, which is being written
            exit_code = finish()
    except (StoreError, ResultsError) as error:
        print_to_stderr(f"error: no report: {redacted(str(error))}")
        message, exit_code = f"the trials in {trials_folder} are kept", NOT_WRITTEN
    except KeyboardInterrupt:
        early, message = INTERRUPTED, "interrupted before the report was written"
    if early == INTERRUPTED:
        print_to_stderr(f"warning: {message}; resume with: {command}")
        return INTERRUPTED
    if exit_code == NOT_WRITTEN:
        print_to_stderr(f"warning: {message}; run the same command again: {command}")
    return exit_code if early is None else early


def _measure(prepared: PreparedStudy, store: "Store", cluster: Cluster, quiet: bool) -> bool:
    """Run the pending trials. Return True if Ctrl-C or a signal interrupted them."""
    from study.cli.progress import Progress

    configuration = prepared.configuration
    if not quiet:
        for line in cluster_lines(cluster, configuration.address, prepared.gpus):
            print_to_stderr(line)
        print_to_stderr(f"study {prepared.study.name}: {prepared.outline}")
    print_warnings(prepared)
    in_order = blocks(prepared.pending, configuration.order_seed)
    progress = Progress(
        prepared.study.name,
        list(itertools.chain.from_iterable(in_order)),
        quiet=quiet,
        planned=prepared.planned,
        expected=prepared.estimate.expected,
    )
    return run_shown(
        progress,
        in_order,
        store,
        cluster,
        isolate=configuration.isolate,
        trial_timeout_s=configuration.trial_timeout_s,
        max_concurrent=prepared.concurrent,
        known=prepared.known,
    )


def _open(prepared: PreparedStudy, command: str) -> "Store":
    """Open the results folder, and save the trials whose outcome is known without running them."""
    import yaml

    from study.store import checkpoints
    from study.store.environment import package_versions
    from study.store.result import TrialResult
    from study.store.store import Store

    planned = [row.trial.trial_id for row in prepared.rows if row.trial is not None]
    steps: dict[str, list[str]] = {}
    for row in prepared.rows:
        if prepared.study.ladder and row.trial is not None and row.case not in prepared.study.extra_trials:
            steps.setdefault(row.case, []).append(row.trial.trial_id)
    ladder = {"ladder_steps": [{"name": name, "trial_ids": ids} for name, ids in steps.items()]} if steps else {}
    store = Store.open(
        prepared.configuration.out,
        name=prepared.study.name,
        question=prepared.study.question,
        configuration=yaml.safe_load(prepared.yaml)
        | {"planned_trials": planned}
        | ladder
        | dict(prepared.study.report),
        versions=package_versions(),
        command=command,
    )
    known = prepared.known.statuses
    checkpoints.drop(store, [trial_id for trial_id, status in known.items() if status in FINAL_STATUSES])
    for row in prepared.rows:
        if row.trial is None or row.status not in ("infeasible", "pruned"):
            continue
        if known.get(row.trial.trial_id) != row.status:
            result = TrialResult(
                trial=row.trial, status=row.status, reason=row.reason, started_at=unix_s(), duration_s=0.0
            )
            store.save(result)
            known[row.trial.trial_id] = row.status
    return store


def _finish(prepared: PreparedStudy, store: "Store", interrupted: bool, quiet: bool, table: bool) -> int:
    """Write the report, print the summary card and the path of the report. Return the exit code."""
    from study.cli.terminal import print_card, print_summary
    from study.store.spool import flush
    from study.store.store import StoreError

    out = prepared.configuration.out
    with contextlib.suppress(StoreError):  # the folder may be back
        flush(store, user_folder())
    records = store.records()
    statuses = statuses_of(records)
    counts = count_statuses(
        statuses.get(row.trial.trial_id, "missing") for row in prepared.rows if row.trial is not None
    )
    with waiting("writing the report", quiet):
        from analysis.report.report import write_report

        report = write_report(out, partial=interrupted and "missing" in counts)
    if table:
        print_summary(report.summary.columns, report.summary.rows)
        print()
    if not quiet:
        print_card(report.card)
        print()
        if report.summary.left_out:
            print_to_stderr(f"warning: {report.summary.left_out}")
        print_to_stderr(", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items()))
    failed = [failure_of(store, record) for record in records if record["status"] in ("failed", "timeout")]
    for line in failure_lines(failed, length=200):
        print_to_stderr(f"error: {line}")
    print(report.path)
    return SOME_FAILED if {"failed", "timeout", "missing"} & set(counts) else DONE


def _check_workload(configuration: Configuration, quiet: bool) -> None:
    """Import a user's workload file in this process, so that an error is one line instead of one per rank."""
    for spec in configuration.axes.get("workload", ()):
        # stdout is reserved for results
        with waiting(f"importing {spec}", quiet), contextlib.redirect_stdout(sys.stderr):
            from trainables.user_workload import load_user_workload  # takes seconds

            load_user_workload(spec)
