"""The published studies in their small form, each by one command: everything runs that can, and the tables that it asks for are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.load.results import load_reduced
from analysis.predict.inputs import ReportInputs, with_models
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.verdict.answer import answer

pytestmark = [pytest.mark.xdist_group("shared ray"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent.parent
DP = "parallel 'dp' requires GPUs; on a CPU it would be one plain process"
TWO_NODES = "needs 2 nodes; there is 1"


def studied(name: str, address: str, out: Path) -> ReportInputs:
    command = [
        sys.executable,
        "-m",
        "study.scaling",
        "run",
        name,
        "--repeats",
        "1",
        "--steps",
        "1",
        "-q",
        "--address",
        address,
        "--out",
        str(out),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr
    assert Path(ended.stdout.strip()) == out / "report" / "index.html"
    return with_models(analyse(load_reduced(out)))


def reasons(found: ReportInputs) -> set[str]:
    """Why trials have no result; asserts that these alone have none."""
    trials = found.results.trials
    assert set(trials["status"]) <= {"done", "infeasible"}
    assert set(trials["trial_id"]) == set(found.results.study["configuration"]["planned_trials"])
    return set(trials.loc[trials["status"] != "done", "reason"])


@pytest.mark.parametrize(
    ("name", "lacking", "tables"),
    [
        ("forum-phases", {DP}, ["phases", "weak_scaling", "communication"]),
        ("acceleration-ladder", {DP, TWO_NODES}, ["ladder", "precision", "storage", "accuracy"]),
        ("hpml-lab4", {DP}, ["speed_up_weak", "exposed_cost", "communication", "bandwidth"]),
        ("vgg-case-study", {DP}, ["batch_size", "throughput", "weak_scaling", "accuracy"]),
        ("mlstm-scaling", set(), ["throughput", "weak_scaling", "bandwidth"]),
    ],
)
def test_a_published_study_runs_by_one_command_and_shows_what_it_asks_for(
    name: str, lacking: set[str], tables: list[str], local_ray: str, tmp_path: Path
) -> None:
    found = studied(name, local_ray, tmp_path / "results")
    assert reasons(found) == lacking
    assert json.loads((tmp_path / "results" / "study.json").read_text())["name"] == name
    empty = [table for table in tables if TABLES[table](found).frame.empty]
    assert not empty
    told = " ".join(answer(found))
    if name == "acceleration-ladder":
        rungs = TABLES["ladder"](found).frame.query("machine == 'this study'").set_index("rung")
        assert list(rungs.index) == [
            "JPEG files, fp32, one GPU", "LMDB", "raw pixels in shared memory", "mixed precision (O1)",
            "fp16 with master weights (O2)", "pure fp16 (O3)", "DDP, fp32", "DDP, mixed precision",
        ]  # fmt: skip
        assert set(rungs["samples"].round(6)) == {8.0}, "strong scaling"
        assert (rungs["trained_percent"] > 50).all()
        assert "bf16 reaches" in told
    elif name == "mlstm-scaling":
        assert TABLES["throughput"](found).frame["characters_per_s"].notna().all()
        assert "characters/s" in told
    else:
        assert "2 CPU ranks reach" in told
