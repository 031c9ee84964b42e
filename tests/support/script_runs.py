"""Run training scripts through the script entry on local gloo ranks, without Ray."""

import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainables.probe.job import ProbeJob, RankPlace, ScriptJob, ScriptOutput
from trainables.probe.launch import run_script

SHORT = ProbeJob(warmup_steps=6, plain_steps=4, phase_steps=4, trace_steps=2)


def run_on_ranks(
    script: Path, folder: Path, *arguments: str, ranks: int = 2, probe: ProbeJob = SHORT, **more: Any
) -> list[ScriptOutput]:
    """Run a script on CPU ranks of this host, and return what each measured. Its output is in FOLDER/RANK.log."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs: list[ScriptOutput | None] = [None] * ranks

    def run(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        job = ScriptJob(
            script=str(script),
            log=str(folder / f"{rank}.log"),
            arguments=arguments,
            environment={"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
            directory=str(folder),
            threads=1,
            probe=probe,
            start_timeout_s=120,
            step_timeout_s=60,
            **more,
        )
        place = RankPlace(rank, ranks, local_rank=rank, local_world_size=ranks)
        outputs[rank] = run_script(job, place, store, "test")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [output for output in outputs if output is not None]
