"""Count correct predictions (top-1 and top-5)."""

import torch

TOP = 5


IMAGE_PIXELS = 32 * 32


SMALL_IMAGES = 512
"""a batch of validation has as many pixels as so many images of 32 x 32, or the trial's own number of samples"""


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many samples have their class among the first 1 and 5 outputs: float64 [2].

    Of equal outputs the one of the lower class comes first, as argmax takes it; outputs that are not numbers are never
    right. outputs [n, classes], targets int64 [n]. Waits for nothing.
    """
    own = outputs.gather(1, targets[:, None])
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    behind = (outputs < own) | ((outputs == own) & (classes >= targets[:, None]))
    before = (~behind).sum(1)
    return torch.stack([(before < 1).sum(), (before < TOP).sum()]).double()


def countable(outputs: object, targets: object) -> bool:
    """Whether these are class scores [n, classes] and class numbers [n]."""
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and len(outputs) == len(targets)
        and targets.dtype == torch.int64
    )


def sample_count(targets: object) -> int:
    """Samples of a batch, from its targets."""
    while not isinstance(targets, torch.Tensor):
        targets = next(iter(targets.values())) if isinstance(targets, dict) else targets[0]  # type: ignore[index]
    return len(targets)
