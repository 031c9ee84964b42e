"""Sentences on a study's own question: its ladder, compared fields, memory, and parts of a step."""

import re
from pathlib import Path
from typing import Any

import pytest

from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.verdict.lines.training import ladder_lines
from analysis.verdict.next_steps import best
from analysis.verdict.study import comparisons, ladder, memory, step_parts
from tests.support.frames import grid, record, steps, trial_id, write_results, write_study, write_trial

GPU = {"device": "cuda", "steps": 8, "cpus_per_rank": 8}


def test_ladder_states_total_speed_up_best_step_and_slower_steps(tmp_path: Path) -> None:
    step_s = {"fp32": 0.1, "tf32": 0.05, "bf16": 0.0625, "fp16": 0.04, "fp16_pure": 0.0401}
    trials = {trial["precision"]: trial for trial in grid(GPU, precision=list(step_s))}
    ladder_steps = [{"name": name, "trial_ids": [trial_id(trial)]} for name, trial in trials.items()]
    directory = write_study(tmp_path / "results", configuration={"ladder_steps": ladder_steps})
    for name, trial in trials.items():
        write_trial(directory, record(trial), steps(trial, step_s[name]))
    analysis = with_models(analyse(load(directory)))
    text = ladder(analysis)
    assert text is not None
    total, largest, slower = text.split("; ")
    assert "2.50x over fp32 (fp16)" in total
    assert "tf32 (2.00x compared with fp32)" in largest
    assert slower.endswith(": bf16 (0.80x of tf32)."), "a step with ratio 1.00 is not listed as slower"
    assert comparisons(analysis) is None


@pytest.mark.parametrize(
    ("names", "share", "summary", "total"),
    [
        (["fp32", "bf16"], 0.97, "No step gains more than its interval.", "not resolved: 1.0"),
        (["fp32", "bf16"], 1.01, "No step gains more than its interval.", "none is faster than “fp32”"),
        (
            ["fp32", "tf32", "bf16"],
            0.95,
            "The ladder reaches a speed-up of 1.11x over fp32 (bf16); no step gains more than its interval.",
            "1.11",
        ),
    ],
)
def test_a_ladder_whose_steps_have_no_resolved_gain_names_none(
    tmp_path: Path, names: list[str], share: float, summary: str, total: str
) -> None:
    """Each step takes this share of the one before; repeats differ by 4 % in turn."""
    trials = grid(GPU, precision=names, repeat=[0, 1, 2])
    steps_of = {name: [trial_id(trial) for trial in trials if trial["precision"] == name] for name in names}
    configuration = {"ladder_steps": [{"name": name, "trial_ids": ids} for name, ids in steps_of.items()]}
    directory = write_study(tmp_path / "results", configuration=configuration)
    for trial in trials:
        number = names.index(trial["precision"])
        late = (trial["repeat"] + number) % 2
        write_trial(directory, record(trial), steps(trial, 0.1 * (1 + 0.04 * late) * share**number))
    analysis = analyse(load(directory))
    assert ladder(analysis) == summary
    lines = {line.key: line.text for line in ladder_lines(analysis)}
    assert lines["ladder"].startswith(total)
    assert lines["largest_step"] == "none gains more than its interval"


def made(directory: Path, trials: list[dict[str, Any]], step_s: Any, **more: Any) -> ReportInputs:
    law = {"step_s": 0.1} | more
    return with_models(
        analyse(load(write_results(directory, trials, lambda trial: law | {"step_s": step_s(trial)}, spread=0.0)))
    )


def test_compared_values_are_reported_with_the_range_of_their_ratios(tmp_path: Path) -> None:
    step_s = {("ddp", 8): 0.1, ("dp", 8): 0.2, ("ddp", 16): 0.1, ("dp", 16): 0.125}
    trials = grid(GPU, parallel=["ddp", "dp"], batch_per_gpu=[8, 16])
    analysis = made(tmp_path, trials, lambda trial: step_s[trial["parallel"], trial["batch_per_gpu"]])
    assert comparisons(analysis) == "Compared with ddp, dp is 0.50 to 0.80 times as fast."
    assert ladder(analysis) is None


def test_comparison_counts_significant_ratios(tmp_path: Path) -> None:
    step_s = {("ddp", 8): 0.1, ("dp", 8): 0.1001, ("ddp", 16): 0.1, ("dp", 16): 0.2}
    trials = grid(GPU, parallel=["ddp", "dp"], batch_per_gpu=[8, 16], repeat=range(3))

    def law(trial: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": step_s[trial["parallel"], trial["batch_per_gpu"]]}

    analysis = with_models(analyse(load(write_results(tmp_path, trials, law, spread=0.02))))
    text = comparisons(analysis)
    assert text is not None
    assert "dp is 0.5" in text
    assert text.endswith(" (1 of 2 significant).")


def test_study_without_compared_fields_has_no_comparison(tmp_path: Path) -> None:
    analysis = made(tmp_path, grid(GPU, batch_per_gpu=[8, 16]), lambda _: 0.1)
    assert comparisons(analysis) is None


def test_peak_memory_is_reported_up_to_the_largest_batch_that_fits(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for trial in grid(GPU, batch_per_gpu=[8, 16, 32]):
        if trial["batch_per_gpu"] == 32:
            write_trial(directory, record(trial, "out_of_memory", "rank 0: CUDA out of memory"))
        else:
            frame = steps(trial, 0.1).assign(peak_memory_bytes=trial["batch_per_gpu"] * 2**30)
            write_trial(directory, record(trial), frame)
    text = memory(with_models(analyse(load(directory))))
    assert text is not None
    assert "from 8.0 GiB at batch 8 to 16.0 GiB at 16, the largest" in text


def test_one_batch_has_no_memory_sentence(tmp_path: Path) -> None:
    assert memory(made(tmp_path, grid(GPU, world_size=[1, 2]), lambda _: 0.1)) is None


def test_step_parts_are_shares_of_loading_copying_and_processing(tmp_path: Path) -> None:
    shares = (0.3, 0.1, 0.2, 0.1, 0.25, 0.05)
    trials = grid(GPU, batch_per_gpu=[8, 16])
    analysis = made(tmp_path, trials, lambda _: 0.1, shares=shares)
    text = step_parts(analysis)
    assert text is not None
    assert re.findall(r"(\w+) takes (\d+)\u00a0% \((\d+)\u00a0% to (\d+)\u00a0%\)", text) == [
        ("batch", "30", "30", "30"),
        ("device", "10", "10", "10"),
        ("processing", "60", "60", "60"),
    ]


def test_negligible_loading_and_copying_are_not_mentioned(tmp_path: Path) -> None:
    analysis = made(tmp_path, grid(GPU, batch_per_gpu=[8, 16]), lambda _: 0.1, shares=(0.01, 0.0, 0.4, 0.1, 0.4, 0.09))
    assert step_parts(analysis) is None


def test_only_text_models_report_characters_per_second(tmp_path: Path) -> None:
    text = grid(GPU | {"model": "mlstm1024", "sequence_length": 256, "batch_per_gpu": 16}, repeat=[0, 1])
    images = grid(GPU | {"model": "resnet18", "sequence_length": 256, "batch_per_gpu": 16}, repeat=[0, 1])
    analysis = made(tmp_path / "text", text, lambda _: 0.1)
    assert best(analysis, "throughput").startswith(
        "Best for throughput: 1 GPU, batch 16 per GPU, 160.0 [160.0, 160.0] samples/s, 40,960 characters/s;"
    )
    assert TABLES["throughput"](analysis).cells()["characters/s"].tolist() == ["40,960"]
    assert "characters" not in best(made(tmp_path / "images", images, lambda _: 0.1), "throughput")
