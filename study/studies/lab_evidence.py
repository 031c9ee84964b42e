"""Collect evidence for three questions of the study hpml-lab4, on CPU ranks of this host.

1. Which samples repeat across epochs without `set_epoch`? Computed from the samplers, without training.
2. What does DistributedDataParallel (DDP) send? Bytes by kind from the model's tensors, next to the bytes that rank 0
   wrote to its sockets (Linux counts them per process).
3. What happens to the buffers of batch normalisation, and to each rank's accuracy, if only gradients are communicated?

`run hpml-lab4` starts this module as a process of its own, after the trials; `scripts.lab4_evidence` writes the page.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler

from trainables.build import build_workload
from trainables.data.fashion_mnist import sample
from trainables.data.loader import endless_batches
from trainables.data.sampler import RankSampler
from trainables.step.context import RankSetup, build_context
from trainables.step.step import training_step
from trainables.trial import Trial
from trainables.workload import Workload

RANKS = 2
EPOCHS = 3
BATCH = 32
COUNTED_STEPS = 5

Batches = list[list[int]]


@dataclass(frozen=True)
class Evidence:
    """What was measured.

    trial: of both measurements with ranks. repeated: see `repeats`. sent_bytes: rank 0's `measure_sent_bytes`. runs:
    results of `_train` by rank, then trial.
    """

    trial: Trial
    repeated: pd.DataFrame
    sent_bytes: dict[str, float]
    runs: Sequence[Sequence[dict[str, float]]]

    def numbers(self) -> dict[str, float]:
        """Return the numbers that `analysis.answers.lab_evidence` reads."""
        rows = self.repeated
        sampler = rows[(rows["sampler"] == "DistributedSampler") & (rows["ranks"] == RANKS)]
        without, with_epoch = (sampler[sampler["set_epoch"] == value].iloc[0] for value in ("no", "yes"))
        of_rank = [pd.DataFrame(results) for results in self.runs]
        distances = pd.concat(of_rank)
        alone = ~distances["broadcast_buffers"].astype(bool)
        accuracies = pd.concat([frame["accuracy"] for frame in of_rank], axis=1)[~of_rank[0]["broadcast_buffers"]]
        weights = sum(tensor.nbytes for tensor in build_workload(self.trial, torch.device("cpu")).model.parameters())
        numbers = {
            "ranks": RANKS,
            "epochs": EPOCHS,
            "repeated_batches": without["batches"],
            "seen_without": without["seen"],
            "seen_with": with_epoch["seen"],
            "initial_bytes": self.sent_bytes["initial"],
            "gradient_bytes": self.sent_bytes["step False"],
            "buffer_bytes": self.sent_bytes["step True"] - self.sent_bytes["step False"],
            "model_bytes": weights,
            "weights_distance": distances["weights"].max(),
            "means_distance": distances.loc[alone, "means"].max(),
            "means_distance_sent": distances.loc[~alone, "means"].max(),
            "accuracy_range": (accuracies.max(axis=1) - accuracies.min(axis=1)).max(),
        }
        return {name: float(value) for name, value in numbers.items()}


def main() -> None:
    """Write the numbers to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path, help="JSON file to write")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, required=True)
    options = parser.parse_args()
    options.destination.write_text(json.dumps(collect(options.steps, options.seeds).numbers()))


def collect(steps: int, seeds: int) -> Evidence:
    """Measure: `steps` training steps in each of `seeds` runs, with and without communicated buffers."""
    trial = Trial(world_size=RANKS, batch_per_gpu=BATCH, learning_rate=0.1, momentum=0.0, weight_decay=0.0)
    trials = [trial.but(seed=seed, broadcast_buffers=broadcast) for seed in range(seeds) for broadcast in (True, False)]
    measured = on_ranks(_measure, [trial, trial.but(broadcast_buffers=False)], trials, steps)
    return Evidence(trial, repeats(), measured[0][0], [runs for _, runs in measured])


def repeats() -> pd.DataFrame:
    """Return what rank 0 of 2 and 4 sees again after its first epoch, with and without `set_epoch`, as shares 0 to 1.

    batches: batches of later epochs with the same samples as a batch of the first epoch. neighbours: pairs of
    consecutive samples that were already consecutive in the first epoch. seen: samples of the data set seen in all
    epochs.
    """
    rows = []
    length = 10_000
    for name, make in (("DistributedSampler", _distributed), ("this project's", _endless)):
        for ranks in (2, 4):
            for set_epoch in (False, True):
                epochs = make(length, ranks, set_epoch)
                first, later = epochs[0], [batch for epoch in epochs[1:] for batch in epoch]
                first_batches = set(map(frozenset, first))
                first_pairs = set(pairwise(index for batch in first for index in batch))
                later_pairs = list(pairwise(index for batch in later for index in batch))
                seen = {index for epoch in epochs for batch in epoch for index in batch}
                rows.append(
                    {
                        "sampler": name,
                        "ranks": ranks,
                        "set_epoch": "yes" if set_epoch else "no",
                        "batches": sum(frozenset(batch) in first_batches for batch in later) / len(later),
                        "neighbours": sum(pair in first_pairs for pair in later_pairs) / len(later_pairs),
                        "seen": len(seen) / length,
                    }
                )
    return pd.DataFrame(rows)


def _distributed(length: int, ranks: int, set_epoch: bool) -> list[Batches]:
    """Return rank 0's batches per epoch from PyTorch's sampler. Every epoch starts a new batch."""
    sampler: Any = DistributedSampler(range(length), ranks, 0, seed=0)  # type: ignore[arg-type]
    epochs = []
    for epoch in range(EPOCHS):
        if set_epoch:
            sampler.set_epoch(epoch)
        epochs.append(list(BatchSampler(sampler, BATCH, drop_last=False)))
    return epochs


def _endless(length: int, ranks: int, set_epoch: bool) -> list[Batches]:
    """Return rank 0's batches per epoch from this project's sampler. Batches continue across the end of an epoch."""
    batches = iter(RankSampler(Trial(batch_per_gpu=BATCH, world_size=ranks, set_epoch=set_epoch), length, 0))
    return [list(islice(batches, length // ranks // BATCH)) for _ in range(EPOCHS)]


def on_ranks(function: Any, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on each of `RANKS` ranks connected over gloo, and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, function, arguments), nprocs=RANKS)
        return [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(RANKS)]


def _rank(rank: int, folder: str, function: Any, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(function(*arguments), Path(folder, str(rank)))
    dist.destroy_process_group()


def _measure(
    sent: Sequence[Trial], trained: Sequence[Trial], steps: int
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return this rank's sent bytes and training runs. One start for both, since a rank imports torch for seconds."""
    return measure_sent_bytes(sent), _train(trained, steps)


def _build(trial: Trial) -> tuple[Workload, nn.Module, Any, Any]:
    """Return the trial's workload, wrapped model, training step, and this rank's batches."""
    context = build_context(trial, RankSetup(dist.get_rank(), torch.device("cpu")))
    model = context.strategy.wrap_model(context.workload.model.train(), trial, None)
    return (
        context.workload,
        model,
        training_step(context, model),
        endless_batches(trial, context.workload, context.rank),
    )


def measure_sent_bytes(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the bytes that this rank writes: to build DDP, and per step with and without buffers."""
    written: dict[str, float] = {}
    for trial in trials:
        torch.manual_seed(trial.seed)
        before = _written_bytes()
        _, _, step, batches = _build(trial)
        written["initial"] = _written_bytes() - before
        step(next(batches), lambda part: None)  # DDP rebuilds its buckets after the first step, and sends their layout
        step(next(batches), lambda part: None)
        before = _written_bytes()
        for batch in islice(batches, COUNTED_STEPS):
            step(batch, lambda part: None)
        written[f"step {trial.broadcast_buffers}"] = (_written_bytes() - before) / COUNTED_STEPS
    return written


def _written_bytes() -> int:
    """Return the bytes that this process has written with system calls (proc(5), /proc/PID/io)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def _train(trials: Sequence[Trial], steps: int) -> list[dict[str, float]]:
    """Return this rank's accuracy after `steps` steps per trial, and the distance of its tensors to rank 0's."""
    results = []
    for trial in trials:
        torch.manual_seed(trial.seed)
        workload, _, step, batches = _build(trial)
        for batch in islice(batches, steps):
            step(batch, lambda part: None)
        model = workload.model
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        results.append(
            {
                "seed": trial.seed,
                "broadcast_buffers": trial.broadcast_buffers,
                "weights": _distance_to_rank_0([parameter.detach() for parameter in model.parameters()]),
                "means": _distance_to_rank_0(
                    [norm.running_mean for norm in norms], [norm.running_var for norm in norms]
                ),
                "accuracy": _accuracy(workload, trial),
            }
        )
    return results


def _distance_to_rank_0(tensors: Sequence[Any], variances: Sequence[Any] | None = None) -> float:
    """Return the largest absolute difference to rank 0's tensors, in its standard deviations if variances are given."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    unit = torch.ones_like(flat) if variances is None else torch.cat([tensor.flatten() for tensor in variances]).sqrt()
    first = torch.stack([flat, unit])
    dist.broadcast(first, src=0)
    return float(((flat - first[0]).abs() / first[1].clamp_min(1e-12)).max())


@torch.no_grad()
def _accuracy(workload: Workload, trial: Trial) -> float:
    """Return the accuracy of this rank's copy of the model, with its own buffers, on the sample's test images."""
    images: Any = sample(trial, "test").dataset
    model = workload.model.eval()
    correct = 0
    for indices in torch.arange(len(images)).split(250):
        inputs, targets = images.__getitems__(indices.tolist())
        correct += int((model(workload.prepare(inputs)).argmax(dim=1) == targets).sum())
    return correct / len(images)


if __name__ == "__main__":
    main()
