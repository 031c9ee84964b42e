"""Does a warm worker group measure the same step time as a fresh one?

    python -m benchmarks.cost.warm_cold             # one GPU if there is one, else one CPU rank

Each pair runs a trial in a warm group, after trials with other precision, batch and loader workers, and the same trial
in a group of its own. Goals: the interval of the step-time ratio warm / cold lies within 0.98 to 1.02, and no trial
leaves GPU memory allocated.
"""

import argparse
import math
import tempfile
from typing import Any

from analysis.measure.measures import summaries
from analysis.read.results import load
from benchmarks.harness.common import figure, ratio_interval, write_summary
from study.capacity import count_cpus, count_gpus
from study.orchestrate.cluster import connect
from study.orchestrate.tune import run_trials
from study.store.store import Store
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

    taken: list[dict[str, float]] = []
    with connect("local") as cluster, tempfile.TemporaryDirectory(prefix="warm-cold-") as out:
        store = Store.open(
            out, name="warm-cold", question="Does warm equal cold?", configuration={}, versions={}, command=""
        )
        for pair in range(options.pairs):
            warm, cold = subject.but(repeat=2 * pair), subject.but(repeat=2 * pair + 1)
            groups = [[unlike.but(repeat=pair), loaded.but(repeat=pair), warm], [cold]]
            # reverse every other pair, so that drift cancels
            run_trials("warm-cold", groups if pair % 2 == 0 else groups[::-1], store, cluster)
            results = load(out)
            step_s = summaries(results.trials, results.windows).set_index("trial_id")["step_s"]
            taken.append(
                {"pair": pair, "warm_step_s": float(step_s[warm.trial_id]), "cold_step_s": float(step_s[cold.trial_id])}
            )
            print(taken[-1])
            if len(taken) > 1:  # what is measured is not lost to a later failure
                write_summary(options.name, [_ratio(subject, taken), *_memory(store)], taken)


def _ratio(subject: Trial, taken: list[dict[str, float]]) -> dict[str, Any]:
    ratio, interval = ratio_interval([math.log(pair["warm_step_s"] / pair["cold_step_s"]) for pair in taken])
    return figure(
        f"step time warm / cold, {subject.model} on one {subject.device}",
        ratio,
        interval,
        "ratio",
        "interval within 0.98 to 1.02",
        interval[0] >= 0.98 and interval[1] <= 1.02,
    )


def _memory(store: Store) -> list[dict[str, Any]]:
    """Return GPU memory after a trial minus that before it, the maximum over trials and ranks. Nothing on a CPU."""
    grown = [
        rank["memory"]["after_bytes"] - rank["memory"]["before_bytes"]
        for record in store.records()
        for rank in record["environment"]["ranks"]
        if rank["memory"]["before_bytes"] is not None
    ]
    if not grown:
        return []
    return [figure("GPU memory that a trial leaves behind", max(grown), None, "bytes", "<= 0", max(grown) <= 0)]


if __name__ == "__main__":
    main()
