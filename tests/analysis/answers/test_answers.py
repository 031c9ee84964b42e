"""Questions of the published studies are answered from results with the right numbers and the measured reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.answers import lab as lab_answers
from analysis.answers import ladder as ladder_answers
from analysis.answers import mlstm as mlstm_answers
from analysis.answers import trainings
from analysis.answers import vgg as vgg_answers
from analysis.answers.lab_tables import document, tables
from analysis.answers.registry import ANSWERS, Answer, answers
from analysis.answers.reply import Missing, Reply
from analysis.compare.accuracy import by_precision
from analysis.predict.inputs import report_inputs
from analysis.read.results import load_reduced
from scripts.claims.sources import RESULTS, committed_inputs
from study.studies.questions import QUESTIONS
from tests.support.frames import grid, record, trial_id, write_results, write_study, write_trial
from tests.support.trainings import TRAINING, epochs, write_training

Law = Callable[[dict[str, Any]], dict[str, Any]]
GPU = {"device": "cuda", "model": "resnet50", "image_size": 224, "cpus_per_rank": 8, "steps": 5, "warmup_steps": 2}


def answered(directory: Path, name: str, trials: list[dict[str, Any]], law: Law, **study: Any) -> dict[str, Answer]:
    """Return the answers to a study's questions from generated results, by the last part of their key."""
    write_results(directory, trials, law, spread=0.0)
    file = directory / "study.json"
    asked = [{"key": key, "question": question} for key, question in QUESTIONS[name].items()]
    record = json.loads(file.read_text()) | {"name": name} | study.pop("record", {})
    record["configuration"] |= {"questions": asked} | study
    file.write_text(json.dumps(record))
    return {found.key.partition(".")[2]: found for found in answers(report_inputs(load_reduced(directory))[0])}


def host_law(fields: dict[str, Any]) -> dict[str, Any]:
    """A step takes 0.2 ms per sample, but at least 10 ms to launch, 30 ms if threads launch for two GPUs."""
    launched = 3 if fields["parallel"] == "dp" and fields["world_size"] > 1 else 1
    host_s, device_s = 0.010 * launched, 0.0002 * fields["batch_per_gpu"]
    copy_s = fields["batch_per_gpu"] * (2.5e-6 if fields["pin_memory"] else 1e-5)
    step_s = max(host_s, device_s) + copy_s
    rest = step_s - copy_s
    return {
        "step_s": step_s,
        "shares": tuple(part / step_s for part in (0.0, copy_s, 0.3 * rest, 0.02 * rest, 0.6 * rest, 0.08 * rest)),
        "launch_ratio": host_s / step_s,
        "previous_done": 0.95 if host_s >= device_s else 0.02,
        "busy_ratio": device_s / rest,
        "synced_ratio": 1.05,
    }


def test_every_question_has_a_function_and_every_function_a_question() -> None:
    assert {key for questions in QUESTIONS.values() for key in questions} == set(ANSWERS)


def loader_law(fields: dict[str, Any]) -> dict[str, Any]:
    """Each worker loads a batch in 400 ms, up to 32 of them; each further one costs 1 %."""
    workers = fields["loader_workers"]
    loaded_s = 0.4 / min(workers, 32) * 1.01 ** max(0, workers - 32)
    return {"step_s": max(0.010, loaded_s)}


@pytest.mark.parametrize(("numbers", "ratio"), [((2, 8, 32, 128), 0.4), ((2, 8, 32, 64), 0.73), ((2, 8, 32), None)])
@pytest.mark.parametrize("models", [("resnet50",), ("resnet18", "resnet50")])
def test_workers_are_too_many_from_the_first_number_that_is_slower(
    tmp_path: Path, numbers: tuple[int, ...], ratio: float | None, models: tuple[str, ...]
) -> None:
    trials = grid(GPU | {"dataset": "synthetic_loader"}, model=models, loader_workers=numbers, repeat=[0, 1, 2])
    found = answered(tmp_path / "results", "loader-grid", trials, loader_law)["workers"]
    assert found.is_answered == (ratio is not None)
    assert "32 train fastest, with 8 CPU cores per rank" in found.text
    if ratio is None:
        assert "--loader-workers 32,64,128" in found.text
    else:
        assert found.numbers["best_workers"] == 32
        assert found.numbers["too_many_workers"] == numbers[-1]
        assert found.numbers["too_many_ratio"] == pytest.approx(ratio, rel=0.05)


def test_workers_whose_repeats_differ_most_are_too_many_even_if_one_of_them_is_fastest(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        unsteady = {0: 0.005, 1: 0.015, 2: 0.05}[fields["repeat"]]
        return {"step_s": unsteady if fields["loader_workers"] == 128 else 0.2 / fields["loader_workers"]}

    trials = grid(GPU | {"dataset": "synthetic_loader"}, loader_workers=[2, 8, 128], repeat=[0, 1, 2])
    found = answered(tmp_path / "results", "loader-grid", trials, law)["workers"]
    assert found.is_answered
    assert (found.numbers["best_workers"], found.numbers["too_many_workers"]) == (8, 128)
    assert found.numbers["too_many_spread"] == pytest.approx(10, rel=0.01)


def test_storage_is_compared_with_jpeg_files_and_orders_with_each_other(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        usual_s = {"jpeg": 0.04, "lmdb": 0.05, "arrow_raw": 0.02}[fields["storage"]]
        return {"step_s": usual_s * (0.8 if fields["precision"] == "bf16" else 1.0)}

    trials = grid(GPU | {"dataset": "image_folder"}, storage=["jpeg", "lmdb", "arrow_raw"], precision=["bf16", "fp32"])
    found = answered(tmp_path / "results", "storage-order", trials, law)["cost"]
    assert found.numbers == pytest.approx({"arrow_raw": 2.0, "lmdb": 0.8}, rel=0.01)
    alone = answered(tmp_path / "alone", "storage-order", trials[:2], law)["cost"]
    assert not alone.is_answered and "--set storage=jpeg,lmdb,arrow_raw" in alone.text


def test_sharding_is_compared_with_ddp_and_memory_ends_at_the_largest_model(tmp_path: Path) -> None:
    peaks = {"gpt2": {"ddp": 20.0, "zero1": 16.0, "fsdp2": 10.0}, "gpt2_medium": {"fsdp2": 70.0}}
    language = GPU | {"dataset": "synthetic", "sequence_length": 64, "image_size": 32, "world_size": 4}
    trials = [
        fields
        for model, of_model in peaks.items()
        for fields in grid(language, model=[model], parallel=list(of_model), repeat=[0, 1, 2])
    ]

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        slower = {"ddp": 1.0, "zero1": 1.25, "fsdp2": 1.6}[fields["parallel"]]
        return {"step_s": 0.1 * slower, "peak_bytes": int(peaks[fields["model"]][fields["parallel"]] * 2**30)}

    for parallel in ("ddp", "zero1"):
        fields = grid(language, model=["gpt2_medium"], parallel=[parallel])[0]
        write_trial(tmp_path / "results", record(fields, "out_of_memory", "rank 0: CUDA out of memory"))
    found = answered(tmp_path / "results", "sharding", trials, law)
    assert found["cost"].numbers == pytest.approx(
        {"zero1_throughput": 0.8, "zero1_memory": 0.8, "fsdp2_throughput": 0.625, "fsdp2_memory": 0.5}, rel=0.01
    )
    assert found["fits"].numbers == pytest.approx({"ddp_gib": 20.0, "zero1_gib": 16.0, "fsdp2_gib": 70.0})
    assert "DDP: gpt2, 20.0 GiB; out of memory: gpt2_medium" in found["fits"].text
    smaller = [fields for fields in trials if fields["model"] == "gpt2"]
    alone = answered(tmp_path / "alone", "sharding", smaller, law)
    assert alone["cost"].is_answered and not alone["fits"].is_answered


def test_ways_to_average_are_compared_with_ddp_and_threads_lose_to_the_host(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        is_dp, ranks = fields["parallel"] == "dp", fields["world_size"]
        device_s = 0.08 / ranks * (1.25 if fields["parallel"] == "ddp_delayed" and ranks > 1 else 1.0)
        host_s = 0.015 * (ranks if is_dp else 1)
        step_s = max(device_s, host_s)
        return {"step_s": step_s, "launch_ratio": host_s / step_s, "busy_ratio": min(0.95, device_s / step_s)}

    trials = [
        trial
        for size in (1, 2, 4)
        for trial in grid(
            GPU | {"dataset": "synthetic", "world_size": size, "batch_per_gpu": 256 // size},
            parallel=["ddp", "ddp_delayed", "dp"], repeat=[0, 1, 2],
        )
    ]  # fmt: skip
    found = answered(tmp_path / "results", "averaging", trials, law)
    assert found["ways"].numbers == pytest.approx({"delayed": 0.8, "dp": 1 / 3}, rel=0.02)
    assert found["held"].numbers == pytest.approx({"speed_up_2": 2.0, "speed_up_4": 4 / 3}, rel=0.02)
    assert found["held"].reason == "host"
    alone = answered(tmp_path / "alone", "averaging", trials[:9], law)
    assert not alone["ways"].is_answered and not alone["held"].is_answered


@pytest.fixture(scope="module")
def forum(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    trials = grid(
        GPU | {"dataset": "synthetic_loader"}, world_size=[1, 2], parallel=["dp", "ddp"], batch_per_gpu=[20, 200],
        pin_memory=[True, False], non_blocking=[True, False],
    )  # fmt: skip
    return answered(tmp_path_factory.mktemp("forum") / "results", "forum-phases", trials, host_law)


def test_parts_of_a_step_are_those_of_the_law(forum: dict[str, Answer]) -> None:
    numbers = forum["parts"].numbers
    assert numbers["transfer_s"] == pytest.approx(0.0005, rel=0.01)
    assert numbers["processing_s"] == pytest.approx(0.040, rel=0.01)


def test_processing_grows_most_under_threads_because_the_host_launches_for_all(forum: dict[str, Answer]) -> None:
    found = forum["per_rank"]
    assert found.numbers["weak_ratio"] == pytest.approx(3.0, rel=0.02)
    assert found.reason == "host"
    assert "30.0 ms in place of 10.0 ms" in found.text


def test_threads_triple_the_launch_time_and_processes_do_not(forum: dict[str, Answer]) -> None:
    assert forum["gil"].numbers == pytest.approx({"threads": 3.0, "processes": 1.0}, rel=0.05)
    assert forum["gil"].reason == "gil"


def test_unpinned_memory_costs_the_longer_copy(forum: dict[str, Answer]) -> None:
    found = forum["pageable"]
    assert found.numbers["transfer_s"] == pytest.approx(0.002, rel=0.01)
    assert found.numbers["ratio"] == pytest.approx(0.0405 / 0.042, rel=0.01)
    assert found.reason == "pageable"


def test_non_blocking_changes_nothing_without_pinned_memory(forum: dict[str, Answer]) -> None:
    assert forum["non_blocking"].numbers["ratio"] == pytest.approx(1.0, abs=0.01)
    assert forum["non_blocking"].reason == "pageable"


def test_a_synchronisation_reveals_the_hidden_transfer(forum: dict[str, Answer]) -> None:
    assert forum["hidden"].numbers["cost_s"] == pytest.approx(0.05 * 0.0405, rel=0.05)


def test_a_question_without_its_trials_names_the_command(tmp_path: Path) -> None:
    trials = grid(GPU | {"dataset": "synthetic_loader", "non_blocking": False, "pin_memory": False}, world_size=[1, 2])
    found = answered(tmp_path / "results", "forum-phases", trials, host_law)
    assert not found["non_blocking"].is_answered
    assert "`python -m study.scaling run forum-phases --set pin_memory=false" in found["non_blocking"].text


def linear_law(fields: dict[str, Any]) -> dict[str, Any]:
    """A step takes 10 ms on one rank whatever its batch, 1 ms per 64 MiB of gradients more on two."""
    large = fields["model"] == "mlstm8192"
    slow = fields["interconnect"] == "socket"
    compute_s = 0.03 if large else 0.01
    exposed_s = (4.0 if large else 1.0) * (0.008 if slow else 0.0001) if fields["world_size"] > 1 else 0.0
    step_s = compute_s + exposed_s
    sizes = (256 * 2**20,) if large else (64 * 2**20,)
    communication = {"last_gradient_s": 0.9 * compute_s, "bucket_bytes": sizes, "latency_s": 0.0, "bandwidth": 8e9}
    return {"step_s": step_s, "launch_ratio": 0.1, "communication": communication | {"contention": 1.0}}


@pytest.fixture(scope="module")
def mlstm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    trials = grid(
        GPU | {"dataset": "synthetic", "parallel": "ddp_fp16"}, model=["mlstm4096", "mlstm8192"],
        interconnect=["auto", "no_p2p", "socket"], world_size=[1, 2], repeat=range(3),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mlstm") / "results"
    return answered(folder, "mlstm-scaling", trials, linear_law, predict_to=128)


def test_the_larger_model_scales_better_only_where_the_interconnect_keeps_up(mlstm: dict[str, Answer]) -> None:
    numbers = mlstm["larger_model"].numbers
    assert numbers["auto"] == pytest.approx(0.03 / 0.0304 - 0.01 / 0.0101, abs=1e-3)
    assert numbers["socket"] == pytest.approx(0.03 / 0.062 - 0.01 / 0.018, abs=1e-3)
    assert "socket (emulated): worse" in mlstm["larger_model"].text


def test_the_fastest_interconnect_is_found(mlstm: dict[str, Answer]) -> None:
    assert mlstm["interconnects"].numbers["mlstm4096 socket"] == pytest.approx(0.0101 / 0.018, rel=0.01)
    assert mlstm["linear"].numbers["efficiency"] == pytest.approx(0.03 / 0.0304, rel=0.01)


def test_none_of_two_equal_interconnects_is_called_the_fastest(mlstm: dict[str, Answer]) -> None:
    text = mlstm["interconnects"].text
    assert text.count("not significantly more than") == 2 and "is the fastest" not in text
    assert "socket (emulated) 0.5" in text


def test_strategies_are_compared_one_by_one_and_threads_are_another_question(tmp_path: Path) -> None:
    base = GPU | {"dataset": "synthetic"}
    axes: dict[str, Any] = {"model": ["mlstm4096", "mlstm8192"], "world_size": [1, 2], "repeat": range(2)}
    trials = grid(base, parallel=["ddp_fp16", "ddp"], interconnect=["auto", "socket"], **axes)
    trials += grid(base, parallel=["dp"], interconnect=["auto"], **axes)
    found = answered(tmp_path / "results", "mlstm-scaling", trials, linear_law, predict_to=128)
    names = [f"{model} ({parallel})" for model in axes["model"] for parallel in ("ddp_fp16", "ddp")]
    assert set(found["interconnects"].numbers) == {f"{name} {link}" for name in names for link in ("auto", "socket")}
    assert set(found["larger_model"].numbers) == {
        f"{link} ({parallel})" for link in ("auto", "socket") for parallel in ("ddp_fp16", "ddp")
    }
    assert "(dp)" not in found["linear"].text and found["linear"].text.count("mlstm4096 (ddp") == 2
    assert found["linear"].numbers["efficiency"] == pytest.approx(0.01 / 0.0101, rel=0.01)


def test_many_gpus_are_labelled_as_predicted(mlstm: dict[str, Answer]) -> None:
    assert mlstm["predicted"].reason == "predicted"
    assert mlstm["predicted"].text.startswith("Predicted, not measured")
    assert "128 GPUs" in mlstm["predicted"].text


def test_a_model_without_a_prediction_is_named_with_the_reason() -> None:
    found = mlstm_answers.predicted(committed_inputs("mlstm-scaling")[0])
    assert isinstance(found, Reply) and {name.split()[0] for name in found.numbers} == {"mlstm8192"}
    assert "mlstm4096 (host-bound)" in found.text


def test_a_step_is_not_called_shorter_if_its_interval_contains_zero() -> None:
    inputs = committed_inputs("hpml-lab4")[0]
    found = lab_answers.separated(inputs)
    assert isinstance(found, Reply)
    assert inputs.communication.exposed["difference_s_low"].iloc[-1] < 0
    assert "not significantly shorter" in found.text.split("; ")[-1]


def lab_law(fields: dict[str, Any]) -> dict[str, Any]:
    """The host needs 8 ms to launch a step, the device 0.1 ms per sample; two ranks add 2 ms."""
    device_s = 0.0001 * fields["batch_per_gpu"]
    step_s = max(0.008, device_s) + (0.002 if fields["world_size"] > 1 else 0.0)
    return {
        "step_s": step_s,
        "launch_ratio": 0.008 / step_s,
        "busy_ratio": device_s / step_s / 0.97,
        "previous_done": 0.9 if device_s < 0.008 else 0.0,
        "communication": {
            "last_gradient_s": 0.9 * step_s, "bucket_bytes": (40_000_000,), "latency_s": 0.0, "bandwidth": 20e9,
            "contention": 1.0,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    trials = grid(GPU | {"model": "resnet18_small", "image_size": 28}, world_size=[1, 2], batch_per_gpu=[16, 32, 1024])
    evidence = {"ranks": 2, "epochs": 3, "repeated_batches": 1.0, "seen_without": 0.5, "seen_with": 0.875}
    folder = tmp_path_factory.mktemp("lab") / "results"
    return answered(folder, "hpml-lab4", trials, lab_law, record={"evidence": evidence})


def test_an_epoch_gets_shorter_because_the_host_launches_fewer_steps(lab: dict[str, Answer]) -> None:
    found = lab["epoch_time"]
    assert found.numbers["ratio"] == pytest.approx(0.1 / 0.5, rel=0.01)
    assert found.reason == "host"
    assert "shorter" in found.text


def test_the_data_point_of_strong_scaling_comes_from_the_same_trials(lab: dict[str, Answer]) -> None:
    numbers = lab["scaling_kind"].numbers
    assert numbers["weak"] == pytest.approx(2 * 0.1024 / 0.1044, rel=0.01)
    assert numbers["strong"] == pytest.approx(0.008 / 0.010, rel=0.01), "1 x 32 against 2 x 16"


def test_the_bandwidth_formula_is_filled_in(lab: dict[str, Answer]) -> None:
    found = lab["bandwidth"]
    assert found.numbers["bytes"] == 40_000_000
    assert found.numbers["ranks"] == 2
    assert found.numbers["bus_bytes_per_s"] == pytest.approx(20e9, rel=0.01)
    assert "40.00 MB / 2.000 ms · 2·1/2 = 20.0 GB/s" in found.text


def test_evidence_that_was_not_collected_is_named_with_its_command(lab: dict[str, Answer]) -> None:
    assert lab["set_epoch"].numbers["seen_with"] == 0.875
    assert not lab["sent"].is_answered
    assert "scripts.lab4_evidence" in lab["sent"].text


def test_the_lab_without_trainings_names_the_command_that_trains(lab: dict[str, Answer]) -> None:
    assert not lab["fifth_epoch"].is_answered
    assert "study.scaling run" in lab["fifth_epoch"].text


@pytest.fixture(scope="module")
def vgg(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    trials = grid(GPU | {"model": "vgg19"}, world_size=[1, 2], parallel=["dp", "ddp"], batch_per_gpu=[8, 49, 400])
    return answered(tmp_path_factory.mktemp("vgg") / "results", "vgg-case-study", trials, host_law)


def test_the_best_batch_is_the_fastest_and_the_smallest_near_it_is_named(vgg: dict[str, Answer]) -> None:
    assert vgg["best_batch"].numbers == {"best": 400.0, "enough": 49.0}
    assert vgg["best_batch"].reason == "host"


def test_one_gpu_is_better_only_where_launching_takes_longer(vgg: dict[str, Answer]) -> None:
    found = vgg["one_is_better"]
    assert found.numbers["worst"] == pytest.approx(2 * 0.01002 / 0.03002, rel=0.01)
    assert found.numbers["count"] == 2, "batches 8 and 49"
    assert found.reason == "host"


def test_steps_of_the_ladder_state_what_they_change(tmp_path: Path) -> None:
    base = GPU | {"dataset": "image_folder", "parallel": "none", "batch_per_gpu": 64}
    trials = [*grid(base, storage=["jpeg", "lmdb"]), *grid(base | {"storage": "lmdb"}, precision=["fp16"])]
    seconds = {("jpeg", "fp32"): 0.08, ("lmdb", "fp32"): 0.04, ("lmdb", "fp16"): 0.02}
    names = ["files", "LMDB", "mixed precision"]
    ladder_steps = [{"name": name, "trial_ids": [trial_id(trial)]} for name, trial in zip(names, trials, strict=True)]
    published = {"machine": "another machine", "samples": 64, "batches_s": [30.0, 10.0], "source": "a source"}
    found = answered(
        tmp_path / "results", "acceleration-ladder", trials,
        lambda fields: {"step_s": seconds[fields["storage"], fields["precision"]]},
        ladder_steps=ladder_steps, reference_ladders=[published],
    )  # fmt: skip
    assert found["steps"].numbers == pytest.approx({"LMDB": 2.0, "mixed precision": 2.0}, rel=0.01)
    assert "storage jpeg to lmdb" in found["steps"].text
    assert "precision fp32 to fp16" in found["steps"].text
    assert found["total"].numbers["gain"] == pytest.approx(4.0, rel=0.01)
    assert "3.00x" in found["total"].text and "another machine" in found["total"].text
    assert not found["precision"].is_answered


def test_all_steps_of_the_ladder_state_how_many_batches_were_timed_not_how_many_were_requested() -> None:
    inputs = committed_inputs("acceleration-ladder")[0]
    plain = pd.read_parquet(RESULTS / "acceleration-ladder/steps.parquet").query("window == 'plain' and rank == 0")
    timed = plain.groupby("trial_id").size()
    assert set(inputs.results.trials["steps"]) == {50} and timed.min() < 50
    found = ladder_answers.total(inputs)
    assert isinstance(found, Reply)
    assert (found.numbers["least_timed"], found.numbers["most_timed"]) == (timed.min(), timed.max())


def test_the_end_of_memory_is_stated_by_strategy_and_number_of_gpus() -> None:
    several = lab_answers.epoch_time(committed_inputs("hpml-lab4-memory")[0])
    assert isinstance(several, Reply) and several.text.endswith("Out of memory: ddp at batch 32,768 on 1 GPU.")
    one = lab_answers.epoch_time(committed_inputs("hpml-lab4-memory-2gpu")[0])
    assert isinstance(one, Missing) and "dp at batch 30,000 on 1 and 2 GPUs" in one.why


def test_a_step_of_the_ladder_whose_interval_contains_no_gain_is_not_the_largest_gain(tmp_path: Path) -> None:
    """The second step is as fast as the first; repeats differ by 4 % in turn."""
    trials = grid(GPU | {"parallel": "none", "batch_per_gpu": 64}, precision=["fp32", "bf16"], repeat=[0, 1, 2])
    names = [{"name": name, "trial_ids": [trial_id(trial) for trial in trials if trial["precision"] == precision]}
             for name, precision in (("before", "fp32"), ("after", "bf16"))]  # fmt: skip
    found = answered(
        tmp_path / "results", "acceleration-ladder", trials,
        lambda fields: {"step_s": 0.04 * (1 + 0.04 * ((fields["repeat"] + (fields["precision"] == "bf16")) % 2))},
        ladder_steps=names,
    )  # fmt: skip
    assert found["steps"].text.startswith("No step gains")


def test_number_formats_state_speed_and_accuracy_relative_to_fp32(tmp_path: Path) -> None:
    """bf16 is twice as fast and loses nothing; fp16 loses five points."""
    of_format = {"fp32": (0.02, 0.90), "bf16": (0.01, 0.90), "fp16": (0.01, 0.85)}
    write_study(tmp_path)
    for name, (step_s, top1) in of_format.items():
        for seed, shift in enumerate((-0.001, 0.0, 0.001)):
            fields = TRAINING | {"precision": name, "seed": seed, "repeat": seed}
            write_training(tmp_path, fields, epochs(fields, top1 + shift, step_s))
    found = trainings.cost(report_inputs(load_reduced(tmp_path))[0])
    assert isinstance(found, Reply)
    assert found.numbers == pytest.approx({"bf16_speed": 2, "bf16_points": 0, "fp16_speed": 2, "fp16_points": -5})
    assert found.text.startswith("Accuracy falls in fp16 (95")


def test_number_formats_have_their_levels_if_all_have_one(tmp_path: Path) -> None:
    write_study(tmp_path)
    for name in ("fp32", "fp16", "fp16_pure"):
        fields = TRAINING | {"precision": name}
        write_training(tmp_path, fields, epochs(fields, 0.9, 0.01))
    reached = by_precision(report_inputs(load_reduced(tmp_path))[0].accuracy)
    assert dict(reached["recipe"]) == {"fp32": "fp32 (O0)", "fp16": "fp16 (O1)", "fp16_pure": "fp16_pure (O3)"}


def test_recipes_state_held_out_accuracy_next_to_training_accuracy(tmp_path: Path) -> None:
    """LARS gains in training, and loses on held-out samples."""
    write_study(tmp_path, configuration={"repeats": 3, "report_epoch": 5})
    layouts: list[tuple[dict[str, Any], float, float]] = [
        ({}, 0.9, 0.9),
        ({"batch_per_gpu": 1024}, 0.6, 0.5),
        ({"batch_per_gpu": 1024, "optimizer": "lars"}, 0.7, 0.4),
    ]
    for layout, training, held_out in layouts:
        for seed, shift in enumerate((-0.001, 0.0, 0.001)):
            fields = TRAINING | layout | {"seed": seed, "repeat": seed, "epochs": 5}
            write_training(tmp_path, fields, epochs(fields, held_out + shift, 0.01).assign(train_top1=training + shift))
    found = lab_answers.recipes(report_inputs(load_reduced(tmp_path))[0])
    assert isinstance(found, Reply)
    assert found.numbers == pytest.approx(
        {"plain_top1": 0.6, "best_top1": 0.7, "no recipe_held_out_top1": 0.5, "LARS_held_out_top1": 0.4}
    )


def test_a_global_batch_that_ranks_divide_is_compared_by_seed(tmp_path: Path) -> None:
    """Two ranks lose 3 points at batch 512, whose seeds agree, and nothing at 256."""
    write_study(tmp_path)
    for batch, lost in ((256, 0.0), (512, 0.03)):
        for ranks in (1, 2):
            for seed, shift in enumerate((-0.02, 0.0, 0.02)):
                fields = TRAINING | {"world_size": ranks, "batch_per_gpu": batch // ranks, "lr_rule": "linear"}
                fields |= {"seed": seed, "repeat": seed}
                top1 = 0.9 + shift - lost * (ranks - 1) + 0.0001 * seed * ranks
                write_training(tmp_path, fields, epochs(fields, top1))
    found = trainings.divided(report_inputs(load_reduced(tmp_path))[0])
    assert isinstance(found, Reply)
    assert found.text.startswith("No. ")
    assert found.numbers == pytest.approx({"linear_256_points": 0.01, "linear_512_points": -2.99})


def test_seeds_that_differ_by_too_much_do_not_answer_whether_ranks_may_divide_a_batch(tmp_path: Path) -> None:
    write_study(tmp_path)
    for ranks, accuracies in ((1, (0.80, 0.84, 0.88)), (2, (0.85, 0.84, 0.83))):
        for seed, top1 in enumerate(accuracies):
            fields = TRAINING | {"world_size": ranks, "batch_per_gpu": 256 // ranks, "seed": seed, "repeat": seed}
            write_training(tmp_path, fields, epochs(fields, top1))
    found = trainings.divided(report_inputs(load_reduced(tmp_path))[0])
    assert isinstance(found, Missing)
    assert found.options == "--repeats 10"


def test_the_lab_gets_its_document_with_three_tables(tmp_path: Path) -> None:
    trials = grid(GPU | {"model": "resnet18_small", "image_size": 28}, world_size=[1, 2], batch_per_gpu=[16, 32])
    answered(tmp_path / "results", "hpml-lab4", trials, lab_law, documents=["lab4"])
    inputs = report_inputs(load_reduced(tmp_path / "results"))[0]
    files = document(inputs)
    assert set(files) == {"lab4.md", *(f"tables/lab4_table_{i}.{end}" for i in (1, 2, 3) for end in ("csv", "tex"))}
    first, second, third = (
        table.frame.set_index("gpus").astype(str).to_dict("index") for table in tables(inputs).values()
    )
    assert list(first) == ["1 GPU", "2 GPUs"]
    assert first["2 GPUs"]["Speedup 32"] == "1.60"
    assert float(second["2 GPUs"]["Compute (ms) 32"]) + float(second["2 GPUs"]["Comm (ms) 32"]) == (
        pytest.approx(10.0, abs=0.02)
    )
    assert third["2 GPUs"]["Bandwidth Utilization (GB/s) 32"].startswith("20.0")
    assert all(question in files["lab4.md"] for question in QUESTIONS["hpml-lab4"].values())


def test_times_of_the_lab_are_seconds_of_an_epoch_if_the_data_set_is_known() -> None:
    first, second, _ = (
        table.frame.set_index("gpus").astype(str).to_dict("index")["2 GPUs"]
        for table in tables(committed_inputs("hpml-lab4")[0]).values()
    )
    for batch in (64, 32768):
        parts = [float(second[f"{name} (s) {batch}"]) for name in ("Compute", "Comm")]
        assert sum(parts) == pytest.approx(float(first[f"Time (s) {batch}"]), abs=2e-3)


@pytest.mark.parametrize(
    ("spread", "gap", "first_on_two", "is_answered", "reason"),
    [
        (0.001, 0.0, 0, True, "same gradient"),
        (0.001, 0.05, 0, True, ""),
        (0.05, 0.0, 0, True, "same gradient"),  # each seed has the same accuracy on one and on two ranks
        (0.05, 0.0, 1, False, ""),
        (0.05, 0.05, 1, False, ""),
    ],
)
def test_equal_accuracy_on_more_ranks_is_stated_only_if_seeds_resolve_it(
    tmp_path: Path, spread: float, gap: float, first_on_two: int, is_answered: bool, reason: str
) -> None:
    """Two ranks with half the batch each train on the same global batch. first_on_two: first seed on two ranks."""
    write_study(tmp_path)
    for world_size in (1, 2):
        for seed, shift in enumerate((-spread, 0.0, spread), first_on_two * (world_size - 1)):
            shape = {"world_size": world_size, "batch_per_gpu": 128 // world_size, "parallel": "ddp"}
            fields = TRAINING | shape | {"seed": seed, "repeat": seed}
            write_training(tmp_path, fields, epochs(fields, 0.85 + shift - gap * (world_size - 1), 0.02))
    found = vgg_answers.accuracy(report_inputs(load_reduced(tmp_path))[0])
    assert isinstance(found, Reply) == is_answered
    if isinstance(found, Reply):
        assert found.numbers["difference"] == pytest.approx(-gap, abs=1e-6)
        assert found.reason == reason
        assert found.text.startswith("Yes" if gap else "No")


def test_the_parts_of_a_step_are_those_of_the_model_that_leads_the_card() -> None:
    inputs = committed_inputs("forum-phases-batch-256")[0]
    leading = inputs.configurations.loc[inputs.headlines[0].configuration, "model"]
    reply = next(found for found in answers(inputs) if found.key == "forum.parts")
    assert f"and {leading!s}, per step" in reply.text
    assert inputs.configurations["model"].nunique() > 1
