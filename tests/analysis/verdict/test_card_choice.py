"""Which configuration the card is about, how far it is trusted, and what it says without an answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.compare.causes import SLOWDOWN_PARTS, lost_ranks
from analysis.compare.scaling import STRONG, WEAK
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.read.results import load
from analysis.report.sentences import more, scale
from analysis.verdict.card import Card, card_of
from analysis.verdict.lines.subject import Subject, shortened, subjects
from tests.support.cards import GPU, step_law, strong, weak
from tests.support.frames import grid, record, steps, write_results, write_study, write_trial


def analysed(directory: Path) -> ReportInputs:
    return report_inputs(load(directory))[0]


def timed(directory: Path, trials: list[dict[str, Any]], spread: float = 0.002, **law: Any) -> ReportInputs:
    def of_trial(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "step_s": 0.001 * fields["batch_per_gpu"] + 0.01 * (fields["world_size"] > 1),
            "launch_ratio": 0.2,
        } | law

    return analysed(write_results(directory, trials, of_trial, spread=spread))


def only_subject(analysis: ReportInputs) -> Subject:
    (subject,) = subjects(analysis)
    return subject


def text(card: Card, key: str) -> str:
    line = card.line(key)
    assert line is not None, f"no line {key} in {[line.key for line in card.lines]}"
    return line.text


def test_subject_has_most_ranks_then_the_highest_throughput(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2, 4], batch_per_gpu=[32, 128], precision=["bf16", "fp32"], repeat=range(3))
    subject = only_subject(timed(tmp_path, trials))
    assert (subject.row["world_size"], subject.row["batch_per_gpu"]) == (4, 128)
    assert subject.scaling is not None and subject.scaling["scaling"] == WEAK
    assert subject.strong is not None and subject.strong_batch == 128, "32 on each of 4 GPUs, compared with 128 on one"


def test_ranks_without_a_comparison_are_passed_over(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2], batch_per_gpu=[32]) + grid(GPU, world_size=[4], batch_per_gpu=[256])
    assert only_subject(timed(tmp_path, trials)).row["world_size"] == 2


def test_strong_study_is_answered_by_strong_scaling(tmp_path: Path) -> None:
    analysis = analysed(strong(tmp_path / "results"))
    subject = only_subject(analysis)
    assert subject.scaling is not None and subject.scaling["scaling"] == STRONG
    card = card_of(analysis)
    assert "sharing a batch of 1,024" in text(card, "scales")


def test_strong_scaling_by_accumulation_is_not_predicted_and_card_and_report_say_why(tmp_path: Path) -> None:
    trials = [
        fields
        for size in (1, 2, 4)
        for fields in grid(GPU, world_size=[size], batch_per_gpu=[32], accumulation_steps=[4 // size], repeat=range(3))
    ]
    analysis = timed(tmp_path, trials)
    assert only_subject(analysis).scaling is not None
    reason = "no law covers steps that accumulate different numbers of batches"
    assert text(card_of(analysis), "more_gpus").endswith(f"not predicted: {reason}")
    assert more(analysis) == [f"No prediction: {reason}."]


def test_emulated_interconnects_count_only_alone(tmp_path: Path) -> None:
    axes: dict[str, Any] = {"world_size": [1, 2], "batch_per_gpu": [32]}
    real = grid(GPU, interconnect=["auto"], repeat=range(3), **axes)
    emulated = grid(GPU, interconnect=["socket"], repeat=range(3, 6), **axes)
    assert only_subject(timed(tmp_path / "both", real + emulated)).row["interconnect"] == "auto"
    assert only_subject(timed(tmp_path / "one", emulated)).row["world_size"] == 2


def test_worst_of_several_workloads_comes_first_and_all_are_listed(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2], batch_per_gpu=[32], model=["resnet18", "resnet50"], repeat=range(3))
    slow = {"resnet18": 0.02, "resnet50": 0.002}

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1 + slow[fields["model"]] * (fields["world_size"] > 1)}

    analysis = analysed(write_results(tmp_path, trials, law, spread=0.002))
    assert [subject.label for subject in subjects(analysis)] == ["resnet18", "resnet50"]
    card = card_of(analysis)
    assert card.title.startswith("resnet18 and resnet50 bf16")
    assert "1.67" in text(card, "scales") and "1.96" in text(card, "scales")
    assert text(card, "lost").startswith("0.33 GPU of resnet18")


@pytest.mark.parametrize("study", [weak, strong])
def test_lost_ranks_follow_the_law(study: Any, tmp_path: Path) -> None:
    """The law adds 3 ms to the step of 4 GPUs, of which the late rank costs 1.5 ms and compute nothing."""
    analysis = analysed(study(tmp_path / "results"))
    subject = only_subject(analysis)
    parts = lost_ranks(subject.scaling, analysis.communication.exposed, analysis.configurations)
    step_s = step_law(GPU | {"world_size": 4, "batch_per_gpu": 256})["step_s"]
    assert set(parts) == set(SLOWDOWN_PARTS)
    assert sum(parts.values()) == pytest.approx(4 * 0.003 / step_s, abs=0.02)
    assert parts["wait_s"] == pytest.approx(4 * 0.0015 / step_s, abs=0.01)
    assert parts["load_s"] == pytest.approx(0, abs=0.02)


def test_smaller_batches_of_strong_scaling_are_slower_compute(tmp_path: Path) -> None:
    """Without communication time, all of a loss at a constant global batch is compute that does not shrink."""
    trials = [
        fields
        for fields in grid(GPU, world_size=[1, 4], batch_per_gpu=[64, 256], repeat=range(3))
        if fields["world_size"] * fields["batch_per_gpu"] == 256
    ]

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        step_s = 0.02 + 0.08 * fields["batch_per_gpu"] / 256
        communication = {"last_gradient_s": 0.9 * step_s, "bandwidth": 1e13, "latency_s": 1e-7, "tail_s": 0.1 * step_s}
        shares = (0.0, 0.0, 0.3, 0.02, 0.6, 0.08)
        return {"step_s": step_s, "launch_ratio": 0.2, "communication": communication, "shares": shares}

    analysis = analysed(write_results(tmp_path, trials, law, spread=0.0))
    parts = lost_ranks(only_subject(analysis).scaling, analysis.communication.exposed, analysis.configurations)
    assert sum(parts.values()) == pytest.approx(4 * (0.04 - 0.025) / 0.04, abs=0.01)
    assert parts["slower_compute_s"] == pytest.approx(1.5, abs=0.05)


def test_wide_interval_is_not_resolved_and_has_no_number(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2], batch_per_gpu=[32], repeat=range(2))
    card = card_of(timed(tmp_path, trials, spread=0.6))
    scales = text(card, "scales")
    assert "not resolved (needs " in scales and "more repeat" in scales and "%" not in scales
    line = card.line("scales")
    assert line is not None and line.quantities[0].value is None
    assert card.trust.level == "poor"
    assert card.line("lost") is None


@pytest.mark.parametrize(
    ("repeats", "spread", "level", "reason"),
    [(5, 0.001, "good", "5 separate starts"), (5, 0.05, "fair", "5 separate starts"),
     (2, 0.001, "fair", "2 separate starts"), (1, 0.001, "poor", "1 repeat, so no interval"),
     (3, 0.4, "poor", "3 separate starts")],
)  # fmt: skip
def test_trust_follows_repeats_and_interval(
    repeats: int, spread: float, level: str, reason: str, tmp_path: Path
) -> None:
    trials = grid(GPU, world_size=[1, 2], batch_per_gpu=[32], repeat=range(repeats))
    trust = card_of(timed(tmp_path, trials, spread=spread)).trust
    assert (trust.level, trust.reason.partition(";")[0].partition(", ±")[0]) == (level, reason)


def test_busy_host_and_throttled_gpu_lower_trust(tmp_path: Path) -> None:
    write_study(tmp_path)
    rng = np.random.default_rng(0)
    for fields in grid(GPU, world_size=[1, 2], batch_per_gpu=[32], repeat=range(5)):
        trial = record(fields)
        for rank in trial["environment"]["ranks"]:
            rank["before"]["load_average_1min"] = 40.0
            rank["after"]["throttle_reasons"] = ["power limit"]
        write_trial(tmp_path, trial, steps(fields, 0.1 * float(np.exp(0.001 * rng.standard_normal()))))
    trust = card_of(analysed(tmp_path)).trust
    assert trust.level == "fair"
    assert "host overloaded; GPU throttled" in trust.reason


def test_sizes_that_were_tried_are_not_suggested(tmp_path: Path) -> None:
    """As of a script that trains on one GPU only."""
    folder = write_results(tmp_path, grid(GPU, world_size=[1], repeat=range(3)), lambda fields: {"step_s": 0.1})
    for fields in grid(GPU, world_size=[2, 4]):
        write_trial(folder, record(fields, status="failed", error="each trains alone"))
    found = analysed(folder)
    assert text(card_of(found), "more_gpus").endswith("only 1 GPU measured; no trial on 2 or 4 GPUs is done")
    assert scale(found) == ["Measured on 1 GPU only: no trial on 2 or 4 GPUs is done."]


def batch_law(fields: dict[str, Any]) -> dict[str, Any]:
    """A step with a constant part, so that larger batches are faster."""
    return {"step_s": 0.01 + 0.0001 * fields["batch_per_gpu"]}


def test_one_size_says_which_sizes_are_missing(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1], batch_per_gpu=[32, 256], repeat=range(3))
    card = card_of(analysed(write_results(tmp_path, trials, batch_law)))
    assert card.form == "one_size"
    assert [line.key for line in card.lines][:2] == ["speed", "batch"]
    assert text(card, "batch").startswith("256 is the fastest of 32 and 256: 3.0x the rate of 32")
    assert "only 1 GPU measured; add --gpus 1,2,4" in text(card, "more_gpus")


@pytest.mark.parametrize(("size", "missing"), [(2, "1,2"), (4, "1,2,4"), (6, "1,2,4,6")])
def test_card_and_report_name_the_same_missing_sizes(tmp_path: Path, size: int, missing: str) -> None:
    trials = grid(GPU, world_size=[size], repeat=range(3))
    found = analysed(write_results(tmp_path, trials, lambda fields: {"step_s": 0.1}))
    assert text(card_of(found), "more_gpus").endswith(f"only {size} GPUs measured; add --gpus {missing}")
    assert scale(found) == [f"Measured on {size} GPUs only: add --gpus {missing}."]


def test_a_batch_that_runs_out_of_memory_is_not_compared_with_those_that_fit(tmp_path: Path) -> None:
    write_results(tmp_path, grid(GPU, world_size=[1], batch_per_gpu=[32, 256], repeat=range(3)), batch_law)
    for size, status in ((1024, "out_of_memory"), (4096, "pruned")):
        write_trial(tmp_path, record(GPU | {"world_size": 1, "batch_per_gpu": size}, status, "out of memory"))
    shown = text(card_of(analysed(tmp_path)), "batch")
    assert "256 is the fastest of 32 and 256" in shown
    assert shown.endswith("; 1,024 runs out of memory")


def test_failed_trials_are_counted_by_reason_without_their_rank(tmp_path: Path) -> None:
    timed(tmp_path, grid(GPU, world_size=[1], batch_per_gpu=[32], repeat=range(3)))
    for repeat in (3, 4):
        fields = GPU | {"world_size": 1, "batch_per_gpu": 32, "repeat": repeat}
        write_trial(tmp_path, record(fields, "failed", f"rank {repeat} on node b (1a): RuntimeError: boom"))
    card = card_of(analysed(tmp_path))
    assert text(card, "failed") == "2 of 5 trials: RuntimeError: boom"


def test_study_without_trials_says_what_runs_it(tmp_path: Path) -> None:
    write_study(tmp_path, "weak", configuration={"planned_trials": ["a", "b"]})
    card = card_of(analysed(tmp_path))
    assert (card.form, card.trust.level, card.heading) == (
        "nothing",
        "poor",
        "weak (partial: 2 of 2 planned trials missing)",
    )
    assert text(card, "do_next") == "finish the study: python -m study.scaling run weak"


def test_trials_of_other_environments_are_counted(tmp_path: Path) -> None:
    timed(tmp_path, grid(GPU, world_size=[1, 2], batch_per_gpu=[32], repeat=range(5)), spread=0.001)
    fields = GPU | {"world_size": 1, "batch_per_gpu": 64}
    trial = record(fields)
    trial["environment"]["versions"]["torch"] = "2.10.0"
    write_trial(tmp_path, trial, steps(fields, 0.1))
    first, *others = report_inputs(load(tmp_path))
    trust = card_of(first, others).trust
    assert (trust.level, trust.reason.rpartition("; ")[2]) == ("fair", "1 trial of another environment left out")


def test_frames_of_the_card_hold_no_missing_numbers(tmp_path: Path) -> None:
    card = card_of(analysed(weak(tmp_path / "results")))
    values = [quantity.value for line in card.lines for quantity in line.quantities]
    assert values and not pd.isna(pd.Series(values, dtype=float)).any()


def test_long_workloads_are_named_by_what_distinguishes_them() -> None:
    shared = "--model resnet50 --batch-size 64 --image-size 224"
    assert shortened([shared, f"{shared} --late-ms 20"]) == ["--model resnet50 --batch-size 64 --…", "… --late-ms 20"]
    assert shortened([f"{shared} --seed {seed}" for seed in (1, 2)]) == ["… --seed 1", "… --seed 2"]
    assert shortened(["resnet50", "a_name_of_more_than_thirty_six_letters"]) == [
        "resnet50",
        "a_name_of_more_than_thirty_six_lett…",
    ]
