"""Planning and recompute leave every stream of random numbers as it is: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner.capture.state_restore import RandomStates
from planner.common.options import grouped
from planner.errors import CaptureError, UsageError
from tests.models import Layers, Stack, mean_square, perceptron, rows
from tests.runtimes.steps import wrap_and_hold
from tests.tiers import tiered

BUDGET = {"budget": "90%", "time_limit_seconds": 0.5}


class Scaled(Layers, inside=perceptron):
    """A block that is scaled by what is drawn when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.inside(x) * self.draw()) * self.draw()


DRAWS = {"Python's": random.random, "numpy's": lambda: float(np.random.rand()), "torch's": lambda: torch.rand(())}


def build(of: str, *, has_loss: bool = True) -> Stack:
    torch.manual_seed(0)
    return Stack(2, lambda: Scaled(draw=DRAWS[of]), has_loss=has_loss)


def seeded() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


@pytest.mark.filterwarnings("ignore:runtime 'modules'", "ignore:Runtime")
@pytest.mark.parametrize(
    ("of", "runtime"),
    tiered(
        product(DRAWS, ["graph", "modules", "regional", "auto"]),
        quick=[("Python's", "auto"), ("numpy's", "regional"), ("torch's", "graph"), ("torch's", "modules")],
    ),
)
def test_planning_draws_nothing(of: str, runtime: str) -> None:
    model = build(of, has_loss=False)
    seeded()
    before = RandomStates()
    with suppress(CaptureError, UsageError):  # what draws from Python's or numpy's random states is no graph
        planner.plan(model, rows(), loss_fn=mean_square, **grouped(runtime=runtime, **BUDGET))
    assert RandomStates() == before


@pytest.mark.filterwarnings("ignore:runtime 'modules'")
@pytest.mark.parametrize("of", tiered(DRAWS, slow=["numpy's"]))
def test_wrapped_steps_draw_what_plain_ones_do(of: str) -> None:
    """A module that runs again draws again what it drew, and what comes next is what would have come."""
    plain, model = build(of), build(of)
    planner.auto_wrap(model, **grouped(**{**BUDGET, "budget": "70%"}))
    left: list[list[Any]] = []
    for trained in (plain, model):
        seeded()
        losses = []
        for _ in range(3):
            losses.append(trained(rows()))
            losses[-1].backward()
        left.append([*map(float, losses), RandomStates(), [p.grad for p in trained.parameters()]])
    *expected, expected_gradients = left[0]
    *found, gradients = left[1]
    assert planner.plan_of(model).recomputations or planner.plan_of(model).runtime == "modules"
    assert found == expected
    assert all(map(torch.equal, gradients, expected_gradients))


class FromNumpy(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.from_numpy(np.random.rand(x.shape[1])).float())


def test_what_would_draw_from_another_stream_is_refused() -> None:
    """Dynamo traces numpy's functions with torch's random numbers."""
    with pytest.raises(CaptureError, match=r"test_random_states.py:\d+"):
        planner.plan(FromNumpy(), rows(), **grouped(runtime="graph", **BUDGET))


class Unread(Layers, body=perceptron, one=perceptron, other=perceptron):
    """Draws for results that nobody reads: those of a second head, say, when the first is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.body(x)
        nn.functional.dropout(self.other(shared), 0.3)
        torch.rand(5)
        torch.bernoulli(torch.full((3,), 0.5))
        return nn.functional.dropout(self.one(shared), 0.3).square().mean()


@pytest.mark.parametrize("runtime", ["graph", "regional"])
def test_what_is_drawn_for_nobody_is_drawn(runtime: str) -> None:
    wrap_and_hold(
        Stack(2, Unread) if runtime == "regional" else Unread(), rows(), activation_budget="100%", runtime=runtime
    )
