"""The levers: when each applies, what it changes, its upper bound, and the search that options describe."""

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.compare.bottleneck import REGIONS
from benchmarks.truth.improve import CASES
from study.capacity import NodeCapacity
from study.errors import ConfigurationError
from study.improve.factory_levers import LEVERS
from study.improve.lever import Lever, Machine, changed_fields
from study.improve.own_code_levers import LEVERS as OWN_CODE_LEVERS
from study.improve.own_code_levers import varied_levers
from study.improve.record import usage
from study.improve.rounds import Settings, timed_steps
from study.improve.start import WINDOW_LIMIT_S, request, seconds_of, settings_for
from tests.support.improving import CPU_NODE, GPU_NODE, NAIVE, naive_law
from trainables import rules
from trainables.trial import Trial

BY_NAME = {lever.name: lever for lever in (*LEVERS, *OWN_CODE_LEVERS)}
GPUS = Machine([GPU_NODE], ("jpeg", "lmdb", "arrow_raw"))
CPUS = Machine([CPU_NODE])
SHARES = dict.fromkeys(REGIONS, 0.0) | {"load": 0.5, "transfer": 0.1, "compute": 0.4}
TWO_GPUS = {"model": "vgg19", "dataset": "synthetic", "image_size": 224, "device": "cuda", "world_size": 2,
            "cpus_per_rank": 16}  # fmt: skip
GPT2 = {"model": "gpt2", "dataset": "token_sample", "device": "cuda", "cpus_per_rank": 16}
TRAINING = {"model": "mlp", "epochs": 5}
SCRIPT = {"script": "/train.py", "device": "cuda", "world_size": 2, "cpus_per_rank": 4}

CHANGES: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("loader workers, up to 8", NAIVE, {"loader_workers": 8}),
    ("loader workers, up to 16", NAIVE | {"loader_workers": 8}, {"loader_workers": 16}),
    ("loader workers, up to 16", NAIVE, None),
    ("loader workers, up to 8", TWO_GPUS, None),
    ("decode on GPU, ahead", NAIVE, {"decode": "nvjpeg_ahead"}),
    ("decode on GPU", NAIVE | {"augment": "cpu"}, {"decode": "nvjpeg", "augment": "device"}),
    ("decode on GPU", NAIVE | {"storage": "arrow_raw"}, None),
    ("storage lmdb", NAIVE, {"storage": "lmdb"}),
    ("storage arrow_jpeg", NAIVE, None),
    ("bf16", NAIVE, {"precision": "bf16"}),
    ("bf16", NAIVE | {"precision": "fp16"}, None),
    ("tf32", NAIVE, {"precision": "tf32"}),
    ("fp8", NAIVE | {"precision": "bf16"}, None),
    ("fp8", GPT2, None),
    ("channels_last", NAIVE, {"memory_format": "channels_last"}),
    ("channels_last", {"model": "transformer", "dataset": "text_sample", "device": "cuda"}, None),
    ("compile", NAIVE, {"execution": "compile"}),
    ("compile", NAIVE | {"execution": "graph"}, {"execution": "compile_graph"}),
    ("CUDA graph", NAIVE | {"execution": "compile"}, {"execution": "compile_graph"}),
    ("compiled CUDA graph", NAIVE, {"execution": "compile_graph"}),
    ("rewritten stem", NAIVE, None),
    ("rewritten stem", NAIVE | {"execution": "compile"}, {"rewritten_stem": True}),
    ("batch 2x", NAIVE, {"batch_per_gpu": 128}),
    ("copy ahead", NAIVE, {"copy_ahead": True, "pin_memory": True, "non_blocking": True}),
    ("pinned memory", NAIVE, {"pin_memory": True, "non_blocking": True}),
    ("prefetch 2x", NAIVE, None),
    ("prefetch 2x", NAIVE | {"loader_workers": 4}, {"prefetch_batches": 4}),
    ("data in shared memory", NAIVE, {"storage_place": "shared_memory"}),
    ("warm page cache", NAIVE, {"page_cache": "warm"}),
    ("augment on GPU", NAIVE | {"augment": "cpu"}, {"augment": "device"}),
    (
        "usual settings", NAIVE,
        {"precision": "bf16", "memory_format": "channels_last", "loader_workers": 8, "copy_ahead": True,
         "pin_memory": True, "non_blocking": True},
    ),
    (
        "usual settings, same arithmetic", NAIVE,
        {"memory_format": "channels_last", "loader_workers": 8, "copy_ahead": True, "pin_memory": True,
         "non_blocking": True},
    ),
    ("usual settings", NAIVE | {"device": "cpu"}, None),
    ("bf16 gradients", TWO_GPUS, {"parallel": "ddp_bf16"}),
    ("bf16 gradients", NAIVE, None),
    ("ZeRO-1", TWO_GPUS, {"parallel": "zero1"}),
    ("FSDP2", TWO_GPUS | {"static_graph": True}, {"parallel": "fsdp2", "static_graph": False}),
    ("accumulation 2x", TWO_GPUS, {"accumulation_steps": 2}),
    ("buckets 4x", TWO_GPUS, {"bucket_mb": 100.0}),
    ("buckets 1/4", TWO_GPUS, {"bucket_mb": 6.25}),
    ("first bucket 1 MiB", TWO_GPUS, {"first_bucket_mb": 1.0}),
    ("first bucket 1 MiB", TWO_GPUS | {"bucket_mb": 1.0}, None),
    ("first bucket 1 MiB", NAIVE, None),
    ("selective checkpointing, batch 2x", GPT2, {"activation_checkpointing": "selective", "batch_per_gpu": 64}),
    ("full checkpointing, batch 2x", GPT2, {"activation_checkpointing": "full", "batch_per_gpu": 64}),
    ("selective checkpointing, batch 2x", NAIVE, None),
    ("selective checkpointing, batch 2x", GPT2 | {"activation_checkpointing": "full"}, None),
    ("data on the device", TRAINING | {"loader_workers": 2}, {"resident_data": True, "loader_workers": 0}),
    ("data on the device", TRAINING | {"epochs": 0}, None),
    ("data on the device", TRAINING | {"resident_data": True}, None),
    ("batch 2x", TRAINING, {"batch_per_gpu": 64, "lr_rule": "linear", "reference_batch": 32}),
    ("batch 2x", TRAINING | {"lr_rule": "sqrt", "batch_per_gpu": 256}, {"batch_per_gpu": 512}),
    ("batch 2x", TRAINING | {"optimizer": "adamw"}, {"batch_per_gpu": 64, "lr_rule": "sqrt", "reference_batch": 32}),
    ("gradient views", TWO_GPUS | {"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": True}),
    ("static graph", TWO_GPUS, {"static_graph": True}),
    ("static graph", TWO_GPUS | {"accumulation_steps": 2}, None),
    ("no buffer broadcast", TWO_GPUS, {"broadcast_buffers": False}),
    ("OMP_NUM_THREADS, all cores", SCRIPT, {"script_env": "OMP_NUM_THREADS=16"}),
    ("OMP_NUM_THREADS, half of the cores", SCRIPT | {"script_env": "OMP_NUM_THREADS=2"}, None),
    ("NCCL_BUFFSIZE=16777216", SCRIPT | {"script_env": "A=1"}, {"script_env": "A=1 NCCL_BUFFSIZE=16777216"}),
    ("NCCL_BUFFSIZE=16777216", SCRIPT | {"world_size": 1}, None),
    ("CUDA_DEVICE_MAX_CONNECTIONS=32", SCRIPT, {"script_env": "CUDA_DEVICE_MAX_CONNECTIONS=32"}),
    ("TORCHINDUCTOR_MAX_AUTOTUNE=1", SCRIPT | {"device": "cpu"}, None),
    ("batch 2x (bound)", SCRIPT | {"bindings": "batch_per_gpu=--batch"}, {"batch_per_gpu": 64}),
    ("batch 2x (bound)", SCRIPT, None),
    ("more loader workers (bound)", SCRIPT | {"bindings": "loader_workers=--workers"}, {"loader_workers": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "change"), CHANGES)
def test_a_lever_changes_its_fields_where_it_applies(
    name: str, fields: dict[str, Any], change: dict[str, Any] | None
) -> None:
    trial = Trial(**fields)
    changed = BY_NAME[name].applied(trial, GPUS)
    assert (None if changed is None else changed_fields(trial, changed)) == change


@pytest.mark.parametrize("is_installed", [True, False])
def test_linear_layers_of_a_text_model_in_bf16_may_compute_in_fp8_where_torchao_is_installed(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_installed", lambda package: is_installed or not package)
    trial = Trial(**GPT2 | {"precision": "bf16"})
    changed = BY_NAME["fp8"].applied(trial, GPUS)
    assert (changed is not None and changed.precision == "fp8") == is_installed


def test_levers_of_cpu_ranks_use_the_cores_that_the_host_has() -> None:
    trial = Trial(model="mlp", world_size=2)
    cores, pinned = (BY_NAME[name].applied(trial, CPUS) for name in ("all CPU cores", "pinned cores"))
    assert cores is not None and cores.cpus_per_rank == 4
    assert pinned is not None and pinned.pin_cores
    assert BY_NAME["all CPU cores"].applied(trial, Machine([NodeCapacity("a", "a", cpus=2, gpus=0)])) is None


def test_every_lever_names_known_regions_and_every_change_is_covered_by_a_case() -> None:
    assert {part for lever in BY_NAME.values() for part in lever.parts} <= set(REGIONS)
    assert len(BY_NAME) == len(LEVERS) + len(OWN_CODE_LEVERS)


@given(st.lists(st.floats(min_value=0, max_value=1), min_size=len(REGIONS), max_size=len(REGIONS)))
def test_a_bound_is_the_speed_up_without_the_parts_and_grows_with_them(values: list[float]) -> None:
    total = sum(values) or 1.0
    shares = {name: value / total for name, value in zip(REGIONS, values, strict=True)}
    one, two = (
        Lever("x", parts, "order", lambda trial, machine: None).bound(shares, Trial(), CPUS)
        for parts in (("load",), ("load", "transfer"))
    )
    assert one is not None and two is not None
    assert 1 <= one <= two
    if shares["load"] < 0.98:
        assert one == pytest.approx(1 / (1 - shares["load"]))


def test_unmeasured_communication_is_bounded_by_compute_that_contains_it() -> None:
    shares = SHARES | {"wire": math.nan}
    two = Trial(**TWO_GPUS)
    assert BY_NAME["buckets 4x"].bound(shares, two, GPUS) == pytest.approx(1 / 0.6)
    assert BY_NAME["buckets 4x"].bound({}, two, GPUS) is None


def test_usual_settings_are_bounded_by_those_that_apply_and_fp8_by_half_of_the_computation() -> None:
    text = Trial(**GPT2 | {"precision": "bf16"})
    assert BY_NAME["usual settings"].bound(SHARES, text, GPUS) == pytest.approx(1 / (1 - 0.6))
    assert BY_NAME["usual settings"].bound(SHARES, Trial(**NAIVE), GPUS) == math.inf
    assert BY_NAME["fp8"].bound(SHARES, text, GPUS) == pytest.approx(1 / (1 - 0.2))


def test_bounds_hold_in_the_law_of_the_step() -> None:
    trial = Trial(**NAIVE)
    parts = naive_law(trial)
    shares = {name: seconds / sum(parts.values()) for name, seconds in parts.items()}
    for name in ("loader workers, up to 8", "bf16", "compile", "pinned memory", "copy ahead", "CUDA graph"):
        changed = BY_NAME[name].applied(trial, GPUS)
        assert changed is not None
        bound = BY_NAME[name].bound(shares, trial, GPUS)
        assert bound is not None
        assert sum(parts.values()) / sum(naive_law(changed).values()) <= bound * (1 + 1e-12)


def test_further_values_of_a_varied_flag_are_levers() -> None:
    levers = list(varied_levers({"script_flags": ("", "--amp"), "script_env": ("A=1", "A=2")}))
    assert [lever.name for lever in levers] == ["--amp", "A=2"]
    trial = Trial(**SCRIPT, script_env="A=1 B=3")
    changed = levers[1].applied(trial, GPUS)
    assert changed is not None
    assert changed.script_env == "B=3 A=2"


def test_a_script_is_used_by_its_flags_and_variables() -> None:
    base = Trial(**SCRIPT, script_arguments="--lr 0.1", bindings="batch_per_gpu=--batch")
    names = ("OMP_NUM_THREADS, all cores", "batch 2x (bound)")
    found = usage(Settings(base, BY_NAME, GPUS), names)
    assert found["command"] == "OMP_NUM_THREADS=16 torchrun --nproc-per-node=2 /train.py --lr 0.1 --batch 64"
    assert found["changes"] == {"script_env": "OMP_NUM_THREADS=16", "batch_per_gpu": 64}


def test_a_model_is_used_by_options_of_run() -> None:
    found = usage(Settings(Trial(**TWO_GPUS), BY_NAME, GPUS), ("bf16", "static graph"))
    words = found["command"].split()
    assert words[:5] == ["python", "-m", "study.scaling", "run", "--model"]
    assert {"--precision", "static_graph=true", "dataset=synthetic"} <= set(words)
    assert "precision: bf16\n" in found["yaml"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("20 min", 1200)])
def test_a_budget_is_a_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "0m", "20x", "1e9h", "nan"])
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--budget"):
        seconds_of(text)


def options(**given: Any) -> dict[str, Any]:
    return {"config": None, "out": None, **given}


@pytest.mark.parametrize(
    ("given_options", "limits", "word"),
    [
        ({}, {}, "nothing to improve"),
        ({"model": "mlp"}, {"goal": "speed"}, "--goal"),
        ({"model": "mlp", "gpus": "1"}, {"goal": "time-to-accuracy"}, "--target-accuracy"),
        ({"model": "mlp", "gpus": "1", "epochs": "5"}, {}, "--epochs"),
        ({"model": "mlp"}, {"goal": "time-to-accuracy", "trials": 14}, "at least 15"),
        ({"model": "mlp"}, {"trials": 5}, "--trials"),
        ({"model": "mlp", "gpus": "1,2"}, {}, "world_size"),
        ({"model": "mlp", "gpus": "1"}, {"goal": "efficiency"}, "--goal efficiency"),
    ],
)
def test_a_search_that_is_not_possible_is_refused(
    given_options: dict[str, Any], limits: dict[str, Any], word: str
) -> None:
    limits = {"goal": None, "budget": None, "trials": None, "keep_arithmetic": False} | limits
    with pytest.raises(ConfigurationError, match=word):
        settings_for(request(options(**given_options), None, **limits), [CPU_NODE])


def test_the_baseline_has_the_given_fields_and_the_first_of_several_values(tmp_path: Path) -> None:
    given_options = options(model="mlp", gpus="2", batch_per_gpu="8,16", out=str(tmp_path / "new"))
    found = settings_for(request(given_options, None, None, "20m", None, True), [CPU_NODE])
    assert (found.base.model, found.base.world_size, found.base.batch_per_gpu) == ("mlp", 2, 8)
    assert (found.trials, found.budget_s) == (None, 1200.0)
    changed = found.levers["batch_per_gpu 16"].applied(found.base, found.machine)
    assert changed is not None
    assert changed.batch_per_gpu == 16
    assert (found.base.window_limit_s, "window_limit_s" in usage(found, ())["command"]) == (WINDOW_LIMIT_S, False)
    others = [lever for name, lever in found.levers.items() if name != "batch_per_gpu 16"]
    assert others
    assert all(lever.effect != "arithmetic" for lever in others)


def test_with_the_goal_cost_further_numbers_of_ranks_are_levers() -> None:
    asked = request(options(model="mlp", gpus="4,1", price_per_gpu_hour="2.5"), None, "cost", None, None, True)
    found = settings_for(asked, [CPU_NODE])
    changed = found.trial(("1 CPU rank",))
    assert changed is not None
    assert (found.base.world_size, changed.world_size, found.price_per_gpu_hour) == (4, 1, 2.5)
    assert found.sizes_of(()) == (4,) and found.sizes_of(("1 CPU rank",)) == (1,)


def test_a_training_is_improved_from_its_options() -> None:
    given_options = options(model="mlp", gpus="2", epochs="5", target_accuracy="0.5")
    found = settings_for(request(given_options, None, "time-to-accuracy", None, None, False), [CPU_NODE])
    assert (found.base.epochs, found.base.target_accuracy, found.is_training) == (5, 0.5, True)
    steps = timed_steps(found.base)
    assert (steps.epochs, steps.world_size, steps.window_limit_s) == (0, 2, WINDOW_LIMIT_S)


def test_windows_are_as_long_as_a_given_number_of_steps() -> None:
    for given_options in (options(model="mlp", steps="30"), options(model="mlp", set_=["steps=30"])):
        found = settings_for(request(given_options, None, None, "20m", None, True), [CPU_NODE])
        assert (found.base.steps, found.base.window_limit_s) == (30, None)


def test_the_naive_starts_and_the_fastest_configurations_of_the_benchmark_are_valid() -> None:
    node = NodeCapacity("node-a", "10.0.0.1", cpus=32, gpus=2)
    for case in CASES.values():
        for side in (case.naive, case.best):
            given_options = parsed(f"{case.work} {side} --gpus {case.gpus}")
            found = settings_for(request(given_options, None, None, "15m", 40, False), [node])
            assert found.base.device == "cuda"
            assert found.base.world_size == case.gpus


def parsed(text: str) -> dict[str, Any]:
    """Return the options of a command line by parameter."""
    words = shlex.split(text)
    found: dict[str, Any] = options(set_=[])
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name == "--set":
            found["set_"].append(value)
        else:
            found[name.removeprefix("--").replace("-", "_")] = value
    return found
