"""Numbers that a forward draws from Python's and numpy's random states: inputs of the captured program, eager's own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import planner
from planner.capture.random_states import RandomStates
from planner.errors import CaptureError
from tests.models import Stack, mean_square, rows
from tests.runtimes.steps import hold_peak


class Mixing(Stack):
    """Mixes the rows of a batch by shares that it draws."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.draw()
        x = share * x + (1 - share) * x.flip(0)
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.1) * random.uniform(0.5, 1.5)
        return mean_square(x) * self.draw()


DRAWS: dict[str, Callable[[], Any]] = {
    "random": lambda: random.random(),
    "betavariate": lambda: random.betavariate(0.4, 0.4),
    "gauss": lambda: random.gauss(0.0, 1.0),
    "numpy.beta": lambda: numpy.random.beta(0.4, 0.4),
    "numpy.normal": lambda: numpy.random.normal(loc=0.5),
    "numpy.rand": lambda: float(numpy.random.rand()),
    "numpy.triangular": lambda: numpy.random.triangular(0, 0.5, 1),
}


def trained(model: nn.Module, step: int, x: torch.Tensor) -> tuple[list[torch.Tensor], RandomStates]:
    torch.manual_seed(step)
    random.seed(step)
    numpy.random.seed(step)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())], RandomStates()


@pytest.mark.parametrize("draw", DRAWS)
def test_they_are_those_of_eager_and_cost_one_capture(draw: str) -> None:
    plain = Mixing(DRAWS[draw])
    options: dict[str, Any] = {"time_limit_seconds": 0.5, "maximum_shapes": 1, "runtime": "graph"}
    model = planner.auto_wrap(copy.deepcopy(plain), activation_budget="70%", **options)
    for step in range(4):
        (ours, our_states), (theirs, their_states) = trained(model, step, rows()), trained(plain, step, rows())
        assert all(map(torch.equal, ours, theirs)) and our_states == their_states, step
    hold_peak(model, (rows(),))


def test_no_branch_is_taken_by_them_in_silence() -> None:
    class Dropping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if random.random() < 0.5:
                    x = x + block(x)
            return mean_square(x)

    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        planner.plan(Dropping(), rows(), budget="100%", runtime="graph")


@pytest.mark.parametrize("draw", [lambda: numpy.random.normal(0, 1, 1)[0], lambda: numpy.random.normal(size=1)[0]])
def test_arrays_are_not_taken_for_numbers(draw: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        planner.plan(Mixing(draw), rows(), budget="100%", runtime="graph")
