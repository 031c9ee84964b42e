"""Trials: ids, derived properties, and one-line messages for invalid fields."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st
from pydantic import ValidationError

from trainables.fields import FIELD_FACTS, explain, only_with, reference_order
from trainables.registry import (
    AHEAD_BATCHES,
    DATASETS,
    MODELS,
    PARALLEL,
    PRECISIONS,
    datasets_of,
)
from trainables.rule import RuleError
from trainables.rules import RULES, unmet_requirement
from trainables.trial import Trial

ROOT = Path(__file__).parent.parent.parent

CHANGED: dict[str, Any] = {
    "model": "mlp",
    "dataset": "cifar10",
    "data_dir": "/data",
    "workload": "mine.py:build",
    "workload_digest": "0a1b2c3d",
    "script": "/home/me/train.py",
    "script_digest": "f00dcafe",
    "script_arguments": "--epochs 1",
    "script_flags": "--batch-size 16",
    "script_env": "OMP_NUM_THREADS=2",
    "train_function": "/home/me/train.py:train_func",
    "train_function_digest": "f00dcafe",
    "function_config": '{"lr": 0.1}',
    "bindings": "batch_per_gpu=--batch-size",
    "add_ddp": True,
    "tokens_per_sample": 1024,
    "image_size": 32,
    "sequence_length": 64,
    "storage": "lmdb",
    "storage_place": "shared_memory",
    "page_cache": "cold",
    "order": "in_order",
    "set_epoch": False,
    "decode": "torchvision",
    "augment": "cpu",
    "device": "cuda",
    "world_size": 2,
    "nodes": 2,
    "cpus_per_rank": 2,
    "pin_cores": True,
    "batch_per_gpu": 64,
    "loader_workers": 1,
    "prefetch_batches": 3,
    "pin_memory": False,
    "non_blocking": False,
    "copy_ahead": True,
    "precision": "bf16",
    "parallel": "none",
    "shard_ranks": 1,
    "sync_batch_norm": True,
    "broadcast_buffers": False,
    "bucket_mb": 1.0,
    "first_bucket_mb": 1.0,
    "gradient_as_bucket_view": False,
    "static_graph": True,
    "find_unused_parameters": True,
    "accumulation_steps": 2,
    "execution": "compile",
    "memory_format": "channels_last",
    "rewritten_stem": True,
    "fused_loss": True,
    "attention": "math",
    "split_graph": False,
    "activation_checkpointing": "full",
    "optimizer": "nesterov",
    "learning_rate": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "epochs": 1,
    "target_accuracy": 0.9,
    "reference_batch": 256,
    "lr_rule": "linear",
    "warmup": "gradual",
    "warmup_epochs": 1.0,
    "decay": "cosine",
    "decay_norm_and_bias": False,
    "zero_gamma": True,
    "momentum_correction": False,
    "loss_mean": "rank",
    "shared_shuffle": False,
    "label_smoothing": 0.1,
    "resident_data": True,
    "noise_scale": True,
    "deterministic": True,
    "warmup_steps": 4,
    "steps": 21,
    "window_limit_s": 5.0,
    "median_width": 0.01,
    "seed": 1,
    "interconnect": "socket",
    "communication_steps": 0,
    "sweep_bytes": 2**20,
    "profile_ranks": "0+3",
    "repeat": 1,
}

NEEDS: dict[str, dict[str, Any]] = {
    "nodes": {"world_size": 2},
    **{name: {"script": "/home/me/train.py"} for name in ("script_arguments", "script_flags", "script_env", "add_ddp")},
    "rewritten_stem": {"model": "resnet18", "execution": "compile"},
    **{name: {"model": "gpt2_tiny", "dataset": "token_sample"} for name in ("fused_loss", "attention")},
    "shard_ranks": {"parallel": "hsdp"},
    "split_graph": {"execution": "compile"},
    "activation_checkpointing": {"model": "gpt2_tiny", "dataset": "token_sample"},
    **{name: {"dataset": "image_folder"} for name, facts in FIELD_FACTS.items() if facts.image_folders_only},
    **{name: {"epochs": 1, "accumulation_steps": 2} for name, facts in FIELD_FACTS.items() if facts.needs_epochs},
}
"""other fields that a changed field requires"""


def lines(fields: Any) -> list[str]:
    with pytest.raises(ValidationError) as error:
        Trial.model_validate(fields)
    return explain(error.value)


def broken(fields: Any) -> tuple[str, ...]:
    """Return the fields of the rule that the trial breaks. Checks that the message is formatted and names the first."""
    with pytest.raises(ValidationError) as error:
        Trial.model_validate(fields)
    reason = error.value.errors()[0]["ctx"]["error"]
    assert isinstance(reason, RuleError)
    assert "{" not in str(reason) and "\n" not in str(reason)
    assert all(name in str(reason) for name in reason.rule.fields[:1])
    return reason.rule.fields


# ------------------------------------------------------------------------------------------------------- identity


def test_an_id_is_the_same_in_every_process() -> None:
    trial = Trial(world_size=2, batch_per_gpu=64, precision="bf16", learning_rate=0.1)
    code = (
        "from trainables.trial import Trial\n"
        "print(Trial(learning_rate=0.1, precision='bf16', batch_per_gpu=64, world_size=2).trial_id)"
    )
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
        assert run.stdout.strip() == trial.trial_id


def test_changing_any_field_changes_the_id() -> None:
    assert set(CHANGED) == set(Trial.model_fields), "a field is missing in this test"
    for name, value in CHANGED.items():
        before = Trial(**NEEDS.get(name, {}))
        after = before.but(**{name: value})
        assert getattr(before, name) != getattr(after, name)
        assert before.trial_id != after.trial_id, name


def test_an_id_is_a_readable_slug_and_a_hash() -> None:
    slug, _, digest = Trial(
        model="mlp", world_size=4, nodes=2, batch_per_gpu=8, loader_workers=1, repeat=2, precision="bf16"
    ).trial_id.rpartition("-")
    assert slug == "mlp-ddp-bf16-n2x2-b8-w1-r2"
    assert len(digest) == 8
    assert set(digest) <= set("0123456789abcdef")


def test_the_id_contains_the_name_of_a_users_workload() -> None:
    assert Trial(workload="/home/me/my-models/mine.py:build").trial_id.startswith("build-ddp-")


def test_a_trial_is_immutable() -> None:
    trial = Trial()
    with pytest.raises(ValidationError):
        trial.steps = 5  # type: ignore[misc]


def test_a_changed_copy_is_validated_again() -> None:
    with pytest.raises(ValidationError) as error:
        Trial(world_size=2).but(nodes=3)
    (line,) = explain(error.value)
    assert "world_size 2" in line and "nodes 3" in line


# ------------------------------------------------------------------------------------------------ derived properties


def test_the_global_batch_covers_all_ranks() -> None:
    assert Trial(world_size=4, nodes=2, batch_per_gpu=8).global_batch == 32


@pytest.mark.parametrize(
    ("world_size", "nodes", "shard_ranks", "expected"),
    [
        (1, 1, None, 1),
        (2, 1, None, 1),
        (8, 1, None, 4),
        (3, 1, None, 3),
        (8, 2, None, 4),
        (8, 8, None, 1),
        (8, 1, 2, 2),
    ],
)
def test_hybrid_sharding_stays_within_a_node(
    world_size: int, nodes: int, shard_ranks: int | None, expected: int
) -> None:
    trial = Trial(parallel="hsdp", world_size=world_size, nodes=nodes, shard_ranks=shard_ranks)
    assert trial.shard_group_ranks == expected


@pytest.mark.parametrize(
    ("steps", "workers", "prefetch", "expected"),
    [(20, 0, 64, 20), (20, 1, 2, 20), (20, 1, 3, 30), (20, 2, 2, 40), (100, 2, 2, 100), (1, 0, 1, 1)],
)
def test_a_window_lasts_at_most_ten_times_the_loaders_queues(
    steps: int, workers: int, prefetch: int, expected: int
) -> None:
    assert Trial(steps=steps, loader_workers=workers, prefetch_batches=prefetch).window_steps == expected


def test_a_window_accounts_for_loader_and_prefetch_queues() -> None:
    trial = Trial(dataset="image_folder", decode="nvjpeg_ahead", steps=4)
    assert trial.window_steps == 10 * AHEAD_BATCHES
    assert trial.but(loader_workers=1).window_steps == 10 * (AHEAD_BATCHES + trial.prefetch_batches)
    assert trial.but(decode="nvjpeg").window_steps == trial.steps
    assert trial.but(decode="pil", copy_ahead=True).window_steps == 10 * AHEAD_BATCHES


# ------------------------------------------------------------------------------------------------ invalid trials


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"model": "resnet81"},
            f"model 'resnet81' is not known; allowed: {', '.join(MODELS)}; did you mean 'resnet18'?",
        ),
        ({"model": "zzz"}, f"model 'zzz' is not known; allowed: {', '.join(MODELS)}"),
        ({"precision": "b16"}, f"precision 'b16' is not known; allowed: {', '.join(PRECISIONS)}; did you mean 'bf16'?"),
        ({"parallel": "ddpp"}, f"parallel 'ddpp' is not known; allowed: {', '.join(PARALLEL)}; did you mean 'ddp'?"),
        (
            {"dataset": "cifar100"},
            f"dataset 'cifar100' is not known; allowed: {', '.join(DATASETS)}; did you mean 'cifar10'?",
        ),
        (
            {"memory_format": "channel_last"},
            "memory_format 'channel_last' is not known; allowed: contiguous, channels_last; "
            "did you mean 'channels_last'?",
        ),
        ({"batch_per_gpu": 0}, "batch_per_gpu 0: input should be greater than or equal to 1"),
        ({"warmup_steps": 1}, "warmup_steps 1: input should be greater than or equal to 2"),
        (
            {"batch_per_gpu": "many"},
            "batch_per_gpu 'many': input should be a valid integer, unable to parse string as an integer",
        ),
        ({"device": "tpu"}, "device 'tpu': input should be 'cpu' or 'cuda'"),
        ({"learning_rate": 0.0}, "learning_rate 0.0: input should be greater than 0"),
        ({"learning_rate": float("inf")}, "learning_rate inf: input should be a finite number"),
        ({"batch_per_gpus": 8}, "'batch_per_gpus' is not a field of a trial; did you mean 'batch_per_gpu'?"),
        ({"zzz": 8}, f"'zzz' is not a field of a trial; fields: {', '.join(Trial.model_fields)}"),
        ({"workload": "mine.py"}, "workload 'mine.py' is not FILE.py:NAME"),
        ({"workload": "mine.py:a/b"}, "workload 'mine.py:a/b' is not FILE.py:NAME"),
        ({"median_width": 0.0}, "median_width 0.0: input should be greater than 0"),
        (
            {"interconnect": "infiniband", "device": "cuda"},
            "interconnect 'infiniband': input should be 'auto', 'no_p2p' or 'socket'",
        ),
        ({"communication_steps": -1}, "communication_steps -1: input should be greater than or equal to 0"),
        ({"sweep_bytes": 3}, "sweep_bytes 3: input should be greater than or equal to 4"),
        ({"sweep_bytes": 2**34 + 1}, "sweep_bytes 17179869185: input should be less than or equal to 17179869184"),
    ],
)  # fmt: skip
def test_an_invalid_value_gives_one_line(fields: dict[str, Any], expected: str) -> None:
    assert lines(fields) == [expected]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "mlstm64", "dataset": "text_sample", "set_epoch": False}, ("set_epoch", "dataset")),
        ({"dataset": "synthetic", "order": "in_order"}, ("order", "dataset")),
        ({"world_size": 3, "nodes": 2}, ("world_size", "nodes")),
        ({"parallel": "fsdp2", "static_graph": True}, ("static_graph", "parallel")),
        ({"parallel": "fsdp2", "world_size": 2, "shard_ranks": 1}, ("shard_ranks", "parallel")),
        ({"parallel": "hsdp", "world_size": 4, "shard_ranks": 3}, ("shard_ranks", "world_size")),
        ({"execution": "compile_blocks"}, ("execution", "model")),
        (
            {"model": "gpt2_tiny", "dataset": "token_sample", "execution": "compile_blocks", "split_graph": False},
            ("split_graph", "execution"),
        ),
        ({"parallel": "fsdp2", "find_unused_parameters": True}, ("find_unused_parameters", "parallel")),
        ({"execution": "graph", "find_unused_parameters": True}, ("execution", "find_unused_parameters")),
        ({"parallel": "ddp_delayed", "static_graph": True}, ("static_graph", "parallel")),
        ({"parallel": "none", "gradient_as_bucket_view": False}, ("gradient_as_bucket_view", "parallel")),
        ({"parallel": "fsdp2", "world_size": 2, "broadcast_buffers": False}, ("broadcast_buffers", "parallel")),
        ({"parallel": "none", "bucket_mb": 1.0}, ("bucket_mb", "parallel")),
        ({"parallel": "none", "sync_batch_norm": True}, ("sync_batch_norm", "parallel")),
        ({"parallel": "dp", "nodes": 2, "world_size": 2}, ("parallel", "nodes")),
        ({"parallel": "dp", "execution": "graph"}, ("parallel", "execution")),
        ({"parallel": "zero1", "execution": "graph"}, ("execution", "parallel")),
        ({"execution": "graph", "accumulation_steps": 2}, ("execution", "accumulation_steps")),
        ({"optimizer": "nesterov", "momentum": 0}, ("optimizer", "momentum")),
        ({"order": "in_order", "set_epoch": False}, ("set_epoch", "order")),
        ({"parallel": "none", "world_size": 2}, ("parallel", "world_size")),
        ({"dataset": "synthetic", "loader_workers": 2}, ("loader_workers", "dataset")),
        ({"model": "vgg19", "image_size": 31}, ("image_size", "model")),
        ({"model": "inception_v3", "image_size": 74}, ("image_size", "model")),
        ({"model": "inception_v4", "image_size": 74}, ("image_size", "model")),
        ({"model": "mlstm64"}, ("model", "dataset")),
        ({"dataset": "text_sample"}, ("model", "dataset")),
        ({"storage": "lmdb"}, ("storage", "dataset")),
        ({"augment": "cpu"}, ("augment", "dataset")),
        ({"augment": "cpu", "dataset": "cifar10"}, ("augment", "dataset")),
        ({"augment": "device", "dataset": "synthetic"}, ("augment", "dataset")),
        ({"dataset": "image_folder", "storage": "arrow_raw", "decode": "torchvision"}, ("decode", "storage")),
        ({"dataset": "image_folder", "decode": "nvjpeg", "execution": "graph"}, ("decode", "parallel", "execution")),
        ({"dataset": "image_folder", "decode": "nvjpeg", "augment": "cpu"}, ("augment", "decode")),
        ({"rewritten_stem": True, "model": "mlp"}, ("rewritten_stem", "model", "image_size")),
        ({"rewritten_stem": True}, ("rewritten_stem", "execution")),
        ({"fused_loss": True}, ("fused_loss", "model")),
        ({"attention": "flash"}, ("attention", "model")),
        ({"split_graph": False}, ("split_graph", "execution")),
        ({"split_graph": False, "parallel": "none", "execution": "compile"}, ("split_graph", "parallel")),
        ({"first_bucket_mb": 1.0, "find_unused_parameters": True}, ("first_bucket_mb", "find_unused_parameters")),
        ({"activation_checkpointing": "full"}, ("activation_checkpointing", "model")),
        (
            {"fused_loss": True, "model": "gpt2_tiny", "dataset": "token_sample", "parallel": "dp"},
            ("fused_loss", "parallel"),
        ),
        (
            {"dataset": "image_folder", "storage_place": "shared_memory", "page_cache": "cold"},
            ("page_cache", "storage_place"),
        ),
    ],
)
def test_conflicting_fields_are_rejected(fields: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert broken(fields) == expected


def test_a_message_lists_what_is_allowed() -> None:
    (small,) = lines({"model": "vgg19", "image_size": 31})
    assert "image_size 31" in small and ">= 32" in small
    (strategy,) = lines({"parallel": "fsdp2", "static_graph": True})
    assert "ddp, ddp_fp16, ddp_bf16, zero1" in strategy
    (text,) = lines({"model": "mlstm64"})
    assert ", ".join(datasets_of("text")) in text


def test_every_rule_names_fields_of_a_trial() -> None:
    for rules in RULES.values():
        assert all(rule.fields and {*rule.fields} <= {*Trial.model_fields} for rule in rules)


def test_reports_compare_against_the_default_first() -> None:
    assert reference_order("parallel") == ["ddp", *(name for name in PARALLEL if name != "ddp")]
    assert reference_order("broadcast_buffers") == [True, False]
    assert reference_order("pin_memory") == [False, True]
    assert reference_order("page_cache") == ["as_is", "cold", "warm"]
    assert reference_order("loader_workers") == []
    assert only_with("static_graph") == {"parallel": ["ddp", "ddp_fp16", "ddp_bf16", "zero1"]}
    assert only_with("steps") == {}


def test_only_batches_from_a_loader_can_be_copied_ahead() -> None:
    fields = {"device": "cuda", "copy_ahead": True}
    assert unmet_requirement(Trial.model_validate(fields)) is None
    assert "dataset 'synthetic'" in (unmet_requirement(Trial.model_validate(fields | {"dataset": "synthetic"})) or "")
    resident = {"dataset": "fashion_mnist_sample", "resident_data": True, "epochs": 1}
    assert "'fashion_mnist_sample'" in (unmet_requirement(Trial.model_validate(fields | resident)) or "")
    users = {"dataset": "synthetic", "workload": "mine.py:build"}
    assert unmet_requirement(Trial.model_validate(fields | users)) is None


def test_windows_have_as_many_steps_as_their_limit_allows_but_at_least_five() -> None:
    trial = Trial(steps=30, communication_steps=10, window_limit_s=3.0)
    for step_s, steps, communication_steps in ((0.01, 30, 10), (0.25, 12, 10), (0.5, 6, 6), (60.0, 5, 5)):
        limited = trial.shortened(step_s)
        assert (limited.steps, limited.communication_steps) == (steps, communication_steps)
    assert trial.but(window_limit_s=None).shortened(60.0).steps == 30
    assert trial.but(steps=3).shortened(60.0).steps == 3


@pytest.mark.parametrize(("compiler", "is_found"), [(sys.executable, True), ("no-such-compiler", False)])
def test_compilation_for_cpus_is_infeasible_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, compiler: str, is_found: bool
) -> None:
    monkeypatch.setenv("CXX", compiler)
    reason = unmet_requirement(Trial(execution="compile"))
    assert reason is None if is_found else "C++ compiler" in str(reason)
    assert unmet_requirement(Trial(execution="eager")) is None


@pytest.mark.parametrize("is_installed", [True, False])
def test_fp8_is_infeasible_without_its_package(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    installed = {"torchao": is_installed}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed.get(name, True) else None)
    reason = unmet_requirement(Trial(precision="fp8", device="cuda"))
    assert reason is None if is_installed else "torchao" in str(reason)
    assert "requires GPUs" in str(unmet_requirement(Trial(precision="fp8")))


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize(
    ("fields", "package", "fix"),
    [
        ({"model": "inception_v4", "image_size": 75}, "timm", "pip install timm"),
        ({"parallel": "horovod", "world_size": 2}, "horovod", "scripts.build_horovod"),
    ],
)
def test_what_needs_an_optional_package_is_infeasible_without_it(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], package: str, fix: str, is_installed: bool
) -> None:
    installed = {package: is_installed}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed.get(name, True) else None)
    reason = unmet_requirement(Trial(**fields))
    assert reason is None if is_installed else fix in str(reason)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel": "fsdp2", "memory_format": "channels_last"},
        {"parallel": "fsdp2", "precision": "fp16_master"},
        {"parallel": "hsdp", "memory_format": "channels_last"},
        {"static_graph": True, "accumulation_steps": 2},
    ],
)
def test_combinations_that_torch_does_not_support_are_infeasible(fields: dict[str, Any]) -> None:
    trial = Trial(world_size=2, **fields)
    [rule] = [rule for rule in RULES["infeasible"] if rule.broken(trial)]
    assert {*rule.fields} == {*fields}
    assert unmet_requirement(trial) == rule.explain(trial)
    for omitted in fields:
        rest = {name: value for name, value in fields.items() if name != omitted}
        assert unmet_requirement(Trial(world_size=2, **rest)) is None


@pytest.mark.parametrize(
    ("profile_ranks", "profiled"),
    [("", set()), ("0", {0}), ("3+1", {1, 3}), ("12", {12}), ("07", {7}), ("all", set(range(20)))],
)
def test_profile_ranks_selects_the_ranks_with_a_trace(profile_ranks: str, profiled: set[int]) -> None:
    trial = Trial(profile_ranks=profile_ranks)
    assert {rank for rank in range(20) if trial.profiles(rank)} == profiled


@pytest.mark.parametrize("wrong", ["0,1", "+1", "1+", "-1", "one", "ALL", "all+1", "\u0663", " 1", "1\n"])
def test_an_invalid_list_of_ranks_is_rejected(wrong: str) -> None:
    (line,) = lines({"profile_ranks": wrong})
    assert line.startswith(f"profile_ranks {wrong!r} ") and "0+3" in line


def test_every_invalid_field_gives_a_line() -> None:
    assert lines({"steps": 0, "batch_per_gpu": 0, "modell": "mlp"}) == [
        "batch_per_gpu 0: input should be greater than or equal to 1",
        "steps 0: input should be greater than or equal to 1",
        "'modell' is not a field of a trial; did you mean 'model'?",
    ]


def test_synthetic_data_support_images_and_text() -> None:
    assert {"synthetic"} == {*datasets_of("images")} & {*datasets_of("text")}
    for model in ("mlp", "mlstm64"):
        assert Trial(model=model, dataset="synthetic").model == model


def test_rules_on_data_sets_do_not_apply_to_a_users_workload() -> None:
    assert Trial(dataset="text_sample", workload="mine.py:build").dataset == "text_sample"
    assert Trial(dataset="synthetic", workload="mine.py:build", loader_workers=2).loader_workers == 2


known = st.sampled_from([*MODELS, *DATASETS, *PRECISIONS, *PARALLEL, "contiguous", "channels_last", "cpu", "cuda"])
lists = st.lists(st.integers(), max_size=2)
anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), known, lists)
names = st.one_of(st.sampled_from(list(Trial.model_fields)), st.text(max_size=20))


@given(st.dictionaries(names, anything, max_size=6))
@example({"script": "\x1f"})
def test_any_fields_give_a_trial_or_a_line_per_error(fields: dict[str, Any]) -> None:
    try:
        trial = Trial.model_validate(fields)
    except ValidationError as error:
        explained = explain(error)
        assert len(explained) == error.error_count() > 0
        assert all(line.strip() and "\n" not in line for line in explained)
        return
    assert Trial.model_validate_json(trial.model_dump_json()) == trial
    assert Path(trial.trial_id).name == trial.trial_id
    assert trial.trial_id.isprintable()


@given(st.sampled_from(sorted(CHANGED)), st.sampled_from(sorted(CHANGED)))
def test_trials_with_different_fields_have_different_ids(first: str, second: str) -> None:
    base = Trial(world_size=2, device="cuda", dataset="image_folder")
    allowed = {"parallel": "ddp_bf16", "loader_workers": 3, "dataset": "tiny_imagenet"}
    changes = {name: allowed.get(name, CHANGED[name]) for name in {first, second} - {"world_size"}}
    try:
        changed = base.but(**changes)
    except ValidationError:
        reject()  # a pair that is impossible together
    assert (changed == base) == (changed.trial_id == base.trial_id)
