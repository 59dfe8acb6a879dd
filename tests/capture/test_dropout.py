"""Dropout on a CPU: the bits of eager at every share and type."""

from __future__ import annotations

import torch
from torch import nn

import planner

SHARES = (0.1, 0.15, 0.42, 0.5)  # the inverse of 0.85 and of 0.58 is not, in 32 bits, what eager's mask holds


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4 * len(SHARES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = x @ self.weight
        dropped = [
            nn.functional.dropout(part.to(dtype), p).float()
            for part, p in zip(products.chunk(len(SHARES), 1), SHARES, strict=True)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ]
        return torch.cat([*dropped, torch.native_dropout(products, 0.1, True)[0].bfloat16().float()], 1).square().sum()


def test_every_share_and_type_has_the_bits_of_eager() -> None:
    torch.manual_seed(0)
    model, x = Drops(), torch.randn(64, 8)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x)
        loss.backward()
        assert model.weight.grad is not None
        return loss.detach(), model.weight.grad

    loss, gradient = step()
    planner.auto_wrap(model, budget="100%")
    planned_loss, planned_gradient = step()
    assert torch.equal(loss, planned_loss)
    assert torch.equal(gradient, planned_gradient)
