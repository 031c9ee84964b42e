"""What is asked of a script and what comes back. Plain values that import no torch and travel as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

Row = dict[str, Any]
"""columns of one row of a Parquet table"""

MIN_WARMUP_STEPS = 6
"""two steps as they are (compilation, DDP's buckets), discovery, operations, and two steps as they are"""

LEAD_IN_STEPS = 1
"""untimed steps after each change of the instruments"""


def is_module(script: str) -> bool:
    """Return True for the name of a module, False for the path of a file."""
    return not script.endswith(".py") and all(part.isidentifier() for part in script.split("."))


@dataclass(frozen=True)
class ProbeJob:
    """The windows of a training loop, in optimizer steps. All ranks of a trial have the same.

    warmup_steps: at least `MIN_WARMUP_STEPS`; on GPUs at least 12, because DDP's logger synchronises during its first
    10 steps. issue_steps: steps that start on an idle GPU; 0 on CPUs. phase_steps, issue_steps, trace_steps: 0 omits
    the window. tokens_per_sample: None: from integer inputs [n, tokens].
    keep_trace: return the profiler trace.
    """

    warmup_steps: int = 12
    plain_steps: int = 20
    phase_steps: int = 20
    issue_steps: int = 0
    trace_steps: int = 5
    tokens_per_sample: int | None = None
    keep_trace: bool = False

    @property
    def windows(self) -> tuple[tuple[str, int], ...]:
        """Name and steps of each window, in order. Windows of 0 steps are omitted."""
        timed = (
            ("plain", self.plain_steps),
            ("phases", self.phase_steps),
            ("issue", self.issue_steps),
            ("communication", self.trace_steps),
        )
        windows = [("warmup", max(self.warmup_steps, MIN_WARMUP_STEPS))]
        for name, steps in timed:
            windows += [("lead_in", LEAD_IN_STEPS), (name, steps)] if steps else []
        return tuple(windows)

    @property
    def needed_steps(self) -> int:
        """Optimizer steps until all windows are complete."""
        return sum(steps for _, steps in self.windows)


@dataclass(frozen=True)
class ScriptJob:
    """A script as `torchrun` would start it, on one rank.

    script: path of the file, relative to `directory` if not absolute, or name of a module, see `is_module`. arguments:
    its command line. environment: extra variables. directory: working directory; None: that of the parent. log: file
    for the rank's output (stdout and stderr); its folder exists. threads: OMP_NUM_THREADS, unless `environment` sets
    it; None: unchanged. start_timeout_s: longest time until the first optimizer step. step_timeout_s: longest time
    between steps, which includes an evaluation. end_grace_s: time for a script to end by itself after the last window,
    in which `steps` has ended its loop. add_ddp: put the model of a script for one GPU into DDP.
    """

    script: str
    log: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    threads: int | None = None
    probe: ProbeJob = ProbeJob()
    start_timeout_s: float = 900.0
    step_timeout_s: float = 600.0
    end_grace_s: float = 10.0
    add_ddp: bool = False

    @property
    def is_module(self) -> bool:
        """True if `script` is the name of a module, as after `torchrun -m`."""
        return is_module(self.script)

    def to_json(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the job that `to_json` wrote."""
        job = cls(**json.loads(text))
        return replace(job, arguments=tuple(job.arguments), probe=ProbeJob(**job.probe))  # type: ignore[arg-type]


@dataclass(frozen=True)
class RankPlace:
    """A rank's position in the trial, for torchrun's environment variables, and the address of its node."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    group_rank: int = 0
    """number of the node"""
    group_world_size: int = 1
    address: str = "127.0.0.1"


FailureKind = Literal[
    "not_found",  # the script does not exist
    "arguments",  # argparse or similar exited with 2
    "import",  # a module is missing
    "read_only",  # it writes to a location where it must not
    "out_of_memory",
    "error",  # any other exception
    "exit",  # it exited with a code
    "killed",  # it was ended by a signal
    "starts_processes",  # mp.spawn, torchrun or accelerate launch inside
    "no_step",  # it ended without an optimizer step
    "alone",  # its ranks have no common process group
    "early",  # it ended before the last window
    "start_timeout",  # no optimizer step in time
    "step_timeout",  # no further optimizer step in time
    "other_rank",  # another rank failed; this one was ended
    "stopped",  # the caller's `stop` returned True
]


@dataclass(frozen=True)
class ScriptFailure:
    """Why a script has no complete result. `line`: the reason on one line, without the log's path."""

    kind: FailureKind
    line: str
    rank: int
    log: str
    exit_code: int | None = None
    steps_run: int = 0
    steps_needed: int = 0

    @property
    def out_of_memory(self) -> bool:
        return self.kind == "out_of_memory"


@dataclass(frozen=True)
class ScriptOutput:
    """What a rank measured of a script; with `failure`, what it measured until then.

    tables: rows by table ("steps", "buckets", "collectives"). evidence, see `docs/measuring.md`, "Scripts":
    `steps_run`, `steps_needed`, `samples_per_step`, `tokens_per_step`, `step_flops`, `peak_memory_by_device_bytes`,
    `optimizers`, `nulls` (reason by quantity that could not be measured), ... span: start and end of the timed windows
    in unix seconds. trace: gzipped Chrome trace JSON.
    """

    tables: dict[str, list[Row]]
    evidence: dict[str, Any]
    span: tuple[float, float]
    failure: ScriptFailure | None = None
    trace: bytes | None = None
