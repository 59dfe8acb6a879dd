"""Language models as the engines write them: GPT as Megatron-LM had it in 2021, Llama as torchtitan has it.

Only sizes matter; nothing of these is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Published sizes of a model."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    hidden: int | None = None
    """Of the perceptron; four times the width if nothing is said."""
    is_llama: bool = False
    """Gated perceptron, rotary positions, RMS norms and fused attention; otherwise as GPT, its attention not fused."""

    @property
    def layer_parameters(self) -> int:
        """Of one layer's products."""
        keys = (self.key_value_heads or self.heads) * (self.width // self.heads)
        hidden = self.hidden or 4 * self.width
        return self.width * (2 * self.width + 2 * keys) + (3 if self.is_llama else 2) * self.width * hidden

    def flops_per_token(self, length: int) -> float:
        """Return forward and backward, attention in full: six for each parameter, twelve for each pair and width."""
        products = self.layers * self.layer_parameters + self.width * self.vocabulary
        return 6 * products + 12 * self.layers * self.width * length


LLAMA_8B = Sizes(width=4096, layers=32, heads=32, key_value_heads=8, hidden=14336, vocabulary=128256, is_llama=True)
LLAMA_70B = Sizes(width=8192, layers=80, heads=64, key_value_heads=8, hidden=28672, vocabulary=128256, is_llama=True)
LLAMA_405B = Sizes(
    width=16384, layers=126, heads=128, key_value_heads=8, hidden=53248, vocabulary=128256, is_llama=True
)
"""Llama 3.1, as published."""


class Attention(nn.Module):
    """Attention of every token with those before it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.pairs = sizes.heads, sizes.key_value_heads or sizes.heads
        self.size = sizes.width // sizes.heads
        self.is_llama = sizes.is_llama
        self.q = nn.Linear(sizes.width, self.heads * self.size, bias=not sizes.is_llama)
        self.k = nn.Linear(sizes.width, self.pairs * self.size, bias=not sizes.is_llama)
        self.v = nn.Linear(sizes.width, self.pairs * self.size, bias=not sizes.is_llama)
        self.o = nn.Linear(self.heads * self.size, sizes.width, bias=not sizes.is_llama)

    def forward(self, x: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        """Return what each token takes from those before it."""
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size)
        k = self.k(x).view(batch, length, self.pairs, self.size)
        v = self.v(x).view(batch, length, self.pairs, self.size).transpose(1, 2)
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.is_llama:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.pairs
            )
        else:
            scores = functional.softmax(q @ k.transpose(2, 3), dim=-1)
            mixed = functional.dropout(scores, 0.1) @ v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.size))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn pairs of numbers by the angles of their positions."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = turns[0], turns[1]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.RMSNorm if sizes.is_llama else nn.LayerNorm
        hidden = sizes.hidden or 4 * sizes.width
        self.is_llama = sizes.is_llama
        self.norm1, self.norm2 = norm(sizes.width), norm(sizes.width)
        self.attention = Attention(sizes)
        self.up = nn.Linear(sizes.width, hidden, bias=not sizes.is_llama)
        self.gate = nn.Linear(sizes.width, hidden, bias=False) if sizes.is_llama else nn.Identity()
        self.down = nn.Linear(hidden, sizes.width, bias=not sizes.is_llama)

    def forward(self, x: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output."""
        x = x + self._dropped(self.attention(self.norm1(x), turns))
        h = self.norm2(x)
        hidden = functional.silu(self.gate(h)) * self.up(h) if self.is_llama else functional.gelu(self.up(h))
        return x + self._dropped(self.down(hidden))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_llama else functional.dropout(x, 0.1)


class LanguageModel(nn.Module):
    """Token ids in, the loss of the next ones out."""

    def __init__(self, sizes: Sizes, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(layers))
        self.norm: nn.Module = nn.RMSNorm(sizes.width) if sizes.is_llama else nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        turns = torch.empty(2, length, 1, sizes.width // sizes.heads // 2, dtype=self.head.weight.dtype)
        self.register_buffer("turns", turns if sizes.is_llama else None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def llama3_70b(layers: int = LLAMA_70B.layers, seq_len: int = 8192) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return Llama 3 70B with one sample, for ``what-if --model benchmarks/split_models.py:llama3_70b --layers 80``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LanguageModel(LLAMA_70B, layers, seq_len), (torch.zeros(1, seq_len, dtype=torch.int64),)
    finally:
        torch.set_default_dtype(before)
