"""What does Ray Train's state tracking cost a study?

    python -m benchmarks.cost.tracking            # on all GPUs, else on two CPU ranks

The same command runs with `RAY_TRAIN_ENABLE_STATE_TRACKING` on and off, in turn: ABBA ABBA ... Compared are the time to
the first warm-up and the throughput of the plain window. Tracking starts an actor, whose memory is sampled.
"""

import argparse
import os
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from benchmarks.cost.start import ON_CPUS, ON_GPUS, launched
from benchmarks.harness.common import abba_ratio, figure, write_summary
from study.capacity import count_gpus

VARIABLE = "RAY_TRAIN_ENABLE_STATE_TRACKING"
ACTOR = "ray::TrainStateActor"
SAMPLED_EVERY_S = 0.5
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="0: two CPU ranks")
    parser.add_argument("--quadruples", type=int, default=3, help="of off, on, on, off")
    parser.add_argument("--small", action="store_true", help="one quadruple on CPU ranks")
    parser.add_argument("--name", default="tracking", help="folder under benchmarks/results")
    options = parser.parse_args()
    if options.small:
        options.gpus, options.quadruples = 0, 1
    work = ON_GPUS if options.gpus else ON_CPUS
    arguments = shlex.split(f"run default {work} --gpus {options.gpus or 2} --repeats 1 --address local")
    samples = []
    for _ in range(options.quadruples):
        for is_on in (False, True, True, False):
            os.environ[VARIABLE] = str(int(is_on))
            with largest_memory() as largest:
                (group,) = launched(arguments)
            samples.append(group | {"tracking": is_on, "actor_bytes": max(largest, default=0)})
    figures = []
    for name, measure in (("first warm-up", "to_first_warmup_s"), ("throughput", "samples_per_s")):
        on, off = ([sample[measure] for sample in samples if sample["tracking"] is is_on] for is_on in (True, False))
        if options.quadruples > 1:
            ratio, interval = abba_ratio(on, off)
            holds = interval[0] <= 1.0 <= interval[1]
            figures.append(figure(f"{name}, tracking / none", ratio, interval, "ratio", "1 in the interval", holds))
    actor_mib = max(sample["actor_bytes"] for sample in samples) / MIB
    figures.append(figure("memory of the actor", actor_mib, None, "MiB", "none", None))
    write_summary(options.name, figures, samples)


@contextmanager
def largest_memory() -> Iterator[list[int]]:
    """Sample the memory of the tracking actor while the block runs. Yields the list of samples, in bytes."""
    sampled: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLED_EVERY_S):
            for process in psutil.process_iter(["cmdline", "memory_info"]):
                words = process.info["cmdline"] or [""]
                if words[0].startswith(ACTOR) and process.info["memory_info"]:
                    sampled.append(process.info["memory_info"].rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield sampled
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
