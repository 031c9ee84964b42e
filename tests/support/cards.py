"""Studies whose summary cards are golden files: generated folders, and committed results."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.frames import FIELDS, grid, record, steps, write_results, write_study, write_trial

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


GPU: dict[str, Any] = FIELDS | {
    "device": "cuda", "model": "resnet50", "precision": "bf16", "image_size": 224, "cpus_per_rank": 8, "steps": 30,
}  # fmt: skip
COMPUTE_S = 0.1


def step_law(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a law of 0.1 s per 256 samples, and on several ranks of exposed transfer and a rank that is 2 ms late."""
    size = fields["world_size"]
    compute_s = COMPUTE_S * fields["batch_per_gpu"] / 256
    if size == 1:
        return {"step_s": compute_s, "launch_ratio": 0.2}
    growth_s = 0.001 * (size - 1)
    late = {"straggler": size - 1, "late_s": 0.0015}
    communication = {"last_gradient_s": 0.9 * compute_s, "bandwidth": 60e9, "tail_s": 0.1 * compute_s, "noise": 0.0}
    return {"step_s": compute_s + growth_s, "launch_ratio": 0.2, "communication": communication | late}


def weak(directory: Path) -> Path:
    """Write 1, 2 and 4 GPUs at batch 256 per GPU, with 5 repeats and a communication breakdown."""
    trials = grid(GPU, world_size=[1, 2, 4], batch_per_gpu=[256], repeat=range(5))
    return write_results(directory, trials, step_law, spread=0.002)


def strong(directory: Path) -> Path:
    """Write 1, 2 and 4 GPUs that share a batch of 1024."""
    trials = [
        fields
        for fields in grid(GPU, world_size=[1, 2, 4], batch_per_gpu=[256, 512, 1024], repeat=range(5))
        if fields["world_size"] * fields["batch_per_gpu"] == 1024
    ]
    return write_results(directory, trials, step_law, spread=0.002)


def failures(directory: Path) -> Path:
    """Write trials of which none is done."""
    write_study(directory)
    for fields in grid(GPU, world_size=[1, 2], repeat=range(2)):
        reason = f"rank {fields['world_size'] - 1} on node a: RuntimeError: no such file: <weights.bin>"
        write_trial(directory, record(fields, "failed", reason))
    return directory


def interrupted(directory: Path) -> Path:
    """Write the trials on 1 and 2 GPUs of a study that planned 4 GPUs too."""
    folder = weak(directory)
    planned = sorted(path.name for path in (folder / "trials").iterdir())
    for path in (folder / "trials").iterdir():
        if path.name.split("-")[2] == "4":
            shutil.rmtree(path)
    command = "python -m study.scaling run weak --gpus 1,2,4 --model resnet50 --out results/weak"
    return write_study(folder, "weak", configuration={"planned_trials": planned}, command=command)


def script(directory: Path) -> Path:
    """Write an unmodified script on 1 and 2 CPU ranks, of which only the plain window is known."""
    write_study(directory, "script")
    own = {"script": "/home/me/train.py", "script_arguments": "--data /d", "device": "cpu", "model": ""}
    for fields in grid(own, world_size=[1, 2], repeat=range(3)):
        trial = record(fields)
        for rank in trial["environment"]["ranks"]:
            rank["probe"] = {"samples_per_step": 16.0, "micro_batches": 1}
        step_s = (0.1 if fields["world_size"] == 1 else 0.13) * (
            1 + 0.01 * (fields["repeat"] % 2) * fields["world_size"]
        )
        frame = steps(fields | {"batch_per_gpu": 16}, step_s)
        write_trial(directory, trial, frame[frame["window"].isin(["warmup", "plain"])])
    return directory


def committed(name: str) -> Callable[[Path], Path]:
    return lambda directory: RESULTS / name


STUDIES: Mapping[str, Callable[[Path], Path]] = {
    "one_gpu": committed("default-1gpu"),
    "weak": weak,
    "strong": strong,
    "training": committed("large-batch"),
    "ladder": committed("acceleration-ladder-1gpu"),
    "failures": failures,
    "interrupted": interrupted,
    "script": script,
    "workloads": committed("captured"),
}
"""How the results folder of each golden file is made: from a new folder to the folder with the results."""
