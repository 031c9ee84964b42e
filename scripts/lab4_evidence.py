"""Write the page of evidence for three questions of the study hpml-lab4, measured on CPU ranks of this host.

    python -m scripts.lab4_evidence docs/studies/hpml-lab4-evidence.md

`run hpml-lab4` collects the same evidence by itself; `--results` adds it to results that lack it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from study.store.store import Store
from study.studies.lab_evidence import BATCH, COUNTED_STEPS, EPOCHS, RANKS, Evidence, collect
from trainables.build import build_workload
from trainables.trial import Trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path, help="Markdown file to write")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run of question 3")
    parser.add_argument("--seeds", type=int, default=3, help="runs of question 3 with and without communicated buffers")
    parser.add_argument("--results", type=Path, help="results folder of the lab, whose report then answers from it")
    options = parser.parse_args()
    found = collect(options.steps, options.seeds)
    options.destination.write_text(page(found, options.steps))
    if options.results:
        Store.at(str(options.results)).set_entry("evidence", found.numbers())


def page(found: Evidence, steps: int) -> str:
    """Return the three answers as Markdown. steps: of each run of the third question."""
    trial, repeated, sent_bytes, runs = found.trial, found.repeated, found.sent_bytes, found.runs
    command = f"python -m scripts.lab4_evidence docs/studies/hpml-lab4-evidence.md --steps {steps} --seeds"
    parts = [
        "# hpml-lab4: evidence for its questions",
        f"    {command} {len(runs[0]) // 2}",
        f"{RANKS} CPU ranks over gloo, torch {torch.__version__.partition('+')[0]}; {trial.model} on the shipped "
        f"Fashion-MNIST sample, batch {BATCH} per rank, plain SGD with learning rate {trial.learning_rate:g}.",
        "## What repeats across epochs without `set_epoch`",
        f"10,000 samples, batch {BATCH} per rank, rank 0's batches of {EPOCHS} epochs, computed from the samplers.",
        _repeats_table(repeated).to_markdown(index=False),
        "Without `set_epoch`, PyTorch's sampler gives each rank the same batches in the same order in every epoch, and "
        "a rank never sees the samples of the others. In this project, batches continue across the end of an epoch. So "
        "the order of the samples repeats, but the batches start at different samples.",
        "## What is sent, by kind",
        _sent_table(trial, sent_bytes).to_markdown(index=False, floatfmt=".2f"),
        "Of the model: bytes of its parameters, gradients and buffers; times 2(N-1)/N for the all-reduce of the "
        "gradients (a ring), and once for broadcasts of rank 0, which has one other rank here. Written by rank 0: the "
        "bytes that its process passed to system calls, including message headers and DDP's own checks; mean of "
        f"{COUNTED_STEPS} steps. Buffers are the difference between steps with and without `broadcast_buffers`.",
        "## When only gradients are communicated",
        _runs_table(runs).to_markdown(index=False, floatfmt=("", "", ".2g", ".3f", ".1f", ".1f")),
        f"After {steps} steps. Gradients alone keep the weights equal on all ranks. The running means of batch "
        "normalisation then differ, because each rank computes them from its share of the data. With "
        "`broadcast_buffers`, rank 0 sends its own before each forward pass, so ranks differ only by their last batch. "
        "Distance: the largest of any channel, in rank 0's running standard deviations. Accuracy: each rank's copy, "
        "with its own buffers, on the sample's 2,000 test images. Rank 0's accuracy is the same either way, because it "
        "receives no buffers.",
    ]
    return "\n\n".join(parts) + "\n"


def _repeats_table(repeated: pd.DataFrame) -> pd.DataFrame:
    columns = {
        "batches": "batches of later epochs that repeat",
        "neighbours": "neighbours that repeat",
        "seen": f"data seen after {EPOCHS} epochs",
    }
    return repeated.assign(**{name: repeated[name].map("{:.1%}".format) for name in columns}).rename(columns=columns)


def _sent_table(trial: Trial, sent_bytes: dict[str, float]) -> pd.DataFrame:
    model = build_workload(trial, torch.device("cpu")).model
    weights = sum(tensor.nbytes for tensor in model.parameters())
    buffers = sum(tensor.nbytes for tensor in model.buffers())
    rows = [
        ("initial parameters and buffers", "once", weights + buffers, sent_bytes["initial"]),
        ("gradients", "each step", weights * 2 * (RANKS - 1) / RANKS, sent_bytes["step False"]),
        ("buffers", "each step", buffers, sent_bytes["step True"] - sent_bytes["step False"]),
    ]
    frame = pd.DataFrame(rows, columns=["kind", "when", "of the model (MB)", "written by rank 0 (MB)"])
    return frame.assign(**{name: frame[name] / 1e6 for name in frame.columns[2:]})


def _runs_table(runs: Sequence[Sequence[dict[str, float]]]) -> pd.DataFrame:
    rows = [
        {
            "buffers communicated": "yes" if ranks[0]["broadcast_buffers"] else "no",
            "seed": int(ranks[0]["seed"]),
            "distance of weights": max(result["weights"] for result in ranks),
            "distance of running means (std)": max(result["means"] for result in ranks),
            **{f"accuracy of rank {rank} (%)": 100 * result["accuracy"] for rank, result in enumerate(ranks)},
        }
        for ranks in zip(*runs, strict=True)
    ]
    return pd.DataFrame(rows).sort_values(["buffers communicated", "seed"], ascending=[False, True])


if __name__ == "__main__":
    main()
