"""Evidence for three questions of the study hpml-lab4, on CPU ranks of this host.

    python -m scripts.lab4_evidence docs/studies/hpml-lab4-evidence.md

1. What repeats across epochs where `set_epoch` is left out: from the samplers themselves, nothing is trained.
2. What DistributedDataParallel (DDP) sends: bytes by kind from the model's tensors, beside those that rank 0 wrote to its
   sockets meanwhile (Linux counts them for each process).
3. What becomes of the buffers of batch normalisation, and of each rank's accuracy, when only gradients are communicated.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path, help="Markdown file to write")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run of question 3")
    parser.add_argument("--seeds", type=int, default=3, help="runs of question 3 with and without communicated buffers")
    options = parser.parse_args()
    trial = Trial(world_size=RANKS, batch_per_gpu=BATCH, learning_rate=0.1, momentum=0.0, weight_decay=0.0)
    trials = [trial.but(seed=seed, broadcast_buffers=kept) for seed in range(options.seeds) for kept in (True, False)]
    sent = on_ranks(_sent, [trial, trial.but(broadcast_buffers=False)])
    trained = on_ranks(_trained, trials, options.steps)
    options.destination.write_text(page(trial, options.steps, repeats(), sent[0], trained))


def repeats() -> pd.DataFrame:
    """What rank 0 of 2 and 4 sees again after its first epoch, with and without `set_epoch`, as shares from 0 to 1.

    batches: of later epochs that held the same samples in the first one. neighbours: pairs of samples that followed each
    other already. seen: samples of the data set that the rank has seen after all epochs.
    """
    rows = []
    length = 10_000
    for name, make in (("DistributedSampler", _distributed), ("this project's", _endless)):
        for ranks in (2, 4):
            for kept in (False, True):
                epochs = make(length, ranks, kept)
                first, later = epochs[0], [batch for epoch in epochs[1:] for batch in epoch]
                known = set(map(frozenset, first))
                pairs = set(pairwise(index for batch in first for index in batch))
                again = list(pairwise(index for batch in later for index in batch))
                seen = {index for epoch in epochs for batch in epoch for index in batch}
                rows.append(
                    {
                        "sampler": name,
                        "ranks": ranks,
                        "set_epoch": "yes" if kept else "no",
                        "batches": sum(frozenset(batch) in known for batch in later) / len(later),
                        "neighbours": sum(pair in pairs for pair in again) / len(again),
                        "seen": len(seen) / length,
                    }
                )
    return pd.DataFrame(rows)


def _distributed(length: int, ranks: int, set_epoch: bool) -> list[Batches]:
    """Rank 0's batches of each epoch as PyTorch's own sampler gives them; each epoch begins a new batch."""
    sampler: Any = DistributedSampler(range(length), ranks, 0, seed=0)  # type: ignore[arg-type]
    epochs = []
    for epoch in range(EPOCHS):
        if set_epoch:
            sampler.set_epoch(epoch)
        epochs.append(list(BatchSampler(sampler, BATCH, drop_last=False)))
    return epochs


def _endless(length: int, ranks: int, set_epoch: bool) -> list[Batches]:
    """The same of this project's, whose batches run on across the end of an epoch."""
    batches = iter(RankSampler(Trial(batch_per_gpu=BATCH, world_size=ranks, set_epoch=set_epoch), length, 0))
    return [list(islice(batches, length // ranks // BATCH)) for _ in range(EPOCHS)]


def on_ranks(function: Any, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` gives on each of `RANKS` ranks that are connected over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, function, arguments), nprocs=RANKS)
        return [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(RANKS)]


def _rank(rank: int, folder: str, function: Any, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(function(*arguments), Path(folder, str(rank)))
    dist.destroy_process_group()


def _made(trial: Trial) -> tuple[Workload, nn.Module, Any, Any]:
    """The trial's workload, its model under its strategy, a step of training, and this rank's batches."""
    context = build_context(trial, RankSetup(dist.get_rank(), torch.device("cpu")))
    model = context.strategy.wrap_model(context.workload.model.train(), trial, None)
    return (
        context.workload,
        model,
        training_step(context, model),
        endless_batches(trial, context.workload, context.rank),
    )


def _sent(trials: Sequence[Trial]) -> dict[str, float]:
    """Bytes that this rank wrote to sockets and files: making DDP, and a step with and without buffers sent."""
    written: dict[str, float] = {}
    for trial in trials:
        torch.manual_seed(trial.seed)
        before = _written_bytes()
        _, _, step, batches = _made(trial)
        written["initial"] = _written_bytes() - before
        step(next(batches), lambda part: None)  # DDP settles its buckets after the first step, and tells all ranks
        step(next(batches), lambda part: None)
        before = _written_bytes()
        for batch in islice(batches, COUNTED_STEPS):
            step(batch, lambda part: None)
        written[f"step {trial.broadcast_buffers}"] = (_written_bytes() - before) / COUNTED_STEPS
    return written


def _written_bytes() -> int:
    """What this process has written by system calls (proc(5), /proc/PID/io)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def _trained(trials: Sequence[Trial], steps: int) -> list[dict[str, float]]:
    """For each trial this rank's accuracy after so many steps, and how far its weights and buffers are from rank 0's."""
    found = []
    for trial in trials:
        torch.manual_seed(trial.seed)
        workload, _, step, batches = _made(trial)
        for batch in islice(batches, steps):
            step(batch, lambda part: None)
        model = workload.model
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        found.append(
            {
                "seed": trial.seed,
                "broadcast_buffers": trial.broadcast_buffers,
                "weights": _apart([parameter.detach() for parameter in model.parameters()]),
                "means": _apart([norm.running_mean for norm in norms], [norm.running_var for norm in norms]),
                "accuracy": _accuracy(workload, trial),
            }
        )
    return found


def _apart(mine: Sequence[Any], variances: Sequence[Any] | None = None) -> float:
    """Largest distance of any of these numbers from rank 0's, in rank 0's standard deviations where variances are given."""
    flat = torch.cat([tensor.flatten() for tensor in mine])
    unit = torch.ones_like(flat) if variances is None else torch.cat([tensor.flatten() for tensor in variances]).sqrt()
    first = torch.stack([flat, unit])
    dist.broadcast(first, src=0)
    return float(((flat - first[0]).abs() / first[1].clamp_min(1e-12)).max())


@torch.no_grad()
def _accuracy(workload: Workload, trial: Trial) -> float:
    """Share of the shipped sample's test images that this rank's copy of the model, with its own buffers, gets right."""
    images: Any = sample(trial, "test").dataset
    model = workload.model.eval()
    right = 0
    for indices in torch.arange(len(images)).split(250):
        inputs, targets = images.__getitems__(indices.tolist())
        right += int((model(workload.prepare(inputs)).argmax(dim=1) == targets).sum())
    return right / len(images)


def page(
    trial: Trial, steps: int, again: pd.DataFrame, sent: dict[str, float], trained: Sequence[Sequence[dict[str, float]]]
) -> str:
    """The three answers as Markdown. sent: rank 0's bytes (`_sent`). trained: by rank, then by trial (`_trained`)."""
    percent = again.assign(**{name: again[name].map("{:.1%}".format) for name in ("batches", "neighbours", "seen")})
    percent = percent.rename(
        columns={"batches": "batches of later epochs that repeat", "neighbours": "neighbours that repeat", "seen": f"data seen after {EPOCHS} epochs"}
    )  # fmt: skip
    parts = {
        "": f"    python -m scripts.lab4_evidence docs/studies/hpml-lab4-evidence.md --steps {steps} --seeds {len(trained[0]) // 2}\n\n"
        f"{RANKS} CPU ranks over gloo, torch {torch.__version__.partition('+')[0]}; {trial.model} on the shipped Fashion-MNIST "
        f"sample, batch {BATCH} a rank, plain SGD with learning rate {trial.learning_rate:g}.",
        "## What repeats across epochs without `set_epoch`": f"10,000 samples, batch {BATCH} a rank, rank 0's batches of {EPOCHS} epochs, computed from the samplers.\n\n"
        f"{percent.to_markdown(index=False)}\n\n"
        "Without `set_epoch` PyTorch's sampler gives each rank the same batches in the same order in every epoch, and a rank "
        "never sees what the others train on. This project's batches run on across the end of an epoch, so there the same "
        "samples follow each other, cut into batches at other places.",
        "## What is sent, by kind": f"{_sent_table(trial, sent).to_markdown(index=False, floatfmt='.2f')}\n\n"
        "Of the model: bytes of its parameters, gradients and buffers, times 2(N-1)/N for the all-reduce of the gradients "
        "(a ring), once for what rank 0 broadcasts, here to one other rank. Written by rank 0: what its process gave to "
        f"system calls, messages' heads and DDP's own checks included, the mean of {COUNTED_STEPS} steps. Buffers are "
        "measured as the difference between steps with and without `broadcast_buffers`.",
        "## When only gradients are communicated": f"{_trained_table(trained).to_markdown(index=False, floatfmt=('', '', '.2g', '.3f', '.1f', '.1f'))}\n\n"
        f"After {steps} steps. Gradients alone keep the weights equal on all ranks. The running means of batch normalisation "
        "are then each rank's own, from its own share of the data; with `broadcast_buffers` rank 0's go to all before each "
        "forward pass, and ranks differ by their last batch only. Distance: the largest of any channel, in rank 0's running "
        "standard deviations. Accuracy: each rank's copy, with its own buffers, on the sample's 2,000 test images; "
        "rank 0's is the same either way, for nobody sends it buffers.",
    }  # fmt: skip
    return (
        "\n\n".join(
            ["# hpml-lab4: evidence for its questions", *(part for pair in parts.items() for part in pair if part)]
        )
        + "\n"
    )


def _sent_table(trial: Trial, sent: dict[str, float]) -> pd.DataFrame:
    model = build_workload(trial, torch.device("cpu")).model
    weights = sum(tensor.nbytes for tensor in model.parameters())
    buffers = sum(tensor.nbytes for tensor in model.buffers())
    rows = [
        ("initial parameters and buffers", "once", weights + buffers, sent["initial"]),
        ("gradients", "each step", weights * 2 * (RANKS - 1) / RANKS, sent["step False"]),
        ("buffers", "each step", buffers, sent["step True"] - sent["step False"]),
    ]
    frame = pd.DataFrame(rows, columns=["kind", "when", "of the model (MB)", "written by rank 0 (MB)"])
    return frame.assign(**{name: frame[name] / 1e6 for name in frame.columns[2:]})


def _trained_table(trained: Sequence[Sequence[dict[str, float]]]) -> pd.DataFrame:
    rows = [
        {
            "buffers communicated": "yes" if of_ranks[0]["broadcast_buffers"] else "no",
            "seed": int(of_ranks[0]["seed"]),
            "weights apart": max(one["weights"] for one in of_ranks),
            "running means apart (std)": max(one["means"] for one in of_ranks),
            **{f"accuracy of rank {rank} (%)": 100 * one["accuracy"] for rank, one in enumerate(of_ranks)},
        }
        for of_ranks in zip(*trained, strict=True)
    ]
    return pd.DataFrame(rows).sort_values(["buffers communicated", "seed"], ascending=[False, True])


if __name__ == "__main__":
    main()
