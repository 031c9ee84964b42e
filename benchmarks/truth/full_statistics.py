"""Run the statistical tests at full size, with ten times the samples of `make test`.

    python -m benchmarks.truth.full_statistics

They cover intervals and predictions, false alarms of checks, and windows that stop early. Exits with pytest's status.
"""

import os
import subprocess
import sys

from tests.support.hosts import ROOT
from tests.support.sizes import FULL


def main() -> int:
    command = [sys.executable, "-m", "pytest", "-m", "statistics", "--durations=0", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {FULL: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
