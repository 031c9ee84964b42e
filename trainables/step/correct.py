"""Count correct predictions (top-1 and top-5)."""

import torch

TOP_K = 5


def count_correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the number of samples whose class is among the 1 and `TOP_K` highest outputs: float64 [2].

    Of equal outputs, the lower class ranks first, as in argmax. NaN outputs never count as correct.
    outputs [n, classes], targets int64 [n]. Does not synchronise with the device.
    """
    target_scores = outputs.gather(1, targets[:, None])
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    ranked_behind = (outputs < target_scores) | ((outputs == target_scores) & (classes >= targets[:, None]))
    ranked_before = (~ranked_behind).sum(1)
    return torch.stack([(ranked_before < 1).sum(), (ranked_before < TOP_K).sum()]).double()


def are_class_scores(outputs: object, targets: object) -> bool:
    """Return True for class scores [n, classes] and class indices int64 [n]."""
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and len(outputs) == len(targets)
        and targets.dtype == torch.int64
    )
