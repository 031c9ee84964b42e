"""A GPT-style decoder over bytes (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Pre-norm, learned positions, no biases in linear layers. Input tokens [n, t] with t <= `trial.sequence_length`, output
logits [n, t, vocabulary]. Attention is causal.
"""

import torch
from torch import nn

from trainables.models.gpt2 import Block
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
        self.blocks = nn.ModuleList(Block(width, heads, bias=False, gelu="none") for _ in range(blocks))
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
