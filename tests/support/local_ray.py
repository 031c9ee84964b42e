"""Start a local Ray that many tests share:  python -m tests.support.local_ray

It prints its address, and ends when its standard input is closed, at the latest with its parent process. It has its own
temporary folder, so that commands find it only with `--address`, and the Prometheus of another test finds only that
test's Ray.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = {
    "RAY_metrics_report_interval_ms": "1000",  # instead of 10 s
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",  # instead of 60 s; resources may be in use by other tests
}


@contextlib.contextmanager
def started() -> Iterator[str]:
    """Start Ray in a separate process, yield its address, and stop it afterwards."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.local_ray"],
            cwd=ROOT, env=os.environ | SETTINGS | {"RAY_TMPDIR": folder}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stdin and process.stdout
        try:
            address = process.stdout.readline().strip()
            assert address, "Ray did not start"
            yield address
        finally:
            process.stdin.close()
            process.wait(60)


def main() -> None:
    from study.orchestrate.cluster import connect
    from tests.support.trials import quick_trial

    with connect("local", trials=[quick_trial(loader_workers=1)]):
        import ray

        print(ray.get_runtime_context().gcs_address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
