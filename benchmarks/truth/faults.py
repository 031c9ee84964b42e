"""What does a study on two hosts lose if faults strike at random moments?

    python -m benchmarks.truth.faults

The hosts are sets of network namespaces on this machine (`tests/support/hosts.py`; needs root). The faults, and what
must hold after each, are defined in `tests/support/faults.py`. Moments are seeded. One study with all faults takes
minutes; earlier counts are kept, and the same command resumes. `python -m scripts.check_claims --write` then updates
docs/evidence.md. Goal: every fault is survived every time.
"""

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.common import figure, kept_samples, write_summary
from tests.support.faults import CLOCKS, COMPLETED, FAULTS, Cluster, FaultError, cluster, suffer

EVERY = [*FAULTS, CLOCKS, COMPLETED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="repeats per fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="faults", help="folder under benchmarks/results")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no study after this many seconds")
    options = parser.parse_args()
    samples = kept_samples(options.name)
    counted = {(sample["repeat"], sample["fault"]) for sample in samples}
    started_s = time.monotonic()
    for repeat in range(options.repeats):
        missing = [name for name in EVERY if (repeat, name) not in counted]
        while missing and time.monotonic() - started_s < options.budget_s:
            with cluster() as made:
                for sample in _suffered(made, random.Random(f"{options.seed} {repeat} {missing[0]}"), missing):
                    missing.remove(sample["fault"])
                    samples.append({"repeat": repeat} | sample)
                    print(samples[-1], flush=True)
                    write_summary(options.name, figures(samples), samples)


def _suffered(made: Cluster, moments: random.Random, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the results of `suffer` for the missing faults. An error counts against the fault in progress."""
    left = list(missing)
    try:
        for found in suffer(made, moments, [name for name in FAULTS if name in missing]):
            if found["fault"] in left:
                left.remove(found["fault"])
                yield {"holds": True} | found
    except FaultError as error:
        yield {"holds": False, "fault": left[0], "what": str(error)[-3_000:]}


def figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for name, (held, count) in _counts(samples).items():
        made.append(figure(f"{name}: survived", held, None, f"of {count}", f"{count} of {count}", held == count))
    return made


def _counts(samples: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for sample in samples:
        held, count = found.get(sample["fault"], (0, 0))
        found[sample["fault"]] = held + sample["holds"], count + 1
    return found


if __name__ == "__main__":
    main()
