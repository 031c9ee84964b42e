"""A GPT-style decoder over bytes (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Pre-norm, learned positions, no biases in linear layers. Input tokens [n, t] with t <= `trial.sequence_length`, output
logits [n, t, vocabulary]. Attention is causal.
"""

import torch
from torch import nn
from torch.nn import functional

from trainables.trial import Trial


def transformer(vocabulary: int, trial: Trial) -> nn.Module:
    """Create a decoder with 8 blocks of width 512 and 8 heads: 25 million weights."""
    return Decoder(vocabulary, trial.sequence_length, width=512, heads=8, blocks=8)


def transformer_tiny(vocabulary: int, trial: Trial) -> nn.Module:
    """Create a decoder for tests, with 2 blocks of width 32 and 2 heads."""
    return Decoder(vocabulary, trial.sequence_length, width=32, heads=2, blocks=2)


class Decoder(nn.Module):
    """Token and position embeddings, blocks, layer normalisation, linear layer."""

    def __init__(self, vocabulary: int, longest: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)  # as GPT-2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map integer tokens [n, t] to logits [n, t, vocabulary]."""
        hidden = self.tokens(tokens.int()) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Block(nn.Module):
    """Causal attention, then a perceptron of four times the width, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width, bias=False)
        self.perceptron_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        projected = self.attention_in(self.attention_norm(hidden))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [n, heads, t, d]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.perceptron_in(self.perceptron_norm(hidden)))
        return hidden + self.perceptron_out(inner)
