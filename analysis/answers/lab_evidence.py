"""Answers of hpml-lab4 from its evidence: what `set_epoch` does, what DDP sends, and gradients without buffers."""

from collections.abc import Mapping

from analysis.answers.reply import Missing, Reply, points
from analysis.predict.inputs import ReportInputs
from analysis.text import number

MB = 1e6
_COMMAND = "python -m scripts.lab4_evidence PAGE.md --results DIR"
_MISSING = Missing("the evidence, which no GPU is needed for, was not collected with these results", command=_COMMAND)


def _evidence(inputs: ReportInputs, *names: str) -> Mapping[str, float] | None:
    found = inputs.record.evidence
    return found if all(name in found for name in names) else None


def set_epoch(inputs: ReportInputs) -> Reply | Missing:
    """State what repeats without `set_epoch`."""
    found = _evidence(inputs, "ranks", "epochs", "repeated_batches", "seen_without", "seen_with")
    if found is None:
        return _MISSING
    return Reply(
        f"Without set_epoch, PyTorch's sampler repeats {points(found['repeated_batches'])} of the batches of the first "
        f"epoch, so a rank of {number(found['ranks'], 0)} sees {points(found['seen_without'])} of the data in "
        f"{number(found['epochs'], 0)} epochs; with it {points(found['seen_with'])}, because the epoch seeds the "
        "shuffle. This is computed from the samplers, without noise.",
        {name: found[name] for name in ("repeated_batches", "seen_without", "seen_with")},
        "seed",
    )


def sent(inputs: ReportInputs) -> Reply | Missing:
    """State what DDP sends, once and per step."""
    found = _evidence(inputs, "initial_bytes", "gradient_bytes", "buffer_bytes", "model_bytes")
    if found is None:
        return _MISSING
    return Reply(
        f"Once, all parameters and buffers ({number(found['initial_bytes'] / MB, 2)} MB); in each step the gradients "
        f"({number(found['gradient_bytes'] / MB, 2)} MB, {number(found['gradient_bytes'] / found['model_bytes'], 3)} "
        f"times the parameters) and the buffers of batch normalisation ({number(found['buffer_bytes'] / MB, 2)} MB). "
        "These are the bytes that rank 0 of 2 wrote, mean of the counted steps.",
        {name: found[name] for name in ("initial_bytes", "gradient_bytes", "buffer_bytes")},
        "bytes",
    )


def gradients_only(inputs: ReportInputs) -> Reply | Missing:
    """State whether communicating gradients alone keeps ranks equal."""
    found = _evidence(inputs, "weights_distance", "means_distance", "means_distance_sent", "accuracy_range")
    if found is None:
        return _MISSING
    equal = found["weights_distance"] == 0
    return Reply(
        f"{'Yes for the weights' if equal else 'No'}: they differ by {found['weights_distance']:.2g} between ranks, "
        "because all start equal and apply the same averaged gradients. No for the running means of batch "
        f"normalisation: they differ by up to {number(found['means_distance'], 3)} standard deviations "
        f"({number(found['means_distance_sent'], 3)} if rank 0 sends its own), and the ranks' accuracies by up to "
        f"{number(100 * found['accuracy_range'], 1)} points.",
        {name: found[name] for name in ("weights_distance", "means_distance", "accuracy_range")},
        "buffers",
    )
