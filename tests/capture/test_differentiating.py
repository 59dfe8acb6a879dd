"""Forwards that differentiate: gradient penalties, force fields, learning to learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture import torch_internals as internals
from planner.common.options import grouped
from planner.errors import CaptureError
from tests.models import Layers, linear
from tests.runtimes.steps import wrap_and_hold

follows_leaves = pytest.mark.skipif(
    internals._check_returned_leaves is None, reason="this torch follows no requires_grad_() of what a forward computes"
)

ROWS, WIDTH = 256, 32


def network(inputs: int) -> nn.Sequential:
    between = (layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), *between, nn.Linear(WIDTH, 1))


class Penalty(Layers, judge=lambda: network(8)):
    """Judges what is real and what is made, with a penalty for steepness between the two."""

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        return self.judge(made).mean() - self.judge(real).mean() + (slope.norm(dim=1) - 1).square().mean()


class Field(Layers, energy=lambda: network(3)):
    """An energy and its forces, for a loss of both; the positions too, if asked for."""

    returns_positions = False

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = positions.detach().requires_grad_(True)
        energy = self.energy(positions).sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return (energy, -slope, positions) if self.returns_positions else (energy, -slope)


class Learner(Layers, net=lambda: network(4)):
    """Takes two steps of gradient descent, and is judged after them."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parameters = dict(self.net.named_parameters())
        for _ in range(2):
            loss = (torch.func.functional_call(self.net, parameters, (x,)) - y).square().mean()
            slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            parameters = {n: p - 0.1 * s for (n, p), s in zip(parameters.items(), slopes, strict=True)}
        return (torch.func.functional_call(self.net, parameters, (x,)) - y).square().mean()


def of_both(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return outputs[0].square() / ROWS + (outputs[1] - 1).square().mean()


@pytest.mark.parametrize(
    ("kind", "widths", "loss_fn"),
    [
        pytest.param(Penalty, (8, 8), None, marks=follows_leaves),
        pytest.param(Field, (3,), of_both, marks=follows_leaves),
        (Learner, (4, 1), None),
    ],
)
def test_it_is_one_graph_with_eagers_bits(
    kind: type[nn.Module], widths: tuple[int, ...], loss_fn: Callable[[Any], torch.Tensor] | None
) -> None:
    inputs = tuple(torch.randn(ROWS, width) for width in widths)
    asked = {"activation_budget": "70%", "time_limit_seconds": 1.0}
    plan = wrap_and_hold(kind(), inputs, loss_fn=loss_fn, rounded=True, **asked)
    assert plan.runtime == "graph"
    assert plan.overhead > 0


def test_a_leaf_that_the_forward_makes_and_returns_is_refused() -> None:
    with pytest.raises(CaptureError, match="requires_grad_"):
        planner.plan(
            Field(returns_positions=True), torch.randn(ROWS, 3), **grouped(activation_budget="70%", runtime="graph")
        )


class Tangent(Layers, inner=lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), out=linear(8, 1)):
    """Differentiates in forward mode inside its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, tangent = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))
        return self.out(y + tangent).square().mean()


@pytest.mark.parametrize("runtime", ["auto", "graph", "parts", "modules"])
def test_forward_mode_inside_a_forward_is_refused_by_its_name(runtime: str) -> None:
    model = planner.auto_wrap(Tangent(), budget="1GiB", runtime=runtime)
    with pytest.raises(CaptureError, match=r"fails( as Dynamo follows it)?: forward-mode differentiation inside it"):
        model(torch.randn(4, 8)).backward()
