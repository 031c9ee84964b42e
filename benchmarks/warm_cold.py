"""Does a warm worker group measure what a fresh one does? Step time of the same trial, warm and isolated.

    python -m benchmarks.warm_cold             # one GPU where there is one, else one CPU rank

Each pair: in a warm group the trial after trials unlike it (other precision, batch, loader workers), and the same trial
in a group of its own. Goal: the interval of the step-time ratio warm / cold lies within 0.98 to 1.02.
"""

import argparse
import math
import tempfile

import pyarrow.parquet as pq

from analysis.measures import summarise
from benchmarks.common import figure, ratio_interval, write_summary
from study.capacity import count_cpus, count_gpus
from study.cluster import connect
from study.store import Store
from study.tuning import run_trials
from trainables.trial import Trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--name", default="warm-cold", help="folder under benchmarks/results")
    options = parser.parse_args()

    gpus = count_gpus()
    subject = Trial(
        model="resnet50" if gpus else "resnet18",
        dataset="synthetic",
        image_size=224 if gpus else 64,
        device="cuda" if gpus else "cpu",
        cpus_per_rank=count_cpus() // gpus if gpus else 1,
        memory_format="channels_last",
        precision="bf16" if gpus else "fp32",
        batch_per_gpu=256 if gpus else 8,
        warmup_steps=15 if gpus else 3,
        steps=40 if gpus else 15,
    )
    unlike = subject.but(precision="fp32", batch_per_gpu=64 if gpus else 4, steps=5)
    loaded = subject.but(model="resnet18", dataset="fashion_mnist_sample", image_size=28, loader_workers=2, steps=5)

    warm = [subject.but(repeat=2 * pair) for pair in range(options.pairs)]
    cold = [subject.but(repeat=2 * pair + 1) for pair in range(options.pairs)]
    groups = []  # a worker group each, in this order; every other pair the other way round, so that drift cancels
    for pair in range(options.pairs):
        both = [[unlike.but(repeat=pair), loaded.but(repeat=pair), warm[pair]], [cold[pair]]]
        groups += both if pair % 2 == 0 else both[::-1]
    with connect("local") as cluster, tempfile.TemporaryDirectory(prefix="warm-cold-") as out:
        store = Store.open(
            out, name="warm-cold", question="Does warm equal cold?", configuration={}, versions={}, command=""
        )
        run_trials("warm-cold", groups, store, cluster, on_event=lambda event: print(event.kind, event.reason))
        step_s = {name: [_step_s(store, trial) for trial in side] for name, side in (("warm", warm), ("cold", cold))}
    ratio, interval = ratio_interval([math.log(w / c) for w, c in zip(step_s["warm"], step_s["cold"], strict=True)])
    holds = interval[0] >= 0.98 and interval[1] <= 1.02
    found = figure(
        f"step time warm / cold, {subject.model} on one {subject.device}",
        ratio,
        interval,
        "ratio",
        "interval within 0.98 to 1.02",
        holds,
    )
    samples = [
        {"pair": i, "warm_step_s": w, "cold_step_s": c}
        for i, (w, c) in enumerate(zip(step_s["warm"], step_s["cold"], strict=True))
    ]
    write_summary(options.name, [found], samples)


def _step_s(store: Store, trial: Trial) -> float:
    steps = pq.read_table(f"{store.trial_folder(trial.trial_id)}/steps.parquet").to_pandas()
    return float(summarise(steps)["step_s"] or math.nan)


if __name__ == "__main__":
    main()
