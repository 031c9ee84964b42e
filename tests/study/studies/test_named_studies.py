"""Each published study runs by one command in its CPU form and fills its tables."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.answers.registry import answers
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load_reduced
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.verdict.answer import answer
from study.capacity import Capacity
from study.scaling import main
from study.studies.basic import STUDIES
from study.studies.questions import QUESTIONS
from study.studies.study import Study
from tests.support.twin import replace_ray

pytestmark = pytest.mark.xdist_group("named studies")

SMALL = ("--repeats", "1", "--steps", "1")
MLP = ("--model", "mlp")
"""Instead of VGG-19 and ResNet-18, whose all-reduces of 560 MB take minutes. test_everything.py trains every model."""
DP = "parallel 'dp' requires GPUs"
TWO_NODES = "needs 2 nodes"

NOT_ON_CPU_RANKS = {
    "forum-phases": {"forum.non_blocking", "forum.hidden", "forum.pageable", "threads.gil"},
    "acceleration-ladder": set[str](),
    "hpml-lab4": {"lab.fifth_epoch", "lab.recipes"},
    "vgg-case-study": {"vgg.accuracy", "vgg.memory"},
    "mlstm-scaling": {"mlstm.interconnects", "mlstm.larger_model", "threads.gil"},
}
"""Questions that a study on CPU ranks does not answer: no copies to a device, one process, interconnect or seed."""

ANSWERED_ON_CPU_RANKS = ("storage-order", "number-formats", "averaging", "fifth-epoch")
"""Further studies with an answer from CPU ranks, one repeat and one seed."""


def shorten_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the lab collect its evidence after two training steps per run, instead of 40."""
    lab = STUDIES["hpml-lab4"]

    def shortened(capacity: Capacity) -> Study:
        study = lab(capacity)
        evidence = [*study.evidence]
        evidence[evidence.index("--steps") + 1] = "2"
        return replace(study, evidence=tuple(evidence))

    monkeypatch.setitem(STUDIES, "hpml-lab4", shortened)


def run_study(name: str, out: Path, capsys: pytest.CaptureFixture[str]) -> ReportInputs:
    model = () if name == "mlstm-scaling" else MLP
    status = main(["run", name, *SMALL, *model, "-q", "--address", "local", "--out", str(out)])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert Path(said.out.strip()) == out / "report" / "index.html"
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
    name: str,
    reasons: set[str],
    tables: list[str],
    tmp_path: Path,
    no_figures: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_ray(monkeypatch)
    shorten_evidence(monkeypatch)
    inputs = run_study(name, tmp_path / "results", capsys)
    assert infeasible_reasons(inputs) == reasons
    assert json.loads((tmp_path / "results" / "study.json").read_text())["name"] == name
    empty = [table for table in tables if TABLES[table](inputs).frame.empty]
    assert not empty
    replies = {reply.key: reply for reply in answers(inputs)}
    assert set(replies) == set(QUESTIONS[name])
    assert {key for key, reply in replies.items() if not reply.is_answered} == NOT_ON_CPU_RANKS[name]
    assert all(reply.text for reply in replies.values())
    text = " ".join(answer(inputs))
    if name == "acceleration-ladder":
        steps = TABLES["ladder"](inputs).frame.query("machine == 'this study'").set_index("step")
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


@pytest.mark.parametrize(
    "name", ["storage-order", "number-formats", "loader-grid", "averaging", "fifth-epoch", "accuracy", "real-ranks"]
)
def test_a_named_study_of_one_comparison_finishes_on_cpu_ranks_with_its_sentences(
    name: str, tmp_path: Path, no_figures: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_ray(monkeypatch)
    inputs = run_study(name, tmp_path / "results", capsys)
    assert infeasible_reasons(inputs) <= {"parallel 'horovod' requires Horovod, which is not installed"}
    replies = {reply.key: reply for reply in answers(inputs)}
    assert set(replies) == set(QUESTIONS.get(name, ()))
    assert all(reply.text for reply in replies.values())
    assert any(reply.is_answered for reply in replies.values()) == (name in ANSWERED_ON_CPU_RANKS)
    assert answer(inputs)
