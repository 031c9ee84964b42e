"""Rules on combinations of a trial's fields, as one table with a message per rule. Nothing here imports torch.

A trial that breaks an `invalid` rule cannot be created. A trial that breaks an `infeasible` rule can be created but not
run: the study reports it as infeasible, with the rule's message as the reason.
"""

import importlib.util
import os
import shutil
import sys
from typing import Literal, get_args

from trainables.facts import Kind
from trainables.fields import FIELD_FACTS, TrialFields, only_with
from trainables.registry import (
    DATASETS,
    DECODERS,
    MODELS,
    OPTIMIZERS,
    PARALLEL,
    PRECISIONS,
    SEQUENCE_MODELS,
    STORAGES,
    TOKEN_MODELS,
    names_with,
)
from trainables.rule import (
    Rule,
    RuleError,
    data,
    epoch_order_field,
    factory_field,
    image_folder_field,
    listed,
    on_cpu,
    reads_sequences,
    strategy_option,
    too_small,
    training_field,
    wrong_data,
)


def refuse_invalid(trial: TrialFields) -> None:
    """Raise RuleError for the first `invalid` rule that a trial breaks."""
    if rule := next((rule for rule in RULES["invalid"] if rule.broken(trial)), None):
        raise RuleError(rule, trial)


def unmet_requirement(trial: TrialFields) -> str | None:
    """Return the message of the first `infeasible` rule that a trial breaks. None if the trial can run."""
    return next((rule.explain(trial) for rule in RULES["infeasible"] if rule.broken(trial)), None)


def has_cpp_compiler() -> bool:
    """Return True if torch finds the compiler that it uses for CPUs (`torch._inductor.config.cpp.cxx`)."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


def _installed(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


_STEMS = names_with(MODELS, "imagenet_stem")
_ATTEND = tuple(name for name, facts in SEQUENCE_MODELS.items() if not facts.carries_state)

_INVALID: tuple[Rule, ...] = (
    Rule(
        ("script", "train_function", "workload"),
        lambda trial: sum(map(bool, (trial.script, trial.train_function, trial.workload))) > 1,
        "a trial has one of script, train_function and workload",
    ),
    Rule(
        ("script_arguments", "script_flags", "script_env", "script"),
        lambda trial: bool(trial.script_arguments or trial.script_flags or trial.script_env) and not trial.script,
        "arguments and environment variables require a script; use --script FILE.py",
    ),
    Rule(
        ("add_ddp", "script"),
        lambda trial: trial.add_ddp and not trial.script,
        "add_ddp requires a script; use --script FILE.py",
    ),
    *(factory_field(name) for name, facts in FIELD_FACTS.items() if not facts.any_door and name != "workload"),
    Rule(
        ("world_size", "nodes"),
        lambda trial: trial.world_size % trial.nodes != 0,
        "world_size {world_size} must be a multiple of nodes {nodes}, so that every node gets equally many ranks",
    ),
    Rule(
        ("parallel", "world_size"),
        lambda trial: PARALLEL[trial.parallel].one_rank and trial.world_size > 1,
        "parallel {parallel!r} runs on one rank, but world_size is {world_size}; use parallel 'ddp'",
    ),
    Rule(
        ("shard_ranks", "world_size"),
        lambda trial: trial.world_size % (trial.shard_ranks or 1) != 0,
        "shard_ranks {shard_ranks} must divide world_size {world_size}, so that every group of ranks holds one copy",
    ),
    Rule(
        ("parallel", "nodes"),
        lambda trial: PARALLEL[trial.parallel].one_process and trial.nodes > 1,
        "parallel {parallel!r} supports one node, but nodes is {nodes}; use parallel 'ddp'",
    ),
    Rule(
        ("parallel", "execution"),
        lambda trial: PARALLEL[trial.parallel].one_process and trial.execution != "eager",
        "parallel {parallel!r} runs its replicas in threads and does not support execution {execution!r}; use 'eager'",
    ),
    Rule(
        ("execution", "parallel"),
        lambda trial: trial.captured and not PARALLEL[trial.parallel].capturable,
        "execution {execution!r} captures the step in a CUDA graph, which parallel {parallel!r} does not support; "
        f"use parallel {listed(names_with(PARALLEL, 'capturable'))}",
    ),
    Rule(
        ("execution", "accumulation_steps"),
        lambda trial: trial.captured and trial.accumulation_steps > 1 and not trial.epochs,
        "execution {execution!r} captures one batch per step, but accumulation_steps is {accumulation_steps}; use 1",
    ),
    Rule(
        ("execution", "find_unused_parameters"),
        lambda trial: trial.captured and trial.find_unused_parameters,
        "execution {execution!r} captures the step in a CUDA graph, in which find_unused_parameters cannot search; use "
        "execution 'eager' or 'compile'",
    ),
    Rule(
        ("optimizer", "momentum"),
        lambda trial: OPTIMIZERS[trial.optimizer].needs_momentum and trial.momentum == 0,
        "optimizer {optimizer!r} requires momentum > 0, got {momentum}; set momentum, or use optimizer 'sgd'",
    ),
    *(strategy_option(name) for name in FIELD_FACTS if "parallel" in only_with(name)),
    Rule(
        ("sync_batch_norm", "parallel"),
        lambda trial: (
            trial.sync_batch_norm and (PARALLEL[trial.parallel].one_rank or PARALLEL[trial.parallel].one_process)
        ),
        "sync_batch_norm requires several processes, but parallel {parallel!r} uses one; use parallel 'ddp'",
    ),
    *map(wrong_data, get_args(Kind)),
    *(too_small(size) for size in sorted({facts.smallest_image for facts in MODELS.values()} - {0})),
    Rule(
        ("rewritten_stem", "model", "image_size"),
        lambda trial: (
            trial.rewritten_stem and bool(trial.workload or trial.model not in _STEMS or trial.image_size % 2)
        ),
        f"rewritten_stem requires model {' or '.join(_STEMS)} and an even image_size, got {{what}} and image_size "
        "{image_size}; omit rewritten_stem",
    ),
    Rule(
        ("rewritten_stem", "execution"),
        lambda trial: trial.rewritten_stem and not trial.compiled,
        "rewritten_stem requires a compiled step, but execution is {execution!r}; use execution 'compile' or "
        "'compile_graph'",
    ),
    Rule(
        ("fused_loss", "model"),
        lambda trial: trial.fused_loss and bool(trial.workload or trial.model not in TOKEN_MODELS),
        f"fused_loss requires model {listed(tuple(TOKEN_MODELS))}, got {{what}}; omit fused_loss",
    ),
    Rule(
        ("fused_loss", "parallel"),
        lambda trial: trial.fused_loss and PARALLEL[trial.parallel].one_process,
        "parallel {parallel!r} gathers outputs to compute the loss, which fused_loss computes in the model; use "
        "parallel 'ddp'",
    ),
    Rule(
        ("attention", "model"),
        lambda trial: trial.attention != "auto" and not trial.workload and trial.model not in _ATTEND,
        "attention {attention!r} has no effect on {what}; omit attention, or use model " + listed(_ATTEND),
    ),
    Rule(
        ("execution", "model"),
        lambda trial: trial.execution == "compile_blocks" and bool(trial.workload or trial.model not in TOKEN_MODELS),
        f"execution 'compile_blocks' requires model {listed(tuple(TOKEN_MODELS))}, got {{what}}; use 'compile'",
    ),
    Rule(
        ("split_graph", "execution"),
        lambda trial: not trial.split_graph and trial.execution not in ("compile", "compile_graph"),
        "split_graph False has no effect with execution {execution!r}, which compiles no complete graph; use execution "
        "'compile' or 'compile_graph'",
    ),
    Rule(
        ("first_bucket_mb", "find_unused_parameters"),
        lambda trial: trial.first_bucket_mb is not None and trial.find_unused_parameters,
        "first_bucket_mb {first_bucket_mb:g} would be the size of the last bucket with find_unused_parameters, with "
        "which DDP does not rebuild its buckets in the order of the gradients; omit one of them",
    ),
    Rule(
        ("activation_checkpointing", "model"),
        lambda trial: (
            trial.activation_checkpointing != "none" and bool(trial.workload or trial.model not in TOKEN_MODELS)
        ),
        f"activation_checkpointing requires model {listed(tuple(TOKEN_MODELS))}, got {{what}}; omit it",
    ),
    Rule(
        ("loader_workers", "dataset"),
        lambda trial: data(trial, "on_device") and trial.loader_workers > 0,
        "loader_workers {loader_workers} would be idle, because dataset {dataset!r} stays on the device; use 0",
    ),
    *(epoch_order_field(name) for name in ("order", "set_epoch")),
    Rule(
        ("set_epoch", "order"),
        lambda trial: trial.order == "in_order" and not trial.set_epoch,
        "set_epoch False has no effect with order 'in_order', which does not shuffle; omit set_epoch",
    ),
    *(image_folder_field(name) for name, facts in FIELD_FACTS.items() if facts.image_folders_only),
    Rule(
        ("page_cache", "storage_place"),
        lambda trial: trial.storage_place == "shared_memory" and trial.page_cache != "as_is",
        "page_cache {page_cache!r} has no effect with storage_place 'shared_memory', which is memory; use 'as_is'",
    ),
    Rule(
        ("decode", "storage"),
        lambda trial: STORAGES[trial.storage].holds_pixels and trial.decode != "pil",
        "decode {decode!r} has no effect with storage {storage!r}, which stores decoded pixels; use decode 'pil'",
    ),
    Rule(
        ("decode", "parallel", "execution"),
        lambda trial: DECODERS[trial.decode].on_device and (PARALLEL[trial.parallel].one_process or trial.captured),
        "decode {decode!r} passes encoded images of different lengths to the device, which neither parallel 'dp' nor a "
        f"CUDA graph supports; use decode {' or '.join(map(repr, names_with(DECODERS, 'on_device', False)))}",
    ),
    Rule(
        ("augment", "decode"),
        lambda trial: DECODERS[trial.decode].on_device and trial.augment == "cpu",
        "augment 'cpu' requires pixels in the loader, but decode {decode!r} decodes on the device; use 'device'",
    ),
    Rule(
        ("zero_gamma", "model"),
        lambda trial: trial.zero_gamma and (bool(trial.workload) or not MODELS[trial.model].residual),
        "zero_gamma requires a model with residual blocks, but {what} has no known ones; "
        f"use model {listed(names_with(MODELS, 'residual'))}",
    ),
    Rule(
        ("label_smoothing", "model"),
        lambda trial: trial.label_smoothing > 0 and (bool(trial.workload) or reads_sequences(trial)),
        "label_smoothing {label_smoothing:g} requires an image model of this project, but {what} has a loss of its "
        "own; use label_smoothing 0",
    ),
    *(training_field(name) for name, facts in FIELD_FACTS.items() if facts.needs_epochs),
    Rule(
        ("epochs", "model"),
        lambda trial: trial.epochs > 0 and reads_sequences(trial),
        "epochs {epochs} requires labelled images, but model {model!r} reads a continuous text; use epochs 0, or an "
        "image model",
    ),
    Rule(
        ("epochs", "dataset"),
        lambda trial: trial.epochs > 0 and data(trial, "random"),
        "epochs {epochs} requires data to learn from, but dataset {dataset!r} is random; use an image data set",
    ),
    Rule(
        ("parallel", "epochs"),
        lambda trial: trial.epochs > 0 and not PARALLEL[trial.parallel].full_weights,
        "parallel {parallel!r} supports timed windows only; with epochs use parallel "
        f"{listed(names_with(PARALLEL, 'full_weights'))}",
    ),
    Rule(
        ("profile_ranks", "epochs"),
        lambda trial: trial.epochs > 0 and bool(trial.profile_ranks),
        "profile_ranks {profile_ranks!r} supports timed windows only; omit it with epochs",
    ),
    Rule(
        ("execution", "workload", "epochs"),
        lambda trial: trial.epochs > 0 and bool(trial.workload) and trial.captured,
        "execution {execution!r} with epochs rolls back its warm-up steps, which the optimizer of {what} may not "
        "support; use execution 'eager' or 'compile'",
    ),
    Rule(
        ("momentum_correction", "optimizer", "momentum"),
        lambda trial: (
            not trial.momentum_correction and not (OPTIMIZERS[trial.optimizer].momentum and trial.momentum > 0)
        ),
        "momentum_correction False requires momentum, but optimizer {optimizer!r} with momentum {momentum:g} has none; "
        f"use optimizer {listed(names_with(OPTIMIZERS, 'momentum'))} with momentum > 0",
    ),
    Rule(
        ("resident_data", "dataset"),
        lambda trial: trial.resident_data and not data(trial, "in_memory"),
        "resident_data requires an in-memory data set, but dataset {dataset!r} is not; "
        f"use dataset {listed(names_with(DATASETS, 'in_memory'))}",
    ),
    Rule(
        ("loader_workers", "resident_data"),
        lambda trial: trial.resident_data and trial.loader_workers > 0,
        "loader_workers {loader_workers} would be idle, because resident_data gathers batches on the device; use 0",
    ),
    Rule(
        ("noise_scale", "accumulation_steps", "world_size"),
        lambda trial: trial.noise_scale and trial.processes == 1 and trial.accumulation_steps == 1,
        "noise_scale compares gradients of two batch sizes, but one rank with accumulation_steps 1 has only one; use "
        "accumulation_steps >= 2, or more ranks",
    ),
    Rule(
        ("noise_scale", "parallel"),
        lambda trial: trial.noise_scale and trial.processes > 1 and not PARALLEL[trial.parallel].ddp_wrapped,
        "noise_scale requires each rank's own gradients, which parallel {parallel!r} does not expose; use parallel "
        f"{listed(names_with(PARALLEL, 'ddp_wrapped'))}",
    ),
)

_INFEASIBLE: tuple[Rule, ...] = (
    Rule(("decode", "device"), on_cpu("decode", *names_with(DECODERS, "on_device")), "decode {decode!r} requires GPUs"),
    Rule(("attention", "device"), on_cpu("attention", "cudnn", "efficient"), "attention {attention!r} requires GPUs"),
    Rule(("copy_ahead", "device"), on_cpu("copy_ahead", True), "copy_ahead requires GPUs; CPU batches are not copied"),
    Rule(
        ("copy_ahead", "dataset"),
        lambda trial: trial.copy_ahead and not trial.workload and (data(trial, "on_device") or trial.resident_data),
        "copy_ahead has no effect, because the samples of dataset {dataset!r} are on the device; omit copy_ahead",
    ),
    Rule(
        ("dataset", "data_dir"),
        lambda trial: data(trial, "needs_data_dir") and not trial.data_dir,
        "dataset {dataset!r} needs --data-dir DIR with its files",
    ),
    Rule(
        ("precision", "device"),
        on_cpu("precision", *names_with(PRECISIONS, "needs_gpu")),
        "precision {precision!r} requires GPUs",
    ),
    Rule(
        ("model",),
        lambda trial: not trial.workload and not _installed(MODELS[trial.model].package),
        "model {model!r} requires timm, which is not installed; fix: pip install timm (extra 'timm')",
    ),
    Rule(
        ("precision",),
        lambda trial: not _installed(PRECISIONS[trial.precision].package),
        "precision {precision!r} requires torchao, which is not installed; fix: pip install torchao (extra "
        "{precision!r})",
    ),
    Rule(
        ("parallel",),
        lambda trial: not _installed(PARALLEL[trial.parallel].package),
        "parallel {parallel!r} requires Horovod, which is not installed; fix: python -m scripts.build_horovod, which "
        "compiles it for the installed torch",
    ),
    Rule(
        ("parallel", "device"),
        on_cpu("parallel", *names_with(PARALLEL, "one_process")),
        "parallel {parallel!r} requires GPUs; on a CPU it would be one plain process",
    ),
    Rule(
        ("model", "device"),
        on_cpu("model", *names_with(MODELS, "fits_cpu", False)),
        "model {model!r} is too large to train on a CPU rank",
    ),
    Rule(
        ("sync_batch_norm", "device"),
        on_cpu("sync_batch_norm", True),
        "sync_batch_norm requires GPUs, because torch's SyncBatchNorm has no CPU kernels",
    ),
    Rule(
        ("interconnect", "device"),
        lambda trial: trial.device == "cpu" and trial.interconnect != "auto",
        "interconnect {interconnect!r} is a setting of NCCL; CPU ranks use gloo",
    ),
    Rule(
        ("execution", "device"),
        lambda trial: trial.device == "cpu" and trial.captured,
        "execution {execution!r} requires GPUs, because it is a CUDA graph",
    ),
    Rule(
        ("pin_cores", "device"),
        lambda trial: trial.device == "cuda" and trial.pin_cores,
        "pin_cores supports CPU ranks only; on a GPU host it would take cores from the threads that feed the device",
    ),
    Rule(
        ("parallel", "memory_format"),
        lambda trial: PARALLEL[trial.parallel].sharded and trial.memory_format == "channels_last",
        "parallel {parallel!r} shards weights by rows and does not support memory_format 'channels_last'; use "
        "'contiguous'",
    ),
    Rule(
        ("parallel", "precision"),
        lambda trial: PARALLEL[trial.parallel].sharded and PRECISIONS[trial.precision].two_weight_types,
        "parallel {parallel!r} requires weights of one dtype, but precision {precision!r} has two; use precision "
        "'bf16'",
    ),
    Rule(
        ("static_graph", "accumulation_steps"),
        lambda trial: trial.static_graph and trial.accumulation_steps > 1,
        "static_graph records the first backward pass, which does not communicate with accumulation_steps "
        "{accumulation_steps}; use accumulation_steps 1",
    ),
    Rule(
        ("execution", "device"),
        lambda trial: trial.compiled and trial.device == "cpu" and not has_cpp_compiler(),
        "execution {execution!r} requires a C++ compiler on CPUs, and none was found; install g++, or set CXX",
    ),
)

RULES: dict[Literal["invalid", "infeasible"], tuple[Rule, ...]] = {"invalid": _INVALID, "infeasible": _INFEASIBLE}
