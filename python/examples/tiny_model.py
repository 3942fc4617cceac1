"""A transformer of one layer, small enough for a CPU."""

import torch
from torch import nn
from torch.nn import functional


class TinyGPT(nn.Module):
    """Logits of the next tokens: int64 ``[batch, length]`` to ``[batch, length, vocab]``."""

    def __init__(self, vocab_size: int = 50257, length: int = 64, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)
        self.attention = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        query, key, value = self.attention(hidden).chunk(3, dim=-1)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(self.norm(hidden + self.mlp(hidden)))


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy; labels are int64 ``[batch, length]``, -100 counts nowhere."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
