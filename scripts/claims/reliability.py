"""The reliability table of docs/evidence.md: a row per class of fault, what a study does then, and what shows it."""

import re

from benchmarks.truth.faults import EVERY
from scripts.claims.sources import ROOT, Cell, ClaimError, Entries, cell, figure, on_page, summary, unit_number

_, stated, shows = on_page("docs/evidence.md")

CLI, ORCHESTRATE, STORE = "tests/study/cli", "tests/study/orchestrate", "tests/study/store"
SIGNALS, LOST = f"{CLI}/test_streams_and_signals.py", "tests/system/test_end_to_end.py"

REPEATED = {
    "rank killed": "the trial fails with rank and node, the next one has a new group",
    "worker of Ray Train killed": "the same, for the process that starts those of a rank",
    "rank killed while its group starts": "the same",
    "rank hangs": "the trial is a timeout that names the rank, its node and the line of code",
    "link cut for 30 s": "the trial fails with the node, the study goes on when the link is back",
    "disk full": "each save is retried, then kept on the local disk, else named as not saved",
    "driver killed": "finished trials stay, all processes end, the same command goes on",
    "raylet killed": "the raylet of another node: its trial fails, the study waits for the node",
    "out of memory on one node": "the trial is a row, trials with larger batches are left out",
    "clocks an hour apart": "durations are those of one clock",
    "the same command completes exactly the planned trials": "after all of these, nothing is lost or measured twice",
}
"""Faults of the benchmark, and what a study does then."""

TESTED = (
    (
        "raylet of a local Ray killed, before or during trials",
        "one line, partial report, exit code 4",
        LOST,
        "test_killed_and_interrupted_studies_lose_nothing_and_the_same_command_completes_them",
    ),
    (
        "head of a joined cluster (its GCS) lost",
        "the same",
        LOST,
        "test_a_head_that_no_longer_answers_ends_a_study_with_one_line_and_a_partial_report",
    ),
    (
        "driver aborted by Ray, or killed by the kernel",
        "the same, exit code 4 or 70",
        SIGNALS,
        "test_a_process_that_ray_or_the_kernel_ends_leaves_a_partial_report_and_one_line",
    ),
    (
        "keeper killed",
        "its trial fails with the cause, the study goes on",
        f"{ORCHESTRATE}/test_tuning.py",
        "test_a_killed_keeper_fails_only_the_running_trial",
    ),
    (
        "Tune's process of a trial killed",
        "the trial is measured again",
        f"{ORCHESTRATE}/test_tuning.py",
        "test_a_trial_is_measured_although_tunes_process_for_it_was_killed",
    ),
    (
        "memory of a host full",
        "one retry, then one line with the largest process",
        f"{ORCHESTRATE}/test_tuning.py",
        "test_a_full_memory_is_retried_once_and_then_reported_with_the_largest_process",
    ),
    (
        "SIGINT, SIGTERM, SIGHUP, SIGQUIT",
        "partial report and the command that resumes, exit code 130",
        SIGNALS,
        "test_every_ending_signal_ends_with_a_partial_report_and_the_command_that_resumes",
    ),
    (
        "standard error closed or full",
        "the study goes on",
        SIGNALS,
        "test_progress_that_cannot_be_written_does_not_end_a_study",
    ),
    (
        "address that does not answer",
        "says what it waits for, then one line with the fix",
        f"{ORCHESTRATE}/test_discovery.py",
        "test_a_server_that_does_not_answer_is_reported_within_the_limit",
    ),
    (
        "address forged by another user",
        "it gets no token",
        f"{ORCHESTRATE}/test_discovery.py",
        "test_a_listener_of_another_user_gets_no_token",
    ),
    (
        "cluster without authentication",
        "refused by every command, with the two ways out",
        f"{ORCHESTRATE}/test_discovery.py",
        "test_every_command_says_the_same_of_a_cluster_without_authentication",
    ),
    (
        "results folder away during a save",
        "results wait on the local disk and are saved later",
        f"{STORE}/test_spool.py",
        "test_a_result_waits_for_the_folder_until_another_is_saved",
    ),
    (
        "writer killed in a save",
        "the trial is complete or absent",
        f"{STORE}/test_store.py",
        "test_a_writer_killed_at_any_moment_leaves_only_complete_trials",
    ),
    (
        "two runs into one folder",
        "the second is refused, with who holds it",
        f"{STORE}/test_lock.py",
        "test_a_second_run_is_refused_with_who_holds_the_folder_and_since_when",
    ),
    (
        "hostile or damaged results folder",
        "a report, or one line that names the folder, within limits of time and memory",
        "tests/analysis/report/test_any_folder.py",
        "test_a_changed_folder_gives_a_report_or_one_line",
    ),
    (
        "file that expands without bound (memory bomb)",
        "it is refused by its declared size",
        "tests/analysis/read/test_damaged.py",
        "test_a_table_that_declares_too_many_rows_is_not_read",
    ),
    (
        "hostile image set",
        "nothing is written outside the destination",
        "tests/trainables/data/images/test_convert.py",
        "test_a_class_of_a_manifest_that_is_no_folder_name_is_refused",
    ),
    (
        "busy host, or another study on it",
        "a warning, with `--strict` a refusal",
        f"{CLI}/test_host.py",
        "test_strict_refuses_a_busy_host_before_ray_starts",
    ),
    (
        "rank paused in a timed window",
        "named by rank, step and time",
        f"{ORCHESTRATE}/test_in_process.py",
        "test_the_report_states_a_rank_that_stopped_and_losses_that_are_not_finite",
    ),
    (
        "workload that replaces the clock",
        "changes no measurement",
        "tests/trainables/measure/test_run.py",
        "test_a_workload_that_replaces_the_clock_changes_no_measurement",
    ),
    (
        "rate that the device cannot reach",
        "stated with the results, by trial",
        "tests/analysis/verdict/test_trust.py",
        "test_a_rate_beyond_the_cores_of_the_host_is_a_caveat",
    ),
    (
        "losses that are NaN",
        "stated with the results",
        f"{ORCHESTRATE}/test_in_process.py",
        "test_the_report_states_a_rank_that_stopped_and_losses_that_are_not_finite",
    ),
    (
        "process of the workload that exits",
        "only its trial fails",
        f"{ORCHESTRATE}/test_in_process.py",
        "test_a_process_that_dies_or_starts_others_without_end_fails_only_its_trial",
    ),
    (
        "workload that starts processes without end",
        "beyond 1,000, rank and processes are killed; none outlives its rank",
        f"{ORCHESTRATE}/test_guard.py",
        "test_a_rank_that_starts_processes_without_end_is_killed_with_all_of_them",
    ),
    (
        "temporary files of killed studies",
        "`clean` removes them, and nothing that a study needs",
        "tests/trainables/test_scratch.py",
        "test_clean_removes_what_no_running_study_needs_and_nothing_else",
    ),
)
"""Faults that tests inject: the class, what a study does then, and file and name of one test."""


def shown_by(file: str, test: str) -> str:
    """Return the reference to a test. Raises ClaimError if it does not exist."""
    path = ROOT / file
    if not path.exists() or not re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE):
        raise ClaimError(f"no test {file}::{test}")
    return f"`{file}::{test}`"


def _repeated() -> list[tuple[str | Cell, ...]]:
    """Return a row per fault of the benchmark. Faults that its committed result lacks say so."""
    rows: list[tuple[str | Cell, ...]] = []
    for fault in EVERY:
        name = f"{fault}: survived"
        shown: str | Cell = f"not repeated yet: {shown_by(*_ONCE[fault])}" if fault in _ONCE else "not repeated yet"
        if name in summary("faults"):
            survived = figure("faults", name)
            missed = "" if survived.holds else ", which misses the goal"
            shown = cell("survived {:0} of {:0} times" + missed, survived, unit_number("faults", name))
        rows.append((fault, REPEATED[fault], shown))
    return rows


_ONCE = {
    "worker of Ray Train killed": (
        "tests/system/test_faults.py",
        "test_a_study_survives_every_other_fault_and_is_completed_by_the_same_command",
    ),
    "rank killed while its group starts": (
        f"{ORCHESTRATE}/test_tuning.py",
        "test_a_rank_killed_while_its_group_starts_is_reported_with_its_node",
    ),
}

ENTRIES: Entries = [
    shows(
        "reliability",
        ("fault", "what a study does", "shown by"),
        [*_repeated(), *((fault, answer, shown_by(file, test)) for fault, answer, file, test in TESTED)],
    ),
    stated("link cut for 30 s", "setting"),
]
