"""Toy models that tests of several rooms share: what is special about a model stands with the test that needs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32


def rows(count: int = 256, width: int = WIDTH) -> torch.Tensor:
    """Return the same rows of random numbers whenever so many are asked for."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def looked_at(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a number with the sign of ``x.sum()`` that is known only when the forward runs: a parameter has a part."""
    return x.sum() * next(model.parameters()).detach().square().sum()


def perceptron(
    width: int = WIDTH, *, hidden: int | None = None, dropout: float = 0.0, middle: nn.Module | None = None
) -> nn.Sequential:
    """Return norm, linear, GELU or what is given for the ``middle``, dropout if there is any, and linear."""
    hidden = hidden or 4 * width
    between = [middle or nn.GELU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), *between, nn.Linear(hidden, width))


def set_dropout(model: nn.Module, probability: float) -> None:
    """Let every dropout of a model drop so much."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = probability


class Layers(nn.Module):
    """Layers, each made by what its class names it with, and what a test gives beside: its forward uses both."""

    makers: ClassVar[dict[str, Callable[[], Any]]] = {}

    def __init_subclass__(cls, **makers: Callable[[], Any]) -> None:
        cls.makers = {**cls.makers, **makers}

    def __init__(self, **given: Any) -> None:
        super().__init__()
        for name, made in {**{name: make() for name, make in self.makers.items()}, **given}.items():
            if isinstance(made, nn.Buffer):  # Dynamo cannot follow ``+=`` on one of this class
                self.register_buffer(name, made.detach())
            else:
                setattr(self, name, made)


def linear(*sizes: int, **options: Any) -> Callable[[], nn.Linear]:
    """Return what makes such a linear layer."""
    return partial(nn.Linear, *sizes, **options)


class Stack(Layers):
    """Blocks, each of which adds to what it is given, and the mean square as a loss, inside or outside."""

    def __init__(
        self, depth: int = 3, block: Callable[[], nn.Module] = perceptron, *, has_loss: bool = True, **given: Any
    ) -> None:
        super().__init__(**given)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.has_loss = has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return mean_square(x) if self.has_loss else x


class OneLinear(nn.Module):
    """A linear layer; what a test does with it stands in its forward."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Trained(nn.Sequential):
    """Layers one after the other and a loss, so that nothing is outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(super().forward(x))


class DependingOnData(Stack):
    """Cannot be captured: what runs depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 1 if looked_at(self, x) > 0 else x)


class Recurrent(nn.Module):
    """LSTMs as repeated blocks; their kernel keeps memory of a size that only a real run shows."""

    def __init__(self, depth: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)[0])
        return mean_square(x)


class Convolutions(nn.Module):
    """BatchNorm and activations in place."""

    def __init__(self, depth: int = 4, channels: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(channels, channels, 3, padding=1),
                    nn.BatchNorm2d(channels),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(channels, channels, 3, padding=1),
                    nn.BatchNorm2d(channels),
                )
                for _ in range(depth)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(self.blocks(x))


class Heads(nn.Module):
    """Features kept for heads that come last, two of which are one, with dropout; the sum of their losses."""

    def __init__(self, depth: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(perceptron(width, hidden=width) for _ in range(depth))
        self.heads = nn.ModuleList(perceptron(width, hidden=8 * width, dropout=0.1) for _ in range(depth - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = []
        for block in self.trunk:
            x = x + block(x)
            features.append(x)
        made = [head(each) for head, each in zip(cycle(self.heads), features, strict=False)]
        return torch.stack([mean_square(each) for each in made]).sum()


def images(count: int = 4, channels: int = 16, size: int = 24) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(count))


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.project(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.second = nn.LayerNorm(width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Blocks with dropout on a sequence of vectors; autocast inside if asked; gives its loss."""

    def __init__(
        self, depth: int = 3, *, width: int = 64, heads: int = 4, dropout: float = 0.1, cast: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.cast = cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            for block in self.blocks:
                x = block(x)
            return mean_square(x.float())


def language_model(kind: str = "Llama", **config: Any) -> Any:
    """Return a small model of transformers, of the family that is named."""
    transformers = pytest.importorskip("transformers", reason="the Hugging Face models of the zoo")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64, **config}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


SEQUENCES = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))
"""What a ``Transformer`` is given."""
