"""Trials that take a moment."""

from typing import Any

from trainables.trial import Trial

QUICK: dict[str, Any] = {
    "model": "mlp",
    "steps": 3,
    "warmup_steps": 2,
    "prefetch_batches": 1,
    "communication_steps": 2,
    "sweep_bytes": 2**12,
}


def quick_trial(**fields: Any) -> Trial:
    """Return a trial of the mlp on the shipped sample with few steps."""
    return Trial(**{**QUICK, **fields})


def quick_pair(**fields: Any) -> Trial:
    """Return a quick trial of two ranks, with 8 samples each."""
    return quick_trial(**{"world_size": 2, "batch_per_gpu": 8, **fields})


def text_trial(**fields: Any) -> Trial:
    """Return a trial of the smallest recurrent model on the shipped text."""
    return Trial(**{"model": "mlstm64", "dataset": "text_sample", "batch_per_gpu": 4, "sequence_length": 16} | fields)
