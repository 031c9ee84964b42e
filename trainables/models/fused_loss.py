"""The output layer of a language model and its cross entropy in one operation, without the logits of all tokens.

Logits are computed for a few thousand tokens at a time, and their gradient right after them, as in Hsu et al. 2024
("Liger Kernel", https://arxiv.org/abs/2410.10989, section 3). Neither is stored for the backward pass.
"""

from typing import Any

import torch

CHUNK_TOKENS = 8192
"""tokens whose logits exist at the same time"""


def fused_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats of `hidden @ weight.T`, without further gradients of its gradients.

    hidden: [n, t, width]. weight: [vocabulary, width]. targets: token ids [n, t]. Products are computed in the type of
    autocast, sums over the vocabulary in fp32.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    mean: torch.Tensor = _FusedLoss.apply(hidden.flatten(0, 1).to(dtype), weight, targets.flatten().long())
    return mean


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the tokens [n, width], and keep the gradients of their summed loss."""
        matrix = weight.to(hidden.dtype)
        losses, hidden_gradients = [], []
        weight_gradient = None
        for rows, ids in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            loss, gradient = _with_gradient(rows @ matrix.t(), ids)
            losses.append(loss)
            hidden_gradients.append(gradient @ matrix)
            product = (gradient.t() @ rows).float()
            weight_gradient = product if weight_gradient is None else weight_gradient + product
        ctx.save_for_backward(torch.cat(hidden_gradients), weight_gradient)
        ctx.dtype = weight.dtype
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        scale = gradient / len(of_hidden)  # here rather than in `forward`, where fp16 would lose small gradients
        return (of_hidden * scale).to(of_hidden.dtype), (of_weight * scale).to(ctx.dtype), None


def _with_gradient(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy of logits [n, vocabulary], and its gradient in the type of the logits."""
    shifted = logits.float()
    shifted = shifted - shifted.amax(1, keepdim=True)
    powers = shifted.exp()
    total = powers.sum(1, keepdim=True)
    column = ids.unsqueeze(1)
    loss = (total.log() - shifted.gather(1, column)).sum()
    is_target = torch.arange(logits.shape[1], device=ids.device) == column
    return loss, (powers / total - is_target.float()).to(logits.dtype)
