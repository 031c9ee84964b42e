"""Start a script in a fresh process, watch it, and return what it measured."""

from collections.abc import Callable

import torch.distributed as dist

from trainables.probe.job import RankPlace, ScriptJob, ScriptOutput


def run_script(
    job: ScriptJob,
    place: RankPlace,
    store: dist.Store,
    name: str,
    stop: Callable[[], bool] = lambda: False,
) -> ScriptOutput:
    """Run a script on this rank until its windows are complete, and return what it measured. Collective.

    Every rank of the trial calls this in the process that starts the script, with the same `name`, which is used once
    per `store`. The ranks communicate through `store` only (for example the default group's), under keys that start
    with `name`. The process need not have a process group and does not touch CUDA. Never raises for what a script does:
    see `ScriptOutput.failure`. `stop` is polled several times per second; the script is ended if it returns True.
    """
    raise NotImplementedError
