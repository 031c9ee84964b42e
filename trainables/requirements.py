"""What a trial needs that its device or this machine may not have: one table, each row with the reason it gives.

A trial that is possible as a value but cannot run here is `infeasible`: a row of the study with that reason.
"""

from collections.abc import Callable, Sequence

from trainables.registry import ON_DEVICE_DECODERS, READ_FROM_DATA_DIR
from trainables.trial import Trial

Requirement = tuple[Callable[[Trial], bool], str]


def _on_cpu(field: str, *values: object) -> Callable[[Trial], bool]:
    return lambda trial: trial.device == "cpu" and getattr(trial, field) in values


REQUIREMENTS: Sequence[Requirement] = (
    (_on_cpu("decode", *ON_DEVICE_DECODERS), "decode {decode!r} runs on GPUs only"),
    (_on_cpu("copy_ahead", True), "copy_ahead is for GPUs: the batches of a CPU rank are copied nowhere"),
    (
        lambda trial: trial.copy_ahead and not trial.workload and (trial.dataset == "synthetic" or trial.resident_data),
        "copy_ahead has nothing to copy: the samples of dataset {dataset!r} lie on the device already",
    ),
    (
        lambda trial: not trial.workload and trial.dataset in READ_FROM_DATA_DIR and not trial.data_dir,
        "dataset {dataset!r} needs --data-dir DIR with its files",
    ),
    (_on_cpu("precision", "tf32"), "precision 'tf32' exists on GPUs only"),
    (_on_cpu("parallel", "dp"), "parallel 'dp' divides a batch among GPUs; on a CPU it would be one plain process"),
    (
        lambda trial: trial.parallel == "dp" and not trial.workload and trial.model.startswith("mlstm"),
        "parallel 'dp' copies the model at every step and loses the state that {model!r} carries: use parallel 'ddp'",
    ),
    (_on_cpu("model", "mlstm4096", "mlstm8192"), "model {model!r} is too large to train on a CPU rank"),
    (_on_cpu("sync_batch_norm", True), "sync_batch_norm needs GPUs: torch's SyncBatchNorm has no CPU kernels"),
    (
        _on_cpu("interconnect", "no_p2p", "socket"),
        "interconnect {interconnect!r} is a setting of NCCL; ranks on CPUs use gloo",
    ),
    (_on_cpu("execution", "graph", "compile_graph"), "CUDA graphs exist on GPUs only"),
    (
        lambda trial: trial.device == "cuda" and trial.pin_cores,
        "pin_cores is for CPU ranks: on a GPU host it would take cores from the threads that feed the device",
    ),
    (
        lambda trial: trial.parallel == "fsdp2" and trial.memory_format == "channels_last",
        "parallel 'fsdp2' shards weights by rows, which memory_format 'channels_last' has not: use 'contiguous'",
    ),
    (
        lambda trial: trial.parallel == "fsdp2" and trial.precision == "fp16_master",
        "precision 'fp16_master' keeps weights of two types, and parallel 'fsdp2' takes one: use precision 'bf16'",
    ),
    (
        lambda trial: trial.parallel == "fsdp2" and bool(trial.profile_ranks),
        "profile_ranks wraps the model once more, which parallel 'fsdp2' has sharded by then: leave it out",
    ),
    (
        lambda trial: trial.static_graph and trial.accumulation_steps > 1,
        "static_graph learns from the first backward pass, in which accumulation_steps {accumulation_steps} send nothing: use one",
    ),
    (
        lambda trial: trial.parallel == "horovod",
        "parallel 'horovod': Ray Train's second version, which runs the ranks, refuses it (README, Horovod)",
    ),
)
"""(whether a trial has this need and it is not met, the reason with the trial's fields in braces)"""


def unmet(trial: Trial) -> str | None:
    """The first reason why this trial cannot run here; None where it can."""
    return next((reason.format(**trial.model_dump()) for lacks, reason in REQUIREMENTS if lacks(trial)), None)
