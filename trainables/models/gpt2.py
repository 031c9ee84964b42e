"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Pre-norm blocks with biases, learned positions, tanh GELU, and one matrix for token embedding and output. Without
dropout. Input tokens [n, t] with t <= `trial.sequence_length`, output logits [n, t, vocabulary], or the loss if
following tokens are given. Attention is causal.
"""

import torch
from torch import nn
from torch.nn import functional

from trainables.models.fused_loss import fused_loss
from trainables.trial import Trial

CONTEXT = 1024
"""Positions of the published models; a longer `sequence_length` gets as many as it needs."""


def gpt2(vocabulary: int, trial: Trial) -> nn.Module:
    """Create the model with 12 blocks of width 768 and 12 heads: 124 million weights."""
    return GPT2(vocabulary, max(CONTEXT, trial.sequence_length), width=768, heads=12, blocks=12)


def gpt2_medium(vocabulary: int, trial: Trial) -> nn.Module:
    """Create the model with 24 blocks of width 1,024 and 16 heads: 355 million weights."""
    return GPT2(vocabulary, max(CONTEXT, trial.sequence_length), width=1024, heads=16, blocks=24)


def gpt2_tiny(vocabulary: int, trial: Trial) -> nn.Module:
    """Create a model for tests, with 2 blocks of width 32 and 2 heads."""
    return GPT2(vocabulary, trial.sequence_length, width=32, heads=2, blocks=2)


class GPT2(nn.Module):
    """Token and position embeddings, blocks, layer normalisation, and the token embedding as the output layer."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # residual branches are smaller, so that the sum of all blocks starts with the scale of one
                branches = 2 * blocks if name.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=0.02 / branches**0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens [n, t] to logits [n, t, vocabulary]; with `targets` [n, t], to their mean cross entropy."""
        hidden = self.tokens(tokens.int()) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden) if targets is None else fused_loss(hidden, self.head.weight, targets)


class Block(nn.Module):
    """Causal attention, then a perceptron of four times the width, both with residual connections.

    bias: linear layers have biases. gelu: approximation of GELU, "tanh" or "none".
    """

    def __init__(self, width: int, heads: int, bias: bool = True, gelu: str = "tanh") -> None:
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width, bias=bias)
        self.perceptron_out = nn.Linear(4 * width, width, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        projected = self.attention_in(self.attention_norm(hidden))
        # each [n, heads, t, d]; by chunks, because eager mode copies the gradient of a permutation of all three twice
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.perceptron_in(self.perceptron_norm(hidden)), approximate=self.gelu)
        return hidden + self.perceptron_out(inner)
