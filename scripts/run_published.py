"""Run the published studies on the GPUs of this host, several at a time, in a given time.

    python -m scripts.run_published DIR --photos PHOTOS --fashion-mnist FASHION --minutes 25

Each study runs on GPUs of its own, and on their share of the host's cores; what they share is memory and disks. Studies
start in the order of `STUDIES`, or of `--only`, each as soon as enough GPUs are free. When the time is over, the
running ones are ended and keep the trials that they have. Results are in DIR/NAME, output is in DIR/NAME.log.

PHOTOS: photographs by class, with the converted sets in its folders lmdb, arrow_jpeg and arrow_raw (docs/storage.md).
FASHION: all of Fashion-MNIST. Studies that need a folder that is not given are left out.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from study.capacity import count_gpus

RUN = (sys.executable, "-m", "study.scaling", "run")
POLL_S, GRACE_S = 0.2, 60.0
"""Seconds between looks at running studies, and for an ended one to write its report."""


@dataclass(frozen=True)
class Published:
    """A study with the arguments of its commands, which share a results folder. gpus: None for the usual number."""

    name: str
    commands: tuple[str, ...]
    gpus: int | None = None


_FORUM_PHOTOS = (
    "forum-phases --data-dir {photos} --set dataset=image_folder --model resnet18 --batch-per-gpu 64 --precision bf16"
)
_LAB_BOTH = "hpml-lab4 --data-dir {fashion} --set dataset=fashion_mnist --precision tf32 --set window_limit_s=6"
_LAB = f"{_LAB_BOTH} --set parallel=ddp"
_LADDER = "acceleration-ladder --data-dir {photos} --global-batch 256 --set profile_ranks=0 --set warmup_steps=5"
_LADDER_CASES = (
    "--case 'JPEG files, fp32, one GPU' --case LMDB --case 'raw pixels in shared memory' --case 'mixed precision (O1)' "
    "--case 'fp16 with master weights (O2)' --case 'DataParallel, fp32' "
    "--case 'DataParallel, more loader workers and CPU threads' --case 'DDP, fp32' --case 'DDP, mixed precision'"
)
_MLSTM = (
    "mlstm-scaling --interconnect auto,no_p2p,socket --set communication_steps=3 --set sweep_bytes=268435456 --case"
)
_VGG = "vgg-case-study --precision bf16 --case"
STUDIES = (
    Published(
        "forum-phases",
        (
            f"{_FORUM_PHOTOS} --set parallel=dp",
            f"{_FORUM_PHOTOS} --set parallel=ddp --case 'pinned, non-blocking'",
        ),
    ),
    Published(
        "forum-phases-batch-256",
        (
            "forum-phases --case 'pinned, non-blocking' --set parallel=dp --model resnet18,resnet50 "
            "--batch-per-gpu 256 --precision bf16",
        ),
    ),
    Published(
        "vgg-case-study",
        (
            f"{_VGG} timed --set parallel=ddp --batch-per-gpu 12,32,64,100",
            f"{_VGG} timed --set parallel=dp --batch-per-gpu 512,2048",
            f"{_VGG} trained --batch-per-gpu 64,256",
        ),
    ),
    Published("vgg-accuracy", (f"{_VGG} trained --global-batch 64 --repeats 4",)),
    Published("mlstm-scaling", (f"{_MLSTM} '16-bit all-reduce'",)),
    Published("mlstm-scaling-32bit", (f"{_MLSTM} '32-bit all-reduce'",)),
    Published("hpml-lab4", (f"{_LAB} --batch-per-gpu 64,128,512,2048,8192,32768",)),
    Published("hpml-lab4-memory", (f"{_LAB} --case timed --gpus 1 --batch-per-gpu 2048,8192,32768,49152",), gpus=1),
    Published("hpml-lab4-memory-2gpu", (f"{_LAB_BOTH} --case timed --set image_size=48 --batch-per-gpu 7500,30000",)),
    Published("acceleration-ladder", (f"{_LADDER} --set steps=50 --set window_limit_s=6 {_LADDER_CASES}",)),
    Published(
        "acceleration-ladder-300",
        (f"{_LADDER} --set steps=300 --set window_limit_s=60 --case 'DDP, fp32' --case 'DDP, mixed precision'",),
    ),
    Published("inception", (f"{_VGG} timed --model inception_v3 --set parallel=ddp --batch-per-gpu 64",)),
    Published("averaging", ("averaging",)),
    Published("storage-order", ("storage-order --data-dir {photos} --batch-per-gpu 64",), gpus=1),
    Published("number-formats", ("number-formats",), gpus=1),
    Published(
        "loader-grid",
        (
            "loader-grid --data-dir {photos} --batch-per-gpu 64 --set cpus_per_rank=1,8 --loader-workers 2,8,32,128 "
            "--set window_limit_s=6",
        ),
        gpus=1,
    ),
    Published(
        "default-grid",
        (
            "default --model resnet18_small --set dataset=fashion_mnist_sample --batch-per-gpu 128,512 "
            "--loader-workers 2,8 --precision bf16,fp32 --repeats 3",
        ),
    ),
    Published("default-4gpu", ("default",), gpus=4),
    Published("averaging-4gpu", ("averaging --case DataParallel",), gpus=4),
    Published("vgg-case-study-4gpu", (f"{_VGG} timed --set parallel=ddp --batch-per-gpu 12,64 --gpus 1,2,4",), gpus=4),
    Published("hpml-lab4-4gpu", (f"{_LAB} --case timed --batch-per-gpu 512,8192",), gpus=4),
)
"""Studies with settings that take minutes on two H100, those that answer the most questions per minute first."""


@dataclass
class _Active:
    study: Published
    gpus: Sequence[int]
    process: subprocess.Popen[bytes]
    left: list[str]
    ended_at: float | None = None


def run_all(
    studies: Sequence[Published],
    directory: Path,
    *,
    gpus: int,
    usual_gpus: int,
    seconds: float,
    folders: Mapping[str, Path],
    program: Sequence[str] = RUN,
    report: Callable[[str], None] = print,
) -> dict[str, int]:
    """Run the studies; return the last exit code of each, and nothing for those that the time did not suffice for.

    gpus: of this host. usual_gpus: of a study that does not need 1. folders: by their name in the commands.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    waiting, active, codes = list(studies), list[_Active](), dict[str, int]()
    while waiting or active:
        is_over = time.monotonic() >= end
        busy = {gpu for one in active for gpu in one.gpus}
        for study in () if is_over else tuple(waiting):
            if chosen := _free(gpus, busy, study.gpus or usual_gpus):
                waiting.remove(study)
                busy |= set(chosen)
                commands = [command.format_map(folders) for command in study.commands]
                report(f"{study.name}: starts on GPUs {', '.join(map(str, chosen))}")
                first = _start(program, commands[0], directory / study.name, chosen, gpus)
                active.append(_Active(study, chosen, first, commands[1:]))
        if is_over:
            waiting.clear()
        for one in tuple(active):
            code = one.process.poll()
            if code is None:
                if is_over:
                    _end(one)
                continue
            codes[one.study.name] = code
            if one.left and not is_over:
                one.process = _start(program, one.left.pop(0), directory / one.study.name, one.gpus, gpus)
            else:
                report(f"{one.study.name}: ended with code {code}")
                active.remove(one)
        time.sleep(POLL_S)
    return codes


def _free(gpus: int, busy: set[int], count: int) -> Sequence[int] | None:
    """Return the first block of `count` free GPUs, aligned so that blocks of other sizes fit too."""
    blocks = (range(first, first + count) for first in range(0, gpus - count + 1, count))
    return next((block for block in blocks if not busy & set(block)), None)


def _start(
    program: Sequence[str], command: str, results: Path, chosen: Sequence[int], gpus: int
) -> subprocess.Popen[bytes]:
    """Start a command on some GPUs and their share of the cores, which the new process inherits."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // gpus)
    own = cores[share * chosen[0] : share * (chosen[-1] + 1)] or cores
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in chosen)}
    os.sched_setaffinity(0, own)
    try:
        with results.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [*program, *shlex.split(command), "--out", str(results), "--quiet"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
    finally:
        os.sched_setaffinity(0, cores)


def _end(one: _Active) -> None:
    """End a study, which then writes its report; kill it if it does not end in `GRACE_S`."""
    if one.ended_at is None:
        one.ended_at = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
    elif time.monotonic() > one.ended_at + GRACE_S:
        one.process.kill()


def _possible(folders: Mapping[str, Path | None]) -> list[Published]:
    """Return the studies whose folders are given."""
    missing = [f"{{{name}}}" for name, folder in folders.items() if folder is None]
    return [study for study in STUDIES if not any(name in "".join(study.commands) for name in missing)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder for the results folders")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--fashion-mnist", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--gpus-per-study", type=int, default=2)
    names = [study.name for study in STUDIES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    options = parser.parse_args()
    if (found := count_gpus()) < options.gpus_per_study:
        parser.error(f"--gpus-per-study {options.gpus_per_study}: this host has {found} GPUs")
    given = {"photos": options.photos, "fashion": options.fashion_mnist}
    possible = {study.name: study for study in _possible(given)}
    chosen_studies = [possible[name] for name in dict.fromkeys(options.only) if name in possible]
    done = run_all(
        chosen_studies, options.directory, gpus=found, usual_gpus=options.gpus_per_study,
        seconds=60 * options.minutes, folders={name: folder for name, folder in given.items() if folder},
    )  # fmt: skip
    sys.exit(0 if len(done) == len(chosen_studies) and not any(done.values()) else 1)
