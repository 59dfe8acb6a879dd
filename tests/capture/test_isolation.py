"""A capture that fails says why in the user's words, and leaves nothing behind for the next one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import CaptureError
from tests.models import Stack, rows
from tests.runtimes.steps import beside
from tests.tiers import tiered

BUDGET = {"budget": "100%", "time_limit_seconds": 0.5}

Use = Callable[[torch.Tensor, int], torch.Tensor]

OF_DRAWN: dict[str, Use] = {
    "a slice": lambda x, number: x[number:],
    "copies": lambda x, number: x.repeat(number, 1),
    "a shift": lambda x, number: torch.roll(x, number, 0),
    "a size": lambda x, number: x + torch.zeros(number, 1).sum(),
    "a position": lambda x, number: x * [1.0, 2.0, 3.0][number],
}


class Drawing(Stack):
    """Uses a whole number that it draws anew in every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.use(x, random.randint(1, 2)))


def steps(model: nn.Module) -> list[float]:
    random.seed(3)
    losses = []
    for _ in range(4):
        losses.append(model(rows()))
        losses[-1].backward()
    return [float(loss) for loss in losses]


@pytest.mark.filterwarnings("ignore:runtime 'modules'")
@pytest.mark.parametrize("use", tiered(OF_DRAWN, quick=("a slice",)))
def test_a_drawn_whole_number_is_no_part_of_a_graph(use: str) -> None:
    model = Drawing(2, use=OF_DRAWN[use])
    with pytest.raises(CaptureError, match=r"that it draws|depends on data|known only when") as refused:
        planner.plan(model, rows(), **grouped(runtime="graph", **BUDGET))
    assert "SymInt" not in str(refused.value) and "u0" not in str(refused.value)
    plain, model = beside(model, **BUDGET)
    assert steps(model) == steps(plain)


CULPRITS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a selection": (
        lambda x: x[x.detach() > 0],
        r"index \(at .*:\d+\) has a size that is known only when the forward runs \(from data",
    ),
    "a choice of Python's": (
        lambda x: x * random.choice([1.0, 2.0]),
        r"draws from Python's random state \(Random.choice\) \(at .*test_isolation.py:\d+\)",
    ),
    "a print": (lambda x: print("") or x, r"builtin operator: print \(at .*test_isolation.py:\d+\)"),
}


class Doing(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.blocks[0](x)) * self.what(self.blocks[0](x)).sum()


@pytest.mark.parametrize("culprit", CULPRITS)
def test_a_refusal_names_what_cannot_be_captured(culprit: str, recwarn: pytest.WarningsRecorder) -> None:
    what, says = CULPRITS[culprit]
    with pytest.raises(CaptureError, match=says):
        planner.plan(Doing(1, what=what), rows(), **grouped(runtime="graph", **BUDGET))
    assert not list(recwarn)
