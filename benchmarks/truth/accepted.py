"""Does the script entry measure scripts as people write them, unmodified?

    python -m benchmarks.truth.accepted --gpus 1,2
    python -m benchmarks.truth.accepted --small                              # one script on two CPU ranks

Seven scripts, each through `study.scaling run --script`, once per number of GPUs: transformers' and lightning's
Trainer, a loop prepared by accelerate, a minimal GPT trainer, one like PyTorch's ImageNet example, FSDP2, and a GAN
with two optimizers. They are those of the tests; command-line arguments give two of them real sizes. Goal: each trial
is done, with plain steps, all its phases, and (on several GPUs) its collectives. Speeds are not compared.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.read.results import Results, load
from benchmarks.harness.common import figure, write_summary
from study.errors import counted

ROOT = Path(__file__).resolve().parent.parent.parent
WHOLE, PARTS = ROOT / "tests/scripts", ROOT / "tests/trainables/probe/scripts"
SCRIPTS: dict[str, tuple[Path, str]] = {
    "transformers.Trainer": (WHOLE / "hf_trainer.py", ""),
    "lightning.Trainer": (WHOLE / "lightning_trainer.py", "--devices {gpus}"),
    "accelerate": (WHOLE / "accelerate_loop.py", ""),
    "minimal GPT": (
        WHOLE / "mini_gpt.py",
        "--n_layer=12 --n_head=12 --n_embd=768 --vocab_size=50304 --block_size=1024 --batch_size=8 --max_iters=400",
    ),
    "ImageNet example": (WHOLE / "imagenet.py", "-a resnet50 -b {batch} -j 4 --epochs 40"),
    "FSDP2": (PARTS / "fsdp2.py", ""),
    "GAN": (PARTS / "gan.py", ""),
}
"""script, and its arguments. {gpus}: number of ranks. {batch}: 16 per rank."""

PHASES = ("forward_s", "backward_s", "optimizer_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1", help="numbers of ranks, a comma list")
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="scripts to run, a comma list")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="end a command after this many seconds")
    parser.add_argument("--small", action="store_true", help="one script on two ranks")
    parser.add_argument("--name", default="accepted", help="folder under benchmarks/results")
    options = parser.parse_args()
    if options.small:
        options.gpus, options.scripts = "2", "GAN"
    samples = []
    for size in options.gpus.split(","):
        for name in options.scripts.split(","):
            samples.append(measured(name, int(size), options.timeout_s))
            print(samples[-1], flush=True)
            write_summary(options.name, [_figure(sample) for sample in samples], samples)


def measured(name: str, size: int, timeout_s: float) -> dict[str, Any]:
    """Run a script on `size` ranks through the command, and return what the study measured of it."""
    script, arguments = SCRIPTS[name]
    given = arguments.format(gpus=size, batch=16 * size).split()
    asked = ["run", "--script", str(script.relative_to(ROOT)), "--gpus", str(size), "--repeats", "1", "--steps", "20"]
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accepted-") as folder:
        command = [sys.executable, "-m", "study.scaling", *asked, "--out", folder, "--", *given]
        sample = {"script": name, "size": size, "arguments": " ".join(given)}
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return sample | {"status": "not ended in time", "reason": f"{timeout_s:g} s"}
        try:
            return sample | _measures(load(folder)) | {"seconds": time.monotonic() - started_s}
        except (OSError, ValueError, IndexError) as error:
            return sample | {
                "status": f"exit {done.returncode}",
                "reason": f"{error} {(done.stdout + done.stderr)[-600:]}",
            }


def _measures(results: Results) -> dict[str, Any]:
    """Return status, plain steps, samples per step, medians of step and phases in seconds, buckets and collectives.

    Seconds are those of the slowest rank.
    """
    trial = results.trials.iloc[0]
    steps = results.steps
    plain, phases = (steps[steps["window"] == window] for window in ("plain", "phases"))

    def slowest(frame: pd.DataFrame, column: str) -> float | None:
        value = frame.groupby("rank")[column].median().max()
        return None if pd.isna(value) else float(value)

    return {
        "status": str(trial["status"]),
        "reason": "" if pd.isna(trial["reason"]) else str(trial["reason"]),
        "device": str(trial["device_name"]),
        "plain_steps": int(plain.groupby("rank").size().min()) if len(plain) else 0,
        "samples_per_step": int(plain["samples"].median()) if len(plain) else None,
        "step_s": slowest(plain, "step_s"),
        **{name: slowest(phases, name) for name in PHASES},
        "buckets": len(results.buckets),
        "collectives": 0 if results.collectives is None else len(results.collectives),
    }


def _figure(sample: dict[str, Any]) -> dict[str, Any]:
    """Return whether the script was measured, as its plain steps."""
    phases = all(sample.get(name) for name in PHASES)
    communicates = sample["size"] == 1 or sample.get("collectives", 0) > 0
    steps = sample.get("plain_steps", 0)
    holds = sample["status"] == "done" and steps > 0 and phases and communicates
    name = f"{sample['script']}, {counted(sample['size'], 'rank')}: plain steps"
    return figure(name, steps, None, "steps", "> 0, and all phases", holds)


if __name__ == "__main__":
    main()
