"""Is our step as fast as that of timm, and of plain DDP under Ray Train as in Ray's examples, with the same settings?

    python -m benchmarks.speed.peers --seconds 500                # timm needs `uv pip install --group benchmarks`
    python -m benchmarks.speed.peers --peers ray --gpus 1
    python -m benchmarks.speed.peers --device cpu --small

Both sides use resident synthetic images and the same batch, precision and memory format. They stay ready in the same
processes and alternate (ABBA). timm: its model of that name, its SGD (with Nesterov momentum) and DDP, as in its
train.py. Ray: `prepare_model` within a TorchTrainer, torch's SGD and loss. Goal: ours is not slower in any row, on 1
and 4 GPUs.
"""

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.bare_loop import timed_s
from benchmarks.harness.common import figure, write_summary
from benchmarks.harness.ranks import Clock, Place, launch, options_of, sizes_that_fit
from benchmarks.harness.sides import BlockRates, Side, abba, ours
from study.capacity import count_cpus, count_gpus
from trainables.registry import PRECISIONS, load
from trainables.step.process import drop_buckets, release_memory, settings_for
from trainables.trial import Trial

PEERS = ("timm", "ray")


def main() -> None:
    parser = options_of(__doc__, name="peers", small="ResNet-18 at 32 px on one CPU rank, against timm", seconds=270)
    parser.add_argument("--device", default="cuda" if count_gpus() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--cases", default="resnet50:256,resnet18:512", help="model:batch,...")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--gpus", help="ranks, a comma list; left out: 1, and 4 or all GPUs")
    options = parser.parse_args()
    if options.small:
        options.peers, options.cases, options.image_size, options.precision = "timm", "resnet18:2", 32, "fp32"
        options.gpus, options.quadruples = "1", 2
    available = count_gpus() if options.device == "cuda" else 2
    sizes = sizes_that_fit(options.gpus or f"1,{min(4, available)}", available)
    for peer in options.peers.split(","):
        if peer == "timm" and importlib.util.find_spec("timm") is None:
            print("timm: not run, it is not installed: uv pip install --group benchmarks")
        elif peer == "ray":
            _under_ray(options, sizes)
        else:
            launch(measure, options.device, sizes, peer, vars(options))


def _under_ray(options: argparse.Namespace, sizes: list[int]) -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from study.orchestrate.cluster import connect

    on_gpu = options.device == "cuda"
    for size in sizes:  # a trainer has one number of ranks
        with connect("local"):
            TorchTrainer(
                _ray_loop,
                train_loop_config={"options": vars(options), "argv": sys.argv, "path": sys.path},
                torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
                scaling_config=ScalingConfig(num_workers=size, use_gpu=on_gpu),
            ).fit()


def _ray_loop(config: dict[str, Any]) -> None:
    """Run one rank under Ray Train: build its `Place`, then continue as a rank of our own."""
    from ray.train.torch import get_device

    sys.argv, sys.path = config["argv"], config["path"]
    device, size = get_device(), dist.get_world_size()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = {size: (dist.new_group(range(size)), dist.new_group(range(size), backend="gloo"))}
    options = config["options"]
    measure(Place(dist.get_rank(), device, groups), "ray", options | {"name": f"{options['name']}-{size}"})


def measure(place: Place, peer: str, options: dict[str, Any]) -> None:
    """Measure all cases of a peer, in order. Rank 0 writes after each. Ranks that a case does not use sleep."""
    clock = Clock(place, options["seconds"])
    measured: dict[Trial, BlockRates] = {}
    skipped: list[dict[str, Any]] = []
    longest_s = 0.0
    cases = [case.split(":") for case in options["cases"].split(",")]
    for size in sorted(place.groups):
        for model, batch in cases:
            trial = Trial(
                model=model,
                dataset="synthetic",
                image_size=options["image_size"],
                device=options["device"],
                world_size=size,
                cpus_per_rank=max(1, count_cpus() // max(size, count_gpus())) if options["device"] == "cuda" else 1,
                batch_per_gpu=int(batch),
                precision=options["precision"],
                memory_format="channels_last",
                warmup_steps=5,
                # neither timm's train.py nor Ray's prepare_model uses DDP on one GPU; on more, both use DDP's defaults
                **{"parallel": "none"} if size == 1 else {"gradient_as_bucket_view": False},
            )
            if not clock.fits(longest_s):
                skipped.append({**_what(trial), "reason": "not run: out of time"})
                continue
            begin_s = time.monotonic()
            if place.rank < size:
                measured[trial] = against(PEER_STEPS[peer], trial, place, options["quadruples"], clock)
                release_memory()
            longest_s = max(longest_s, time.monotonic() - begin_s)
            if place.rank == 0:
                write(f"{options['name']}-{peer}", peer, measured, skipped)


def _what(trial: Trial) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in ("model", "batch_per_gpu", "precision", "world_size", "device")}


def against(make: "MakeStep", trial: Trial, place: Place, quadruples: int, clock: Clock) -> BlockRates:
    """Alternate our step and the peer's."""
    group, control = place.groups[trial.world_size]
    with settings_for(trial, load(PRECISIONS[trial.precision])):
        step = make(trial, place, group)
        for _ in range(trial.settling_steps):
            step()
        theirs = partial(_timed, step, place.device, control)
        sides = {"ours": Side(ours(trial, place).timed, trial.global_batch), "peer": Side(theirs, trial.global_batch)}
        blocks = abba(sides, place, trial.world_size, quadruples, clock)
        del sides, theirs, step
        drop_buckets(group, place.device)
    return blocks


def _timed(step: Callable[[], None], device: torch.device, control: Any, steps: int) -> float:
    return timed_s(step, steps, device, control)


MakeStep = Callable[[Trial, Place, Any], Callable[[], None]]


def _timm_step(trial: Trial, place: Place, group: Any) -> Callable[[], None]:
    import timm
    from timm.optim import create_optimizer_v2

    model: Any = timm.create_model(trial.model)
    model = model.to(place.device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, weight_decay=5e-4, momentum=0.9)
    if trial.world_size > 1:
        ids = [place.device] if place.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, process_group=group)
    return _plain_step(trial, place.device, model.train(), optimizer)


def _ray_step(trial: Trial, place: Place, group: Any) -> Callable[[], None]:
    from ray.train.torch import prepare_model

    model = getattr(torchvision.models, trial.model)().to(memory_format=torch.channels_last)
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return _plain_step(trial, place.device, model.train(), optimizer)


PEER_STEPS: dict[str, MakeStep] = {"timm": _timm_step, "ray": _ray_step}


def _plain_step(
    trial: Trial, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """Return a step as both peers have it: autocast around model and loss, backward, update."""
    size, criterion = trial.image_size, nn.CrossEntropyLoss().to(device)
    images = torch.randn(trial.batch_per_gpu, 3, size, size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    labels = torch.randint(1000, (trial.batch_per_gpu,), device=device)
    amp = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trial.precision)

    def step() -> None:
        with torch.autocast(device.type, amp) if amp else contextlib.nullcontext():
            loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def write(name: str, peer: str, measured: dict[Trial, BlockRates], skipped: list[dict[str, Any]]) -> None:
    """Write everything so far."""
    figures = []
    for trial, blocks in measured.items():
        ratio, interval = blocks.ratio()
        title = f"ours / {peer}, {trial.model} batch {trial.batch_per_gpu}, {trial.world_size} {trial.device}"
        holds = interval[1] >= 1 if trial.device == "cuda" else None
        figures.append(figure(title, ratio, interval, "ratio of images/s", ">= 1 (upper end)", holds))
        for side in ("ours", "peer"):
            rate, interval = blocks.rate(side)
            figures.append(figure(f"{side}, {title}", rate, interval, "images/s", "none", None))
    samples = [{**_what(trial), **row} for trial, blocks in measured.items() for row in blocks.rows()]
    write_summary(name, figures, samples + skipped)


if __name__ == "__main__":
    main()
