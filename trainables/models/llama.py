"""Llama 3 (Grattafiori et al. 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783).

Pre-norm blocks without biases: RMS normalisation, rotary positions, grouped-query attention, SwiGLU. Rotary frequencies
are those of Llama 3, without the scaling for contexts beyond 8,192 tokens. Input tokens [n, t] with t <=
`trial.sequence_length`, output logits [n, t, vocabulary], or the loss if following tokens are given. Attention is
causal.
"""

import torch
from torch import nn
from torch.nn import functional

from trainables.models.fused_loss import fused_loss
from trainables.trial import Trial

NORM_EPSILON = 1e-5
ROTARY_BASE = 500_000.0


def llama_1b(vocabulary: int, trial: Trial) -> nn.Module:
    """Create the shape of Llama 3.2 1B: 16 blocks of width 2,048, 1.24 billion weights, tied embeddings."""
    return Llama(vocabulary, trial.sequence_length, 2048, heads=32, groups=8, inner=8192, blocks=16, tied=True)


def llama_8b(vocabulary: int, trial: Trial) -> nn.Module:
    """Create the shape of Llama 3.1 8B: 32 blocks of width 4,096, 8.03 billion weights."""
    return Llama(vocabulary, trial.sequence_length, 4096, heads=32, groups=8, inner=14336, blocks=32, tied=False)


def llama_tiny(vocabulary: int, trial: Trial) -> nn.Module:
    """Create a model for tests, with 2 blocks of width 32, 4 heads and 2 groups."""
    return Llama(vocabulary, trial.sequence_length, 32, heads=4, groups=2, inner=64, blocks=2, tied=True)


class Llama(nn.Module):
    """Token embedding, blocks, RMS normalisation, output layer. groups: key and value heads. tied: one embedding."""

    def __init__(
        self, vocabulary: int, context: int, width: int, heads: int, groups: int, inner: int, blocks: int, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, inner) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.angles = rotary_angles(context, width // heads)  # not buffers, which DDP would broadcast at every step
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens [n, t] to logits [n, t, vocabulary]; with `targets` [n, t], to their mean cross entropy."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens.int())
        cosine, sine = (values[:length].to(hidden) for values in self.angles)
        for block in self.blocks:
            hidden = block(hidden, cosine, sine)
        hidden = self.norm(hidden)
        return self.head(hidden) if targets is None else fused_loss(hidden, self.head.weight, targets)


class Block(nn.Module):
    """Causal grouped-query attention, then a SwiGLU perceptron, both with residual connections."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.head_width, bias=False)
        self.value = nn.Linear(width, groups * self.head_width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape. cosine, sine: [t, head width]."""
        attended = self.attention_norm(hidden)
        query, key, value = (
            layer(attended).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        inner = self.perceptron_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(inner)) * self.up(inner))


def rotary_angles(context: int, head_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotation of each pair of a head's elements: float32 [context, head_width] each.

    Element i is paired with element i + head_width / 2 (Su et al. 2021, https://arxiv.org/abs/2104.09864).
    """
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [n, heads, t, head width] by the angles of their positions."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine
