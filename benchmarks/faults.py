"""Faults at random moments of a study on two hosts under Ray, and what is lost by them:  python -m benchmarks.faults

The hosts are sets of namespaces of this machine (`tests/hosts.py`; it needs root); faults, and what must hold after each,
are in `tests/faults.py`. Moments are seeded. Writes the count, also as a table: benchmarks/results/faults/table.md.
"""

import argparse
import random
import time
from typing import Any

from benchmarks.common import figure, write_summary
from tests.faults import FAULTS, FaultError, cluster, suffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="of each fault")
    parser.add_argument("--faults", default=",".join(FAULTS), help="a comma list")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="faults", help="folder under benchmarks/results")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin none after so many seconds")
    options = parser.parse_args()
    samples: list[dict[str, Any]] = []
    begin_s = time.monotonic()
    for repeat in range(options.repeats):
        with cluster() as made:
            for name in options.faults.split(","):
                if time.monotonic() - begin_s > options.budget_s:
                    break
                moments = random.Random(f"{options.seed} {repeat} {name}")
                try:
                    samples.append({"repeat": repeat, "holds": True} | suffer(made, name, moments))
                except FaultError as error:
                    samples.append({"repeat": repeat, "holds": False, "fault": name, "what": str(error)[-3_000:]})
                    made.rejoin(force=True)
                print(samples[-1], flush=True)
                folder = write_summary(options.name, figures(samples), samples)
                (folder / "table.md").write_text(table(samples))


def figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for name, (held, count) in _counts(samples).items():
        made.append(figure(f"{name}: survived", held, None, f"of {count}", f"{count} of {count}", held == count))
    return made


def table(samples: list[dict[str, Any]]) -> str:
    """The count as Markdown."""
    lines = ["| fault, injected while a study runs on two nodes | survived |", "|---|---|"]
    lines += [f"| {name} | {held} of {count} |" for name, (held, count) in _counts(samples).items()]
    return "\n".join(lines) + "\n"


def _counts(samples: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for sample in samples:
        held, count = found.get(sample["fault"], (0, 0))
        found[sample["fault"]] = held + sample["holds"], count + 1
    return found


if __name__ == "__main__":
    main()
