"""The zoo's own models, written the way their users write them: a small language model, and a U-Net.

Labels are already shifted; both return their mean cross-entropy.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """GPT-2's attention: one projection for queries, keys and values, dropout on the weights."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class MiniGPTBlock(nn.Module):
    """Attention and a two-layer perceptron, each normalised first and added to what came in."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.projection = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.projection(F.gelu(self.up(self.mlp_norm(x)))))


class MiniGPT(nn.Module):
    """GPT-2 with learned positions, dropout, and the head tied to the embedding."""

    def __init__(
        self,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        vocabulary: int = 10_000,
        positions: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(MiniGPTBlock(width, heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # The variance of the residual stream must not grow with depth.
                scale = 1 / math.sqrt(2 * layers) if name.endswith("projection") else 1.0
                nn.init.normal_(module.weight, std=0.02 * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def double_convolution(incoming: int, outgoing: int) -> nn.Sequential:
    """Return two 3x3 convolutions, each normalised over the batch and rectified."""
    layers: list[nn.Module] = []
    for width in (incoming, outgoing):
        convolution = nn.Conv2d(width, outgoing, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outgoing), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger, Fischer and Brox's network of 2015, padded, with batch normalisation."""

    def __init__(self, levels: int = 4, width: int = 64, classes: int = 21) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem = double_convolution(3, width)
        self.down = nn.ModuleList(double_convolution(a, b) for a, b in itertools.pairwise(widths))
        upwards = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in upwards)
        self.up = nn.ModuleList(double_convolution(2 * b, b) for _, b in upwards)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        skips = [self.stem(pixel_values)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat((skips.pop(), enlarge(x)), dim=1))
        return F.cross_entropy(self.head(x), labels)
