"""Dropout on a CPU: the bits of eager at every share and type."""

from __future__ import annotations

import torch
from torch import nn

from tests.models import Layers
from tests.runtimes.steps import assert_same, beside, train

SHARES = (0.1, 0.15, 0.42, 0.5)  # the inverse of 0.85 and of 0.58 is not, in 32 bits, what eager's mask holds


class Drops(Layers, weight=lambda: nn.Parameter(torch.randn(8, 4 * len(SHARES)))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = x @ self.weight
        dropped = [
            nn.functional.dropout(part.to(dtype), p).float()
            for part, p in zip(products.chunk(len(SHARES), 1), SHARES, strict=True)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ]
        return torch.cat([*dropped, torch.native_dropout(products, 0.1, True)[0].bfloat16().float()], 1).square().sum()


def test_every_share_and_type_has_the_bits_of_eager() -> None:
    plain, model = beside(Drops(), budget="100%")
    x = torch.randn(64, 8)
    assert_same(train(plain, x), train(model, x))
