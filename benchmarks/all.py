"""Run every benchmark, one after the other, in full or in a small form that needs two cores.

    python -m benchmarks.all --small                 # no GPU needed; results go to a temporary folder
    python -m benchmarks.all --only truth.stopping   # in full, under benchmarks/results

The small forms only show that a benchmark runs; their figures are meaningless. Exits with status 1
if one of them fails.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SMALL: dict[str, str] = {
    "truth.accepted": "--small",
    "truth.blind": "predict benchmarks/results/default-2gpu",
    "truth.communication": "--device cpu --models mlp --batches 4 --out {results}/communication",
    "cost.analysis": "--trials 200 --repeats 1",
    "cost.clock": "--small",
    "truth.coverage": "--studies 200",
    "speed.cpu_ranks": "--small --seconds 60",
    "speed.gpt2": "--device cpu --small --seconds 60",
    "cost.growth": "--small",
    "cost.noise_scale_cost": "--device cpu --small --seconds 60",
    "cost.overhead": "--device cpu --cases resnet18:2:fp32 --image-size 32 --steps 4 --warmup-steps 2 --quadruples 2",
    "truth.doors": "--device cpu --batch 4 --image-size 32 --steps 5 --rounds 2",
    "cost.imports": "--quadruples 2",
    "truth.improve": "null --simulated --runs 2",
    "truth.known_laws": "--small",
    "truth.losses": "--device cpu --small --seconds 60",
    "truth.others": "--device cpu --small",
    "speed.peers": "--device cpu --small --seconds 60",
    "truth.prediction": "--from benchmarks/results/communication benchmarks/results/default-4gpu",
    "truth.prediction_laws": "--seeds 1",
    "speed.resnet50_modes": "--device cpu --small --seconds 60",
    "cost.scaling_out": "--small",
    "truth.sharding": "--device cpu --out {results}/sharding-truth",
    "speed.small_batch": "--device cpu --small --seconds 60",
    "cost.start": "--small",
    "truth.stopping": "--small --steps 100",
    "speed.storage": "--small --data-dir {results}/photos --make 64 --rounds 1"
    " --cases 'jpeg pil,lmdb torchvision,arrow_jpeg pil,arrow_raw'",
    "cost.tracking": "--small",
    "cost.turnaround": "--isolated-trials 0",
    "cost.warm_cold": "--pairs 2",
    "speed.weak_scaling": "--device cpu --small --seconds 60",
}
"""Arguments of the small form, by benchmark."""

NEED_ROOT = ("truth.faults", "truth.interconnect")
"""Benchmarks on hosts in network namespaces, which have no small form."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", help="comma-separated list of " + ", ".join(SMALL))
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(SMALL)
    if unknown := [name for name in names if name not in SMALL]:
        parser.error(f"--only {','.join(unknown)}: no such benchmark; allowed: {', '.join(SMALL)}")
    failed = [name for name in names if not ran(name, options.small)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def ran(name: str, small: bool) -> bool:
    """Run a benchmark in a subprocess and print its duration. Return whether it exited with status 0."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        arguments = shlex.split(SMALL[name].format(results=folder)) if small else []
        environment = os.environ | ({"BENCHMARK_RESULTS": folder} if small else {})
        print(f"-- {name} {' '.join(arguments)}", flush=True)
        started_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments], cwd=ROOT, env=environment, check=False
        )
        print(f"-- {name}: status {done.returncode}, {time.perf_counter() - started_s:.0f} s", flush=True)
        return done.returncode == 0


if __name__ == "__main__":
    main()
