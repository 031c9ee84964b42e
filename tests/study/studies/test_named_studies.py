"""Each published study runs by one command in its CPU form and fills its tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load_reduced
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.verdict.answer import answer

pytestmark = [pytest.mark.xdist_group("shared ray"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent.parent
DP = "parallel 'dp' requires GPUs"
TWO_NODES = "needs 2 nodes"


def run_study(name: str, address: str, out: Path) -> ReportInputs:
    command = [
        sys.executable, "-m", "study.scaling", "run", name, "--repeats", "1", "--steps", "1", "-q",
        "--address", address, "--out", str(out),
    ]  # fmt: skip
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert process.returncode == 0, process.stderr
    assert Path(process.stdout.strip()) == out / "report" / "index.html"
    return with_models(analyse(load_reduced(out)))


def infeasible_reasons(inputs: ReportInputs) -> set[str]:
    """Return the reasons of infeasible trials, up to the first semicolon, and check that all others are done."""
    trials = inputs.results.trials
    assert set(trials["status"]) <= {"done", "infeasible"}
    assert set(trials["trial_id"]) == set(inputs.results.study["configuration"]["planned_trials"])
    return {reason.partition(";")[0] for reason in trials.loc[trials["status"] != "done", "reason"]}


@pytest.mark.parametrize(
    ("name", "reasons", "tables"),
    [
        ("forum-phases", {DP}, ["phases", "weak_scaling", "communication"]),
        ("acceleration-ladder", {DP, TWO_NODES}, ["ladder", "precision", "storage", "accuracy"]),
        ("hpml-lab4", {DP}, ["speed_up_weak", "exposed_cost", "communication", "bandwidth"]),
        ("vgg-case-study", {DP}, ["batch_size", "throughput", "weak_scaling", "accuracy"]),
        ("mlstm-scaling", set(), ["throughput", "weak_scaling", "bandwidth"]),
    ],
)
def test_a_published_study_runs_by_one_command_and_fills_its_tables(
    name: str, reasons: set[str], tables: list[str], local_ray: str, tmp_path: Path
) -> None:
    inputs = run_study(name, local_ray, tmp_path / "results")
    assert infeasible_reasons(inputs) == reasons
    assert json.loads((tmp_path / "results" / "study.json").read_text())["name"] == name
    empty = [table for table in tables if TABLES[table](inputs).frame.empty]
    assert not empty
    text = " ".join(answer(inputs))
    if name == "acceleration-ladder":
        steps = TABLES["ladder"](inputs).frame.query("machine == 'this study'").set_index("rung")
        assert list(steps.index) == [
            "JPEG files, fp32, one GPU", "LMDB", "raw pixels in shared memory", "mixed precision (O1)",
            "fp16 with master weights (O2)", "pure fp16 (O3)", "DDP, fp32", "DDP, mixed precision",
        ]  # fmt: skip
        assert set(steps["samples"].round(6)) == {8.0}, "strong scaling"
        assert (steps["trained_percent"] > 50).all()
        assert "bf16 reaches" in text
    elif name == "mlstm-scaling":
        assert TABLES["throughput"](inputs).frame["characters_per_s"].notna().all()
        assert "characters/s" in text
    else:
        assert "2 CPU ranks reach" in text
