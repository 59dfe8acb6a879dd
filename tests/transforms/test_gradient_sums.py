"""Sums of gradients are made in place where eager makes them so, and the bits are those of sums made anew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.capture.torch_internals import aot_backend
from planner.session.step import Options, lower_as_run
from tests.models import Layers
from tests.runtimes.steps import assert_same, beside, measured_bytes, train, verified
from tests.tiers import tiered

ROWS, WIDTH, TOKENS = 8, 64, 3000


class Tied(nn.Module):
    """One large table, used as embedding twice and as head."""

    def __init__(self, uses: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.uses = uses

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for shift in range(1, self.uses):
            x = torch.tanh(self.inner(x)) + self.table(ids.roll(shift))
        return F.cross_entropy(x @ self.table.weight.T, ids.roll(1))


def ids() -> torch.Tensor:
    return torch.randint(TOKENS, (ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("uses", tiered([2, 4], slow=[2]))
def test_a_tied_table_needs_no_more_than_in_eager_and_the_bits_are_those_of_eager(uses: int) -> None:
    plain, model = beside(Tied(uses), ids(), budget="100%")
    assert_same(train(plain, ids()), train(model, ids()))
    assert measured_bytes(model, ids()) < measured_bytes(plain, ids()) + model.table.weight.nbytes / 2


def test_the_prediction_holds() -> None:
    model = Tied(3)
    plan = planner.plan(model, ids(), budget="100%")
    verified(model, ids(), plan)


class ReadTwice(Layers, scale=lambda: nn.Parameter(torch.full((64,), 0.5))):
    """The first gradient of the scale is also what another gradient is made of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.scale) * self.scale * self.scale).sum()


def test_a_summand_that_others_read_is_left_alone() -> None:
    x = torch.randn(64)
    plain, model = beside(ReadTwice(), x, budget="100%")
    torch.testing.assert_close(train(model, x), train(plain, x))


def test_a_compiler_that_wants_no_writes_gets_none() -> None:
    model = Tied(3)
    joint = capture(model, Inputs((ids(),), {}), compiler=lambda partition: aot_backend(partition))
    lower_as_run(model, joint, Options())
    assert not any("add_." in str(node.target) for node in joint.graph.nodes)
    joint = capture(model, Inputs((ids(),), {}))
    lower_as_run(model, joint, Options())
    assert sum("add_." in str(node.target) for node in joint.graph.nodes) >= 2
