"""Trials of different environments are kept apart in every table, and the difference is reported."""

import re
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.predict.inputs import ReportInputs, report_inputs, with_models
from analysis.read.environment import comparable_fingerprints, difference, fingerprint
from analysis.read.results import load
from analysis.report.report import Report, write_report
from analysis.study import analyse
from tests.support.frames import FIELDS, environment, record, steps, write_study, write_trial
from tests.support.report import show_figures

GPU = FIELDS | {"device": "cuda", "steps": 4, "cpus_per_rank": 8}


def trial(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**fields, "environment": environment(fields) | more}


def mixed(directory: Path, *, torch: str = "2.12.0") -> Path:
    """Two repeats each of 1 and 2 GPUs; 1 GPU with another torch version, twice as fast; and a failed trial."""
    write_study(directory)
    for size in (1, 2):
        for repeat in (0, 1):
            fields = GPU | {"world_size": size, "repeat": repeat}
            write_trial(directory, record(fields), steps(fields, 0.1))
    for repeat in (2, 3):
        fields = GPU | {"repeat": repeat}
        other = record(fields)
        other["environment"]["versions"]["torch"] = torch
        write_trial(directory, other, steps(fields, 0.05))
    failed = record(GPU | {"repeat": 4}, "failed", "rank 0: lost")
    failed["environment"]["versions"]["torch"] = torch
    write_trial(directory, failed)
    return directory


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """Return a folder with two environments and its report, without figures."""
    directory = mixed(tmp_path_factory.mktemp("mixed") / "results")
    with pytest.MonkeyPatch.context() as patch:
        show_figures(patch, set())
        return directory, write_report(directory)


@pytest.fixture(scope="module")
def pair(reported: tuple[Path, Report]) -> tuple[ReportInputs, ReportInputs]:
    """Return the analyses of the two environments, that with most trials first."""
    first, second = report_inputs(load(reported[0]))
    return first, second


def test_hosts_of_the_same_type_are_one_environment() -> None:
    first, second = environment(GPU, host="node-a"), environment(GPU, host="node-b")
    assert fingerprint({"environment": first}) == fingerprint({"environment": second})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda e: e["versions"].update(torch="2.12.0"), "torch 2.12.0 instead of 2.11.0"),
        (lambda e: e["versions"].update(nccl="2.28.9"), "nccl 2.28.9 instead of none"),
        (lambda e: e["variables"].update(NCCL_ALGO="Ring"), "NCCL_ALGO Ring instead of none"),
        (lambda e: e["variables"].update(OMP_NUM_THREADS="2"), "OMP_NUM_THREADS 2 instead of 1"),
        (lambda e: e.update(measuring_code="beef"), "measuring code beef instead of c0de"),
        (
            lambda e: e["nodes"][0].update(cpu_model="Other CPU"),
            "CPU Other CPU instead of AMD EPYC 9554 64-Core Processor",
        ),
        (
            lambda e: e["nodes"][0]["gpus"][0].update(name="NVIDIA H100", driver="580.1"),
            "device NVIDIA H100 instead of NVIDIA H200 and driver 580.1 instead of 570.86",
        ),
    ],
)  # fmt: skip
def test_a_difference_is_reported_with_both_values(change: Any, text: str) -> None:
    other = trial(GPU)
    change(other["environment"])
    assert difference(fingerprint(other), fingerprint(trial(GPU))) == text


def test_an_unused_gpu_makes_no_difference() -> None:
    other = trial(GPU)
    other["environment"]["nodes"][0]["gpus"][5] |= {"name": "NVIDIA T4", "driver": "535.1"}
    assert fingerprint(other) == fingerprint(trial(GPU))


def test_variables_set_by_fields_of_the_trial_make_no_difference() -> None:
    variables = {"OMP_NUM_THREADS": "1", "NCCL_P2P_DISABLE": "1"}
    emulated = trial(GPU, variables=variables, set_by_study=["NCCL_P2P_DISABLE"])
    by_hand = trial(GPU, variables=variables)
    assert fingerprint(emulated) == fingerprint(trial(GPU))
    assert difference(fingerprint(by_hand), fingerprint(trial(GPU))) == "NCCL_P2P_DISABLE 1 instead of none"


def test_a_variable_of_the_user_that_a_field_also_sets_makes_no_difference() -> None:
    """NCCL_NVLS_ENABLE=0 is set in the user's shell, and again by trials with an emulated interconnect."""
    user = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    rows = [trial(GPU, variables=user), trial(GPU, variables=user, set_by_study=["NCCL_NVLS_ENABLE"])]
    same = pd.DataFrame(rows).assign(trial_id=["a", "b"])
    assert comparable_fingerprints(same)["a"] == comparable_fingerprints(same)["b"]
    mixed = pd.DataFrame([*rows, trial(GPU, variables={"OMP_NUM_THREADS": "1"})]).assign(trial_id=["a", "b", "c"])
    assert comparable_fingerprints(mixed)["a"] != comparable_fingerprints(mixed)["c"], (
        "two values set by the user are two environments"
    )


def test_a_commit_with_unchanged_measuring_code_makes_no_difference() -> None:
    assert fingerprint(trial(GPU, git={"commit": "89abcdef", "dirty": True})) == fingerprint(trial(GPU))


def test_trials_without_a_digest_of_the_measuring_code_join_the_only_known_digest() -> None:
    rows = [trial(GPU, measuring_code=None), trial(GPU)]
    pair = comparable_fingerprints(pd.DataFrame(rows).assign(trial_id=["old", "new"]))
    assert pair["old"] == pair["new"]
    other = trial(GPU, measuring_code="beef")
    three = comparable_fingerprints(pd.DataFrame([*rows, other]).assign(trial_id=["old", "new", "other"]))
    assert three["old"] not in (three["new"], three["other"]), "with two digests it is unknown which one applies"


def test_one_thread_per_cpu_of_a_rank_makes_no_difference() -> None:
    two, four = ({**GPU, "cpus_per_rank": n} for n in (2, 4))
    assert fingerprint(trial(two, variables={"OMP_NUM_THREADS": "2"})) == fingerprint(
        trial(four, variables={"OMP_NUM_THREADS": "4"})
    )


def test_each_environment_is_analysed_separately_most_trials_first(pair: tuple[ReportInputs, ReportInputs]) -> None:
    first, second = pair
    assert [first.environment["torch"], second.environment["torch"]] == ["2.11.0", "2.12.0"]
    assert first.configurations["step_s"].tolist() == pytest.approx([0.1, 0.1])
    assert second.configurations["step_s"].tolist() == pytest.approx([0.05])
    assert [first.configurations["n"].tolist(), second.configurations["n"].tolist()] == [[2, 2], [2]]
    for analysis in (first, second):
        done = analysis.results.trials.query("status == 'done'")["trial_id"]
        assert set(analysis.results.steps["trial_id"]) == set(done)
        assert {i for ids in analysis.configurations["trial_ids"] for i in ids} == set(done)


def test_trials_without_a_result_go_to_the_first_analysis(pair: tuple[ReportInputs, ReportInputs]) -> None:
    first, second = pair
    assert first.results.trials["status"].tolist().count("failed") == 1
    assert set(second.results.trials["status"]) == {"done"}


def test_one_analysis_of_two_environments_is_refused(reported: tuple[Path, Report]) -> None:
    with pytest.raises(ValueError, match=r"environments: torch 2\.12\.0 instead of 2\.11\.0$"):
        with_models(analyse(load(reported[0])))


def test_the_report_has_separate_sections_and_files_for_each_environment(reported: tuple[Path, Report]) -> None:
    directory, report = reported
    page = Path(report.path).read_text()
    markdown = (directory / "report/report.md").read_text()
    for text in (page, markdown):
        assert "environment: torch 2.12.0 instead of 2.11.0" in text  # title of the second section
        assert "2 with torch 2.12.0 instead of 2.11.0" in text  # notice in the first section
    first = pd.read_csv(directory / "report/tables/throughput.csv")
    second = pd.read_csv(directory / "report/tables/throughput-2.csv")
    assert (first["n"].tolist(), second["n"].tolist()) == ([2, 2], [2])
    assert not set(first["trial_ids"]) & set(second["trial_ids"])
    assert page.count("rank 0: lost") == page.count("has no result: lost") == 1  # table and summary of its section
    embedded = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)" download="([^"]+)"', page)
    contents = {name: b64decode(text).decode() for text, name in embedded}
    assert {"throughput.csv", "throughput-2.csv"} <= set(contents)
    assert all((directory / "report/tables" / name).read_text() == text for name, text in contents.items())
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("no_figures")
def test_tables_of_a_removed_environment_are_deleted(reported: tuple[Path, Report], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(reported[0], tmp_path / "results"))
    foreign = directory / "report/tables/mine-2.csv"
    foreign.write_text("mine")
    for folder in (directory / "trials").iterdir():
        if folder.name.endswith(("-2", "-3")):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    page = Path(write_report(directory).path).read_text()
    assert "another environment" not in page
    assert {path.name for path in (directory / "report/tables").glob("*-2.*")} == {"mine-2.csv"}


def test_the_terminal_shows_one_environment_and_mentions_the_other(reported: tuple[Path, Report]) -> None:
    summary = reported[1].summary
    assert [row[0] for row in summary.rows] == ["1", "2"]
    assert summary.left_out is not None
    assert "2 with torch 2.12.0 instead of 2.11.0" in summary.left_out
