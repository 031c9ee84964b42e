"""What a study's own question is answered with: its ladder, compared fields, memory, parts of a step; in words and numbers."""

from pathlib import Path
from typing import Any

from analysis.load.results import load
from analysis.predict.inputs import ReportInputs, with_models
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.verdict.answer import best
from analysis.verdict.study import climbed, compared, memory, parts
from tests.support.frames import grid, record, steps, trial_id, write_results, write_study, write_trial

GPU = {"device": "cuda", "steps": 8, "cpus_per_rank": 8}


def test_a_ladder_is_told_as_a_whole_with_its_best_rung_and_those_that_slow_it(tmp_path: Path) -> None:
    step_s = {"fp32": 0.1, "tf32": 0.05, "bf16": 0.0625, "fp16": 0.04, "fp16_pure": 0.0401}
    trials = {trial["precision"]: trial for trial in grid(GPU, precision=list(step_s))}
    rungs = [{"name": name, "trial_ids": [trial_id(trial)]} for name, trial in trials.items()]
    directory = write_study(tmp_path / "results", configuration={"rungs": rungs})
    for name, trial in trials.items():
        write_trial(directory, record(trial), steps(trial, step_s[name]))
    found = with_models(analyse(load(directory)))
    assert climbed(found) == (
        "From fp32 on, 4 further rungs make training up to 2.50 times as fast (fp16); tf32 brings most, 2.00 times the rung "
        "before; slower than the rung before is bf16 (0.80)."
    ), "a rung that is 1.00 times as fast is not called slower"
    assert compared(found) is None


def made(directory: Path, trials: list[dict[str, Any]], step_s: Any, **more: Any) -> ReportInputs:
    law = {"step_s": 0.1} | more
    return with_models(
        analyse(load(write_results(directory, trials, lambda trial: law | {"step_s": step_s(trial)}, spread=0.0)))
    )


def test_values_of_a_compared_field_are_told_by_the_span_of_their_ratios(tmp_path: Path) -> None:
    step_s = {("ddp", 8): 0.1, ("dp", 8): 0.2, ("ddp", 16): 0.1, ("dp", 16): 0.125}
    trials = grid(GPU, parallel=["ddp", "dp"], batch_per_gpu=[8, 16])
    found = made(tmp_path, trials, lambda trial: step_s[trial["parallel"], trial["batch_per_gpu"]])
    assert compared(found) == "Against ddp, all else equal, dp is 0.50 to 0.80 times as fast."
    assert climbed(found) is None


def test_of_ratios_with_intervals_it_is_told_how_many_differ_beyond_noise(tmp_path: Path) -> None:
    step_s = {("ddp", 8): 0.1, ("dp", 8): 0.1001, ("ddp", 16): 0.1, ("dp", 16): 0.2}
    trials = grid(GPU, parallel=["ddp", "dp"], batch_per_gpu=[8, 16], repeat=range(3))

    def law(trial: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": step_s[trial["parallel"], trial["batch_per_gpu"]]}

    found = with_models(analyse(load(write_results(tmp_path, trials, law, spread=0.02))))
    said = compared(found)
    assert said is not None
    assert said.startswith("Against ddp, all else equal, dp is 0.5")
    assert said.endswith(" times as fast (beyond noise in 1 of 2).")


def test_a_study_that_compares_no_such_field_says_nothing_of_any(tmp_path: Path) -> None:
    found = made(tmp_path, grid(GPU, batch_per_gpu=[8, 16]), lambda _: 0.1)
    assert compared(found) is None


def test_peak_memory_is_told_from_the_smallest_batch_to_the_largest_that_fits(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for trial in grid(GPU, batch_per_gpu=[8, 16, 32]):
        if trial["batch_per_gpu"] == 32:
            write_trial(directory, record(trial, "out_of_memory", "rank 0: CUDA out of memory"))
        else:
            frame = steps(trial, 0.1).assign(peak_memory_bytes=trial["batch_per_gpu"] * 2**30)
            write_trial(directory, record(trial), frame)
    assert memory(with_models(analyse(load(directory)))) == (
        "On one GPU peak memory goes from 8.0 GiB at batch 8 to 16.0 at 16, the largest tried that fits."
    )


def test_one_batch_has_no_course_of_memory(tmp_path: Path) -> None:
    assert memory(made(tmp_path, grid(GPU, world_size=[1, 2]), lambda _: 0.1)) is None


def test_loading_copy_and_processing_are_told_as_shares_of_a_step(tmp_path: Path) -> None:
    shares = (0.3, 0.1, 0.2, 0.1, 0.25, 0.05)
    trials = grid(GPU, batch_per_gpu=[8, 16])
    found = made(tmp_path, trials, lambda _: 0.1, shares=shares)
    assert parts(found) == (
        "Of a step, in the median of 2 configurations (least to most), waiting for a batch 30\u00a0% (30\u00a0% to 30\u00a0%), its "
        "copy to the device 10\u00a0% (10\u00a0% to 10\u00a0%) and processing 60\u00a0% (60\u00a0% to 60\u00a0%)."
    )


def test_nothing_is_said_of_parts_where_loading_and_copying_take_next_to_nothing(tmp_path: Path) -> None:
    found = made(tmp_path, grid(GPU, batch_per_gpu=[8, 16]), lambda _: 0.1, shares=(0.01, 0.0, 0.4, 0.1, 0.4, 0.09))
    assert parts(found) is None


def test_models_of_text_are_counted_in_characters_and_others_are_not(tmp_path: Path) -> None:
    text = grid(GPU | {"model": "mlstm1024", "sequence_length": 256, "batch_per_gpu": 16}, repeat=[0, 1])
    images = grid(GPU | {"model": "resnet18", "sequence_length": 256, "batch_per_gpu": 16}, repeat=[0, 1])
    found = made(tmp_path / "text", text, lambda _: 0.1)
    assert (best(found) or "").startswith(
        "The highest throughput is 160.0 [160.0, 160.0] samples/s, 40,960 characters/s, with"
    )
    assert TABLES["throughput"](found).cells()["characters/s"].tolist() == ["40,960"]
    assert "characters" not in (best(made(tmp_path / "images", images, lambda _: 0.1)) or "")
