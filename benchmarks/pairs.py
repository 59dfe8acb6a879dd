"""Networks of many small operations on pairs: an Evoformer (AlphaFold 2) and a graph transformer with edge features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.zoo import ZooModel


class _Attention(nn.Module):
    """Gated attention within rows, with a bias from pairs."""

    def __init__(self, width: int, heads: int = 4, pair_width: int = 0) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.projected = nn.Linear(width, 3 * width, bias=False)
        self.gate, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.bias = nn.Linear(pair_width, heads) if pair_width else None

    def forward(self, x: Tensor, pairs: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        rows, length, width = x.shape
        parts = self.projected(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        if self.bias is not None and pairs is not None:
            scores = scores + self.bias(pairs).permute(2, 0, 1)
        mixed = (torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(rows, length, width)
        return self.output(torch.sigmoid(self.gate(x)) * mixed)


class _Triangle(nn.Module):
    """Updates an edge of pairs by the two others of every triangle."""

    def __init__(self, width: int, equation: str) -> None:
        super().__init__()
        self.equation, self.norm, self.then = equation, nn.LayerNorm(width), nn.LayerNorm(width)
        self.gated = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, pairs: Tensor) -> Tensor:
        pairs = self.norm(pairs)
        left_gate, left, right_gate, right, gate, output = self.gated
        one, other = (torch.sigmoid(g(pairs)) * f(pairs) for g, f in ((left_gate, left), (right_gate, right)))
        return torch.sigmoid(gate(pairs)) * output(self.then(torch.einsum(self.equation, one, other)))


def _transition(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class _EvoformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows, self.columns = _Attention(width, pair_width=width), _Attention(width)
        self.norm, self.outer = nn.LayerNorm(width), nn.ModuleList(nn.Linear(width, 16) for _ in range(2))
        self.to_pairs = nn.Linear(256, width)
        self.outgoing, self.incoming = _Triangle(width, "ikc,jkc->ijc"), _Triangle(width, "kic,kjc->ijc")
        self.starting, self.ending = (_Attention(width, pair_width=width) for _ in range(2))
        self.sequences, self.pairs = _transition(width), _transition(width)

    def forward(self, sequences: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        sequences = sequences + functional.dropout(self.rows(sequences, pairs), 0.15, self.training)
        sequences = sequences + self.columns(sequences.transpose(0, 1)).transpose(0, 1)
        sequences = sequences + self.sequences(sequences)
        one, other = (linear(self.norm(sequences)) for linear in self.outer)
        products = torch.einsum("sic,sjd->ijcd", one, other).flatten(2) / len(sequences)
        pairs = pairs + self.to_pairs(products)
        for update in (self.outgoing, self.incoming):
            pairs = pairs + update(pairs)
        pairs = pairs + self.starting(pairs, pairs)
        turned = pairs.transpose(0, 1)
        pairs = pairs + self.ending(turned, turned).transpose(0, 1)
        return sequences, pairs + self.pairs(pairs)


class _GraphBlock(nn.Module):
    """Attention between nodes whose scores edges bias and gate, and which update the edges."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projected = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.bias, self.gate, self.back = nn.Linear(width, heads), nn.Linear(width, heads), nn.Linear(heads, width)
        self.transition = _transition(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        count, length, width = nodes.shape
        x, e = self.norms[0](nodes), self.norms[1](edges)
        *parts, output = self.projected
        shape = (count, length, self.heads, width // self.heads)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in parts)
        scores = (query @ key.transpose(-1, -2) * shape[-1] ** -0.5).clamp(-5, 5) + self.bias(e).permute(0, 3, 1, 2)
        weights = torch.softmax(scores, -1) * torch.sigmoid(self.gate(e)).permute(0, 3, 1, 2)
        nodes = nodes + output((weights @ value).transpose(1, 2).reshape(count, length, width))
        return nodes + self.transition(nodes), edges + self.back(scores.permute(0, 2, 3, 1))


class _Stack(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, one: Tensor, pairs: Tensor) -> Tensor:
        for block in self.blocks:
            one, pairs = block(one, pairs)
        return one.pow(2).mean() + pairs.pow(2).mean()


def evoformer(width: int = 64, length: int = 48, sequences: int = 16, layers: int = 3) -> ZooModel:
    """Build a stack of Evoformer blocks."""
    model = _Stack([_EvoformerBlock(width) for _ in range(layers)])
    example = torch.randn(sequences, length, width), torch.randn(length, length, width)
    return ZooModel(name="evoformer", model=model, example_args=example)


def graph_transformer(width: int = 64, nodes: int = 96, count: int = 2, layers: int = 4) -> ZooModel:
    """Build a graph transformer."""
    model = _Stack([_GraphBlock(width) for _ in range(layers)])
    example = torch.randn(count, nodes, width), torch.randn(count, nodes, nodes, width)
    return ZooModel(name="graph-transformer", model=model, example_args=example)
