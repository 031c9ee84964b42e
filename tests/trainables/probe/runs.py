"""Run a script on several ranks of this host, as the study does."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainables.probe.job import ProbeJob, RankPlace, ScriptJob, ScriptOutput
from trainables.probe.launch import run_script

SCRIPTS = Path(__file__).parent / "scripts"
SHORT = ProbeJob(warmup_steps=6, plain_steps=8, phase_steps=8, trace_steps=6)


def run_on(
    ranks: int,
    script: str,
    *arguments: str,
    logs: Path,
    probe: ProbeJob = SHORT,
    directory: Path | None = None,
    **job: Any,
) -> list[ScriptOutput]:
    """Run a script of `SCRIPTS` and return the output of each rank. A thread stands for each rank's parent process.

    directory: working directory; None: the script's folder.
    """
    path = SCRIPTS / script
    folder = directory or path.parent
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> ScriptOutput:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        log = logs / f"{path.stem}-{'-'.join(arguments)[:20]}-rank{rank}.log"
        script_job = ScriptJob(
            str(path.relative_to(folder)),
            str(log),
            arguments,
            {"GLOO_SOCKET_IFNAME": "lo"},
            str(folder),
            1,
            probe,
            **job,
        )
        return run_script(script_job, RankPlace(rank, ranks, rank, ranks), client, script)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def rows(output: ScriptOutput, window: str, table: str = "steps") -> list[dict[str, Any]]:
    """Return the rows of a window."""
    return [row for row in output.tables[table] if row["window"] == window]


def median(values: list[float]) -> float:
    """Return the upper median."""
    return sorted(values)[len(values) // 2]
