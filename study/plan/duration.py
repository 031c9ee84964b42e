"""Model the duration of a trial that was never recorded, from its operations and known rates.

The result is an estimate for a plan, not a measurement. Nine in ten folders of `benchmarks/results` with trials on GPUs
took between a third and three times as long as estimated (`tests/study/plan/test_duration.py`).
"""

from trainables.facts import DatasetFacts, ModelFacts
from trainables.registry import DATASETS, DECODERS, MODELS, PARALLEL, SEQUENCE_MODELS
from trainables.trial import Trial

START_S = {"cpu": 8.0, "cuda": 16.0}
RENEWAL_S = {"cpu": 1.0, "cuda": 3.0}
"""Seconds from the request for a worker group to its first trial: a group with its own launch, and one that follows
another on the same ranks, whose processes are forked. CPU: two ranks on two cores with a load of 4, 7 s. CUDA:
`environment.group` of seven studies of `benchmarks/results` on H100 (`tests/study/plan/test_duration.py`), 12 to 25 s
and 2 to 5 s."""

BEFORE_S, AFTER_S = 8.0, 10.0
"""Seconds for the start of Ray, and for the report with the end of Ray, once per study. On those two cores, 6.5 s and
8 s for two trials; the report of 30 trials takes 10 s of a core."""

SETUP_S = {"cpu": 0.5, "cuda": 2.0}
"""Seconds per trial for the model, its data, the search for convolution algorithms and, on several GPUs, the sweep."""

COMPILE_S = 40.0
"""Seconds of torch.compile (`benchmarks/results/real-images`: 75 s compiled, 34 s eager)."""

CPU_FLOPS = {"fp32": 140e9}
OTHER_CPU_FLOPS = 30e9
"""Operations per second and core. ResNet-20 at batch 16 takes 21 ms on a core with AVX-512; bf16 is emulated."""

GPU_FLOPS = {"fp32": 20e12, "tf32": 40e12}
OTHER_GPU_FLOPS = 60e12
NOT_RESIDUAL = 2.5
"""Operations per second of an H200 in training: 2,480 images/s of ResNet-50 in bf16 at batch 256 are 60e12
(`benchmarks/results/communication`). Models without the many batch normalisations of a residual network reach more."""

CPU_WEIGHT_S, CPU_EXCHANGE_S = 6e-9, 9e-9
"""Seconds per weight and step: to read and update the weights, and to average their gradients over gloo. ResNet-18 has
11 million weights and takes 95 ms at batch 16 on one core, and 228 ms on two."""

LAUNCH_S = {"cpu": 1e-3, "cuda": 10e-3}
GRAPH_LAUNCH_S = 2e-3
"""Shortest step: the host needs this long to launch its operations. On GPUs: ResNet-50 eagerly, and as a graph."""

DECODE_S = 5e-3
"""Seconds to decode and crop a JPEG of 224 pixels on one core (docs/storage.md)."""

UNKNOWN_STEP_S = {"cpu": 0.2, "cuda": 0.1}
"""Assumed for a user's own code, whose operations are unknown."""

VALIDATION = 1.1
"""Time of an epoch with validation, relative to its training steps."""

_ISSUE_BUSY_AND_COPY_STEPS = 25
"""Steps of the diagnostic windows on GPUs, see `trainables.measure.run`."""


def step_s(trial: Trial) -> float:
    """Return the modelled seconds of an optimizer step: the longest of computation, launches and loading."""
    if runs_own_code(trial):
        return UNKNOWN_STEP_S[trial.device] * trial.accumulation_steps
    model, data = MODELS[trial.model], DATASETS[trial.dataset]
    samples = trial.batch_per_gpu * trial.accumulation_steps
    compute_s = _flops(trial, model) * samples / _rate(trial)
    if trial.device == "cpu":
        exchange_s = CPU_EXCHANGE_S if trial.world_size > 1 else 0.0
        compute_s += 1e6 * model.million_weights * (CPU_WEIGHT_S + exchange_s)
    launch_s = GRAPH_LAUNCH_S if trial.captured else LAUNCH_S[trial.device]
    return max(compute_s, launch_s * trial.accumulation_steps, _load_s(trial, data) * samples)


def runs_own_code(trial: Trial) -> bool:
    """Return True if a user's script, function or workload is trained, whose operations are unknown."""
    return bool(trial.workload or trial.door != "factory")


def trial_s(trial: Trial) -> float:
    """Return the modelled seconds of a trial in a worker group that is live."""
    fixed_s = SETUP_S[trial.device] + (COMPILE_S if trial.compiled else 0.0)
    if trial.epochs:
        images = DATASETS[trial.dataset].training_images or 50_000
        steps = -(-images // trial.global_batch)
        return fixed_s + VALIDATION * trial.epochs * steps * step_s(trial)
    return fixed_s + _timed_steps(trial.shortened(step_s(trial))) * step_s(trial)


def _timed_steps(trial: Trial) -> int:
    """Return the steps of all windows: warm-up, plain, phases, diagnosis, and communication between ranks."""
    steps = trial.settling_steps + 2 * trial.steps
    if trial.device == "cuda":
        steps += _ISSUE_BUSY_AND_COPY_STEPS
    if PARALLEL[trial.parallel].ddp_wrapped and trial.world_size > 1:
        steps += 3 * trial.communication_steps + (trial.settling_steps if trial.communication_steps else 0)
    if PARALLEL[trial.parallel].traced and trial.world_size > 1:
        steps += trial.communication_steps
    return steps


def _flops(trial: Trial, model: ModelFacts) -> float:
    """Return the operations per sample: of an image by its area, of text by 6 per weight and byte or token."""
    if trial.model in SEQUENCE_MODELS:
        return 6e6 * model.million_weights * trial.sequence_length
    return 1e9 * model.image_gflop * (trial.image_size / 224) ** 2


def _rate(trial: Trial) -> float:
    if trial.device == "cuda":
        rate = GPU_FLOPS.get(trial.precision, OTHER_GPU_FLOPS)
        return rate if MODELS[trial.model].residual else NOT_RESIDUAL * rate
    return trial.cpus_per_rank * CPU_FLOPS.get(trial.precision, OTHER_CPU_FLOPS)


def _load_s(trial: Trial, data: DatasetFacts) -> float:
    """Return the seconds per sample to decode it on the cores of a rank. 0 if data are decoded already or on a GPU."""
    if not data.image_folder or trial.storage == "arrow_raw" or DECODERS[trial.decode].on_device:
        return 0.0
    return DECODE_S / max(1, min(trial.loader_workers, trial.cpus_per_rank)) * (trial.image_size / 224) ** 2
