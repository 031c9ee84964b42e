"""How much do real images slow down training? Throughput of every storage format and decoder against synthetic data.

    python -m benchmarks.speed.storage --data-dir DATA --make 20000        on one GPU
    python -m benchmarks.speed.storage --data-dir DATA --make 150 --small  on a CPU, to see that it works

ResNet-50, 224 px, batch 256, bf16, channels_last; crops and flips on the device; the page cache is warm. DATA contains
an image folder, or scripts/make_photos.py creates one in DATA/jpeg; the other formats are converted from it. In every
round each path trains once, in random order, between two trainings on synthetic data; its ratio is computed within the
round. The parts of each path are also measured alone: the loader without training, and the copy with the device's work
on images before the network. Goal: the best path reaches at least 0.97 of synthetic data.

A run that was interrupted, by --budget-s or otherwise, resumes under the same --out.
"""

import argparse
import contextlib
import math
import os
import random
import re
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from analysis.measure.measures import summarise
from benchmarks.harness.common import figure, kept_samples, ratio_interval, write_summary
from scripts.make_photos import SOURCES, make_photos
from study.orchestrate.processes.fork_server import await_forkserver, start_forkserver
from study.store.tables import packed, unpacked
from trainables.batch import to_device
from trainables.build import build_workload
from trainables.data.image_layout import storages_in, stored_side
from trainables.data.images.convert import convert
from trainables.data.images.decode import as_baseline, centre_square, nvjpeg, pil
from trainables.data.images.open import open_folder
from trainables.data.loader import endless_batches
from trainables.measure.run import run
from trainables.registry import DATASETS, DECODERS, STORAGES, modules, names_with
from trainables.step.context import RankSetup
from trainables.trial import Trial

GOAL = 0.97
TOLERANCE = 2.0
"""mean absolute difference of nvJPEG's pixels from Pillow's, of 255, that may be: two decoders and two resizers round
in their own ways"""

SYNTHETIC = "synthetic"
COPIED_AHEAD = "copied ahead"
COPIED = ("arrow_raw", "jpeg pil", "jpeg torchvision")
"""Paths that are also measured with batches copied ahead of the step."""

Rows = list[dict[str, Any]]


def main() -> None:
    options = _options()
    device = torch.device("cpu") if options.small else torch.device("cuda", 0)
    folder = _sets(options)
    vars(sys.modules["__main__"])["__spec__"] = None  # or every loader process would import this file again
    start_forkserver(modules(DATASETS, STORAGES, DECODERS))
    await_forkserver()
    samples: Rows = kept_samples(options.out)
    session = 1 + max((sample["session"] for sample in samples), default=-1)
    cases = _cases(options, folder)
    started_s = time.monotonic()
    if device.type == "cuda" and not any(sample["kind"] == "nvjpeg" for sample in samples):
        samples.append({"kind": "nvjpeg", "session": session, **nvjpeg_difference(folder, device)})
    longest_s = 0.0
    for number in range(options.rounds):
        done = {sample["case"] for sample in samples if sample["kind"] == "training" and sample["round"] == number}
        missing = [name for name in cases if name not in done | {SYNTHETIC}]
        if not missing:
            continue
        random.Random(number).shuffle(missing)
        for name in (SYNTHETIC, *missing, SYNTHETIC):
            if options.budget_s and time.monotonic() - started_s + 1.5 * longest_s > options.budget_s:
                sys.exit(f"out of time in round {number}; the same command goes on")
            began_s = time.monotonic()
            where = {"session": session, "round": number, "case": name}
            taken = [where | row for row in measure(cases[name], device)]
            samples += taken
            longest_s = max(longest_s, time.monotonic() - began_s)
            print(
                f"round {number}, {name}: {taken[0]['samples_per_s']:.0f} samples/s "
                f"after {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
            with contextlib.redirect_stdout(None):  # figures print themselves, and these are not the last
                write_summary(options.out, figures(samples, list(cases), options.small), samples)
    write_summary(options.out, figures(samples, list(cases), options.small), samples)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="an image folder, or where to make one")
    parser.add_argument("--make", type=int, metavar="N", help="make N photographs in DIR/jpeg if it has none")
    parser.add_argument("--sources", type=Path, nargs="+", default=SOURCES, help="larger photographs to cut them from")
    parser.add_argument("--small", action="store_true", help="a small model and few images, on a CPU")
    parser.add_argument("--cases", help="names of paths, a comma list; left out: all")
    parser.add_argument("--workers", type=int, help="loader processes; left out: a core each, 2 with --small")
    parser.add_argument("--rounds", type=int, help="left out: 3, or 2 with --small")
    parser.add_argument("--steps", type=int, help="steps of a window at least; left out: 40, or 2 with --small")
    parser.add_argument("--budget-s", type=float, help="start no training that would not end within so many seconds")
    parser.add_argument("--out", default="storage", help="folder below benchmarks/results")
    options = parser.parse_args()
    for name, small, large in (("workers", 2, len(os.sched_getaffinity(0))), ("rounds", 2, 3), ("steps", 2, 40)):
        if getattr(options, name) is None:
            setattr(options, name, small if options.small else large)
    return options


def _sets(options: argparse.Namespace) -> Path:
    """Prepare the data set in DATA in every storage format that the cases need."""
    folder = options.data_dir
    if options.make and "jpeg" not in storages_in(folder):
        mean_bytes = make_photos(folder / "jpeg", options.make, options.sources)
        print(f"{options.make} photographs of {mean_bytes / 1e3:.0f} kB in the mean", flush=True)
    needed = [name for name in STORAGES if not options.cases or name in re.split(r"[ ,]", options.cases)]
    for storage in ("jpeg", *needed):
        found = storages_in(folder)
        if "jpeg" not in found:
            sys.exit(f"{folder} holds no image folder; give --make N")
        if storage not in found:
            began_s = time.monotonic()
            convert(found["jpeg"], folder / storage, storage, _base(options).image_size)
            print(f"{storage} after {time.monotonic() - began_s:.0f} s", flush=True)
    return folder


def _base(options: argparse.Namespace) -> Trial:
    small = options.small
    return Trial(
        model="mlp" if small else "resnet50",
        image_size=64 if small else 224,
        device="cpu" if small else "cuda",
        batch_per_gpu=8 if small else 256,
        precision="fp32" if small else "bf16",
        memory_format="channels_last",
        parallel="none",
        communication_steps=0,
        prefetch_batches=1,  # the plain window lasts ten times what the loaders keep ready
        warmup_steps=2 if small else 15,
        steps=options.steps,
    )


def _cases(options: argparse.Namespace, folder: Path) -> dict[str, Trial]:
    """Return every path by name: a storage format and a decoder, with variants, and synthetic data."""
    base = _base(options)
    loaded = base.but(
        dataset="image_folder",
        data_dir=str(folder),
        loader_workers=options.workers,
        page_cache="warm",
        augment="device",
    )
    raw = loaded.but(storage="arrow_raw")
    cases = {
        f"{storage} {decode}": loaded.but(storage=storage, decode=decode)
        for storage in STORAGES
        for decode in DECODERS
        if not STORAGES[storage].holds_pixels and not (options.small and DECODERS[decode].on_device)
    }
    cases |= {
        "arrow_raw": raw,
        "arrow_raw in shared memory": raw.but(storage_place="shared_memory", page_cache="as_is"),
        "jpeg pil augmented by loaders": loaded.but(augment="cpu"),
    }
    if not options.small:  # a CPU copies nothing
        cases |= {f"{name} {COPIED_AHEAD}": cases[name].but(copy_ahead=True) for name in COPIED}
    chosen = options.cases.split(",") if options.cases else list(cases)
    unknown = set(chosen) - set(cases)
    if unknown:
        sys.exit(f"--cases: {', '.join(sorted(unknown))} not known; allowed: {', '.join(cases)}")
    return {SYNTHETIC: base.but(dataset=SYNTHETIC), **{name: cases[name] for name in chosen}}


def measure(trial: Trial, device: torch.device) -> Rows:
    """Return samples/s of training and of the parts of the path alone, with the median phase times in seconds."""
    measured = run(trial, RankSetup(rank=0, device=device))
    summary = summarise(unpacked([packed("steps", measured.tables["steps"])]).to_pandas())
    names = ("load_wait_s", "host_to_device_s", "forward_s", "backward_s", "step_s", "host_to_device_bytes_per_s")
    phases = {name: summary[name] for name in names}
    training = {"kind": "training", "samples_per_s": summary["throughput_samples_per_s"], **phases}
    if trial.dataset == SYNTHETIC:
        return [training]
    alone = trial.but(decode="nvjpeg" if DECODERS[trial.decode].ahead else trial.decode, copy_ahead=False)
    return [training, *parts_alone(alone, device)]


def parts_alone(trial: Trial, device: torch.device) -> Rows:
    """Measure the loader alone, and the copy with the device's work on images before the network."""
    workload = build_workload(trial, device)
    batches = endless_batches(trial, workload, rank=0)
    ready = trial.loader_workers * (trial.prefetch_batches + 1)
    for _ in islice(batches, ready):  # what was loaded before anyone asked
        pass
    count = 2 * ready
    started_s = time.perf_counter()
    for _ in islice(batches, count):
        pass
    loader_s = time.perf_counter() - started_s
    kept = list(islice(batches, 4))
    del batches

    def prepare(times: int) -> float:
        _synchronize(device)
        started_s = time.perf_counter()
        for _ in range(times):
            for inputs, _labels in kept:
                moved = inputs if device.type == "cpu" else to_device(inputs, device, trial.non_blocking)
                workload.prepare(moved)
        _synchronize(device)
        return time.perf_counter() - started_s

    prepare(1)
    times = 1 if device.type == "cpu" else 5
    device_s = prepare(times)
    batch = trial.batch_per_gpu
    return [
        {"kind": "loader alone", "samples_per_s": count * batch / loader_s},
        {"kind": "copy and device alone", "samples_per_s": times * len(kept) * batch / device_s},
    ]


def nvjpeg_difference(folder: Path, device: torch.device, images: int = 256) -> dict[str, Any]:
    """Return the mean absolute difference of nvJPEG from Pillow, of 255: over all images, and of the worst image."""
    records, _ = open_folder(storages_in(folder)["jpeg"], "train")
    files = [records[index][0] for index in range(0, len(records), max(1, len(records) // images))][:images]
    regions, side = [centre_square] * len(files), stored_side(224)
    expected = pil(files, regions, side, torch.device("cpu")).int()
    tensors = [torch.frombuffer(bytearray(as_baseline(file)), dtype=torch.uint8) for file in files]
    found = nvjpeg(tensors, regions, side, device).cpu().int()
    each = (found - expected).abs().float().mean(dim=(1, 2, 3))
    return {"images": len(files), "mean": each.mean().item(), "worst": each.max().item()}


def figures(samples: Rows, cases: list[str], small: bool) -> Rows:
    """Return the figures of all samples so far."""
    found = []
    for sample in samples:
        if sample["kind"] == "nvjpeg":
            what = f"nvJPEG's pixels against Pillow's, {sample['images']} images, worst image {sample['worst']:.2f}"
            holds = sample["mean"] <= TOLERANCE
            found.append(figure(what, sample["mean"], None, "of 255, mean difference", f"<= {TOLERANCE}", holds))
    logs = {case: _log_ratios(samples, case) for case in cases if case != SYNTHETIC}
    ratios = {case: ratio_interval(of_rounds) for case, of_rounds in logs.items() if len(of_rounds) > 1}
    if ratios:
        best = max(ratios, key=lambda case: ratios[case][0])
        value, interval = ratios[best]
        judged = None if small else value >= GOAL
        found.append(
            figure(f"best path ({best}) / synthetic", value, interval, "ratio of samples/s", f">= {GOAL}", judged)
        )
    for case, (value, interval) in ratios.items():
        found.append(figure(f"{case} / synthetic", value, interval, "ratio of samples/s", "none", None))
    for case in cases:
        rates = {kind: _median(samples, case, kind) for kind in ("training", "loader alone", "copy and device alone")}
        for kind, rate in rates.items():
            if rate is not None:
                limit = (
                    f", limited by {_limit(samples, case, rates)}" if kind == "training" and case != SYNTHETIC else ""
                )
                found.append(figure(f"{case}, {kind}{limit}", rate, None, "samples/s", "none", None))
    return found


def _log_ratios(samples: Rows, case: str) -> list[float]:
    """Return log(path / synthetic) per round. Synthetic is the mean of the trainings around it in the same session."""
    taken = [sample for sample in samples if sample["kind"] == "training"]
    found = []
    for sample in taken:
        if sample["case"] == case:
            synthetic = [
                math.log(other["samples_per_s"])
                for other in taken
                if other["case"] == SYNTHETIC
                and (other["session"], other["round"]) == (sample["session"], sample["round"])
            ]
            found.append(math.log(sample["samples_per_s"]) - statistics.fmean(synthetic))
    return found


def _median(samples: Rows, case: str, kind: str) -> float | None:
    rates = [s["samples_per_s"] for s in samples if s["kind"] == kind and s["case"] == case]
    return statistics.median(rates) if rates else None


def _limit(samples: Rows, case: str, rates: dict[str, float | None]) -> str:
    """Return the limit of a path, from its parts measured alone; synthetic training is the step alone.

    Loaders overlap with the device. The device copies and decodes between its steps, so those times add up, unless it
    works ahead; then they overlap at best.
    """
    step, copy, loader = _median(samples, SYNTHETIC, "training"), rates["copy and device alone"], rates["loader alone"]
    assert step is not None and copy is not None and loader is not None
    ahead = case.endswith((*names_with(DECODERS, "ahead"), COPIED_AHEAD))
    if loader < (min(step, copy) if ahead else 1 / (1 / step + 1 / copy)):
        return "the loader"
    return "the step" if copy > 10 * step else "copy and decoding on the device next to the step"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
