"""The `improve` command: run round after round until the search has ended, then write the report."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from analysis.duration import duration
from analysis.text import number
from study.capacity import gpus, local_capacity
from study.cli import process
from study.cli.commands import (
    end_with_report,
    existing_store,
    leave_if_servers_died,
    target_of,
    tell_cluster_lost,
)
from study.cli.host import cluster_lines, started_ray, watched_host
from study.cli.process import interrupt, on_ending_signals
from study.cli.progress import Progress, run_shown, waiting
from study.errors import DONE, INTERRUPTED, SOME_FAILED, counted, print_to_stderr
from study.improve.attempts import Attempt
from study.improve.evidence import Evidence
from study.improve.observe import Observer
from study.improve.record import record_of
from study.improve.rounds import Round, Settings
from study.improve.search import Search, replay
from study.improve.start import Request, settings_for
from study.orchestrate.cluster import Cluster, SharedKeeper, connect
from study.orchestrate.discovery.address import Target
from study.orchestrate.processes.watch import ClusterLost
from study.orchestrate.protocol import KnownTrials
from study.store.environment import package_versions
from study.store.lock import hold, hold_existing
from study.store.store import Store
from trainables.trial import Trial

QUESTION = "Which changes make this training faster, and by how much?"

RunBlocks = Callable[[Sequence[Sequence[Trial]], Store], bool]


@dataclass
class Session:
    """An open search: its settings, its folder, and what its trials show."""

    asked: Request
    settings: Settings
    command: str
    observer: Observer

    def read(self) -> tuple[Search, Evidence]:
        """Return the state of the search, and the trials that have ended by now."""
        evidence = self.observer.evidence()
        return replay(self.settings, evidence), evidence

    def save(self, found: Search, evidence: Evidence | None = None) -> None:
        """Write study.json with the state of the search. evidence: None before the first trial."""
        configuration = self.asked.configuration
        store = Store.open(
            configuration.out,
            name=configuration.study,
            question=QUESTION,
            configuration={"planned_trials": _planned(found)},
            versions=package_versions(),
            command=self.command,
        )
        if not found.rounds or evidence is None:
            return
        record = record_of(self.settings, found, evidence, self.observer.tokens_per_sample)
        store.set_entry("improve", record)
        if self.asked.directory and found.chosen is not None:
            improved = Store.at(self.asked.directory)
            if not improved.is_packed:
                improved.set_entry("improve", record | {"measured_in": configuration.out})


def improve(asked: Request, command: str, *, quiet: bool, strict: bool, as_json: bool) -> int:
    """Search from where the results folder stands, write the report and print the card. Return the exit code."""
    out, address = asked.configuration.out, asked.configuration.address
    existing_store(out, asked.configuration.study)
    interrupted, lost, session = False, None, None
    with contextlib.ExitStack() as until_reported:
        until_reported.enter_context(on_ending_signals(interrupt))
        ray_log = until_reported.enter_context(process.ray_output())
        try:
            is_held = hold_existing(out, until_reported)
            target, cluster = target_of(address, quiet), None
            if target.address is not None:
                cluster = until_reported.enter_context(connect(target))
            settings = settings_for(asked, cluster.nodes if cluster else local_capacity())
            if not is_held:
                hold(out, until_reported)
            session = Session(asked, settings, command, Observer(out))
            session.save(*(session.read() if is_held else (Search(), None)))
            process.tell_parent(out=out, command=command)
            cluster = _connected(session, target, cluster, until_reported, quiet, strict)
            if cluster is not None:
                process.move_to_session(ray_log, cluster.log_dir)
                interrupted = _search(session, cluster, quiet)
                if interrupted:
                    leave_if_servers_died(cluster, command)
        except KeyboardInterrupt:
            if session is None:
                raise
            interrupted = True
        except ClusterLost as error:
            lost = error
            tell_cluster_lost(error, command)
        assert session is not None
        early = lost.exit_code if lost else INTERRUPTED if interrupted else None
        return end_with_report(partial(_finish, session, quiet, as_json), _trials_folder(out), early, command)


def _connected(
    session: Session,
    target: Target,
    cluster: Cluster | None,
    until_reported: contextlib.ExitStack,
    quiet: bool,
    strict: bool,
) -> Cluster | None:
    """Return the cluster, connected; None if the search has ended and nothing is left to run."""
    trials = [trial for block in next_blocks(*session.read()) for trial in block]
    if not trials:
        return None
    until_reported.enter_context(watched_host(trials, target, cluster, quiet, strict))
    connected = cluster or until_reported.enter_context(
        started_ray(connect(target, say=print_to_stderr, trials=trials), quiet)
    )
    until_reported.enter_context(on_ending_signals(interrupt))  # Ray has replaced one
    if not quiet:
        for line in cluster_lines(connected, session.asked.configuration.address, gpus(connected.nodes)):
            print_to_stderr(line)
    return connected


def _search(session: Session, cluster: Cluster, quiet: bool) -> bool:
    """Run rounds until the search has ended. Return True if Ctrl-C or a signal interrupted it."""
    configuration = session.asked.configuration
    stack = contextlib.ExitStack()
    shared = SharedKeeper(stack)

    def run(blocks: Sequence[Sequence[Trial]], store: Store) -> bool:
        return run_shown(
            Progress(configuration.study, [*chain(*blocks)], quiet=quiet, ending="ending the round"),
            blocks,
            store,
            cluster,
            isolate=configuration.isolate,
            trial_timeout_s=configuration.trial_timeout_s,
            known=KnownTrials.of(store.records()),
            shared=shared,
        )

    try:
        return search_rounds(session, run, print_nothing if quiet else print_to_stderr)
    finally:
        with waiting("ending the worker group", quiet):
            stack.close()


def search_rounds(session: Session, run: RunBlocks, say: Callable[[str], None]) -> bool:
    """Run rounds until the search has ended. Return True if one was interrupted.

    run: runs trials, one block per worker group, and returns True if it was interrupted. If the last search ended
    because the baseline failed, its failed trials run again first.
    """
    found, evidence = session.read()
    rerun = bool(found.problem)
    while blocks := next_blocks(found, evidence, rerun):
        rerun = False
        session.save(found, evidence)
        if found.pending:
            say(round_line(found.pending))
        if run(blocks, Store.at(session.asked.configuration.out)):
            return True
        shown = len(found.attempts)
        found, evidence = session.read()
        if not {trial.trial_id for block in blocks for trial in block} <= {*evidence.runs}:
            return False  # trials that cannot be saved, or a script that does not work: the errors say so
        for attempt in found.attempts[shown:]:
            say(attempt_line(attempt))
    return False


def next_blocks(found: Search, evidence: Evidence, rerun: bool = True) -> list[list[Trial]]:
    """Return the trials that run next, one block per worker group; empty if the search has ended.

    rerun: if the baseline has failed, return the failed trials of its last round, instead of nothing.
    """
    runs = evidence.runs
    if found.pending:
        blocks = [[p.trial for p in block if p.trial.trial_id not in runs] for block in found.pending.blocks]
    elif found.problem and rerun:
        failed = {name for name, known in runs.items() if known.status in ("failed", "timeout")}
        blocks = [[p.trial for p in block if p.trial.trial_id in failed] for block in found.rounds[-1].blocks]
    else:
        blocks = []
    return [block for block in blocks if block]


def print_nothing(line: str) -> None:
    """Print nothing."""


def _planned(found: Search) -> list[str]:
    rounds = [*found.rounds, *([found.pending] if found.pending else [])]
    return [name for planned in rounds for name in planned.trial_ids]


def _finish(session: Session, quiet: bool, as_json: bool) -> int:
    """Save the record, write the report, print the card and the path of the report. Return the exit code."""
    from study.cli.terminal import print_card

    found, evidence = session.read()
    session.save(found, evidence)
    with waiting("writing the report", quiet):
        from analysis.report.card import as_json as card_as_json
        from analysis.report.report import write_report

        report = write_report(session.asked.configuration.out, partial=found.pending is not None)
    if as_json:
        print(json.dumps(card_as_json(report.card), indent=1))
    elif not quiet:
        print_card(report.card)
        print()
    if found.problem:
        print_to_stderr(f"error: the baseline has no result: {found.problem}; fix: {_fix(session)}")
    if found.least and not found.attempts:
        print_to_stderr(
            f"warning: nothing was tried, because a lever and the final comparison would end after "
            f"{duration(found.least[1])}; fix: a larger --budget"
        )
    if not as_json:
        print(report.path)
    return SOME_FAILED if found.problem or found.pending else DONE


def _fix(session: Session) -> str:
    """Say what to do if the baseline has no result."""
    log = f"see its log in {_trials_folder(session.asked.configuration.out)}"
    return f"more --epochs, a lower --target-accuracy, or {log}" if session.settings.is_training else log


def _trials_folder(out: str) -> str:
    return os.path.join(out, "trials")


# ---------------------------------------------------------------------------------------------------------- messages


def round_line(pending: Round) -> str:
    """Return one line about the round that starts."""
    names = [configuration[-1] for configuration in pending.configurations[1:]]
    text = {
        "baseline": "the baseline alone, to see what bounds it",
        "levers": f"try {', '.join(names)}",
        "confirm": f"measure again: {', '.join(names)}",
        "combine": f"combine: {' + '.join(pending.configurations[-1])}",
        "final": f"compare {' + '.join(pending.configurations[-1])} with the baseline",
    }[pending.kind]
    groups = counted(pending.groups, "worker group")
    return f"round {pending.number + 1}: {text} ({counted(len(pending.planned), 'trial')} in {groups})"


def attempt_line(attempt: Attempt) -> str:
    """Return one line about a lever that was tried."""
    if attempt.status != "done":
        return f"{attempt.lever}: {attempt.status.replace('_', ' ')}: {attempt.reason}"
    value, low, high = (number(part, 2) for part in attempt.gain)
    is_bounded = attempt.bound is not None and math.isfinite(attempt.bound)
    bound = f", at most {number(attempt.bound, 2)}x expected" if is_bounded else ""
    judged = ": a gain" if attempt.gain.low > 1 else ": large, and left to the final comparison to verify"
    return f"{attempt.lever}: {value}x [{low}, {high}]{bound}{judged if attempt.is_gain else ''}"
