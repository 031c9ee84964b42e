"""How long do the imports of a rank take, with compiled modules and without?

    python -m benchmarks.cost.imports

New processes import what a rank imports before its first trial. In turn (ABBA), one finds all modules compiled, and one
compiles them itself, as after an installation without compilation if Python may write no bytecode. No goal.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.harness.common import abba_ratio, figure, write_summary

IMPORTS = "import ray.train.torch, study.orchestrate.rank, torch._dynamo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quadruples", type=int, default=3)
    parser.add_argument("--name", default="imports", help="folder under benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        import_s(folder, write=True)  # compiles, and reads files from the disk
        taken_s: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.quadruples):
            for compiled in (True, False, False, True):
                taken_s[compiled].append(import_s(folder if compiled else f"{folder}/absent"))
    ratio, interval = abba_ratio(taken_s[False], taken_s[True])
    write_summary(
        options.name,
        [
            figure("imports, compiled modules", min(taken_s[True]), None, "s", "none", None),
            figure("imports, not compiled", min(taken_s[False]), None, "s", "none", None),
            figure("not compiled / compiled", ratio, interval, "ratio of times", "none", None),
        ],
        [{"compiled": compiled, "taken_s": value} for compiled, values in taken_s.items() for value in values],
    )


def import_s(bytecode: str, write: bool = False) -> float:
    """Return the seconds in which a new process imports a rank's modules. bytecode: folder of compiled modules."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": "" if write else "1"}
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=environment)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
