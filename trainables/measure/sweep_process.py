"""Run the all-reduce sweep in processes of its own, one per rank, so that the caller never uses the GPU.

    python -m trainables.measure.sweep_process BYTES,BYTES,...

Rank, world size and address come from torchrun's environment variables. Prints the rows of sweep.parquet as JSON on the
last line. Ends when its standard input is closed, which happens at the latest with its parent.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def sweep_in_process(sizes: Sequence[int], environment: Mapping[str, str], timeout_s: float) -> list[dict[str, Any]]:
    """Return the rows of sweep.parquet of this rank. Collective over the ranks that `environment` names.

    Raises RuntimeError if the process fails or takes longer than `timeout_s`.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", "trainables.measure.sweep_process", ",".join(map(str, sizes))],
        env={**os.environ, **environment, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        with process.stdin:
            process.stdin = None  # `communicate` would close it, which ends the process
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
    if process.returncode:
        reason = errors.splitlines()[-1].strip() if errors else f"it ended with status {process.returncode}"
        raise RuntimeError(f"the all-reduce sweep failed: {reason}")
    rows: list[dict[str, Any]] = json.loads(output.strip().splitlines()[-1])
    return rows


def _end_with_parent() -> None:
    """Exit when standard input is closed."""
    with contextlib.suppress(OSError):
        sys.stdin.read()
    os._exit(1)


def main() -> None:
    import torch
    import torch.distributed as dist

    from trainables.measure.allreduce_sweep import all_reduce_sweep
    from trainables.step.timing import clock_for, without_garbage_collection

    threading.Thread(target=_end_with_parent, daemon=True).start()
    on_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    control: Any = dist.new_group(backend="gloo")
    with without_garbage_collection():
        rows = all_reduce_sweep(
            list(map(int, sys.argv[1].split(","))), dist.get_rank(), device, None, control, clock_for(device)
        )
    dist.destroy_process_group()
    print(json.dumps(rows), flush=True)
    os._exit(0)  # do not wait for the thread that reads standard input


if __name__ == "__main__":
    main()
