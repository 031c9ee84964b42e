"""A script that fails in the way its argument says."""

import atexit
import builtins
import os
import sys
import time
from pathlib import Path

import torch
from torch import multiprocessing, nn

kind = sys.argv[1]
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(rank: int = 0) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


if kind == "exit":
    sys.exit(3)
elif kind == "hang":
    time.sleep(600)
elif kind == "spawn":
    multiprocessing.spawn(train, nprocs=2)
elif kind == "import":
    import a_module_that_does_not_exist  # type: ignore[import-not-found] # noqa: F401
elif kind == "assertion":
    assert torch.__version__ == "0.3.2"
elif kind == "old import":
    import torch._six  # type: ignore[import-not-found] # noqa: F401
elif kind == "import with a hint":
    raise ImportError("rouge needs a package: pip install absl-py")
elif kind == "import of a neighbour":
    import scripts.own_modules  # type: ignore[import-not-found] # noqa: F401
elif kind == "GPU":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.zeros(1, device="cuda")
elif kind == "GPU of NCCL":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
elif kind == "GPU of DDP":
    torch.distributed.init_process_group("gloo")
    nn.parallel.DistributedDataParallel(nn.Linear(1, 1), device_ids=[torch.device("cpu")])
elif kind == "variable":
    rank = int(os.environ["SLURM_PROCID"])
elif kind == "bold":
    raise ValueError("only \x1b[1mtrusted\x1b[0m files")
elif kind == "silent print":
    builtins.print = lambda *_, **__: None
    raise ValueError("not printed")
elif kind == "read-only":
    Path("/sys/checkpoints").mkdir()
elif kind == "memory":
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
elif kind.startswith("early"):  # "early 4": after four steps
    for _ in range(int(kind.split()[1])):
        train()
    if torch.autograd._profiler_enabled():
        atexit.register(lambda: print("profiler at exit:", torch.autograd._profiler_enabled()))
elif kind == "swallow":
    while True:
        try:
            train()
        except BaseException as error:  # noqa: BLE001 - what a script may do
            print(error)
elif kind == "imported spawn":
    from torch.multiprocessing.spawn import spawn

    spawn(train, nprocs=2)
elif kind == "one GPU":
    print("2 GPUs are needed\n", "=" * 80)
