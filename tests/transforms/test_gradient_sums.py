"""Sums of gradients are made in place where eager makes them so, and the bits are those of sums made anew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.capture.memory import measure_peak
from planner.capture.torch_internals import aot_backend
from planner.session.step import Options, lower_as_run
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


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids()).backward()
    return [p.grad.clone() for p in model.parameters()]


def peak_bytes(model: nn.Module) -> int:
    model.zero_grad()
    return measure_peak(lambda: model(ids()).backward(), torch.device("cpu"))[0]


@pytest.mark.parametrize("uses", tiered([2, 4], slow=[2]))
def test_a_tied_table_needs_no_more_than_in_eager_and_the_bits_are_those_of_eager(uses: int) -> None:
    model = Tied(uses)
    expected, eager_bytes = step(model), peak_bytes(model)
    planner.auto_wrap(model, ids(), budget="100%")
    found = step(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    table_bytes = model.table.weight.numel() * 4
    assert peak_bytes(model) < eager_bytes + table_bytes / 2


def test_the_prediction_holds() -> None:
    model = Tied(3)
    plan = planner.plan(model, ids(), budget="100%")
    measured = planner.verify(model, ids(), plan, timed_steps=1)
    assert measured.exact
    assert measured.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-3)


class ReadTwice(nn.Module):
    """The first gradient of the scale is also what another gradient is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.scale) * self.scale * self.scale).sum()


def test_a_summand_that_others_read_is_left_alone() -> None:
    model, x = ReadTwice(), torch.randn(64)
    model(x).backward()
    expected = model.scale.grad.clone()
    model.scale.grad = None
    planner.auto_wrap(model, x, budget="100%")
    model(x).backward()
    assert torch.allclose(model.scale.grad, expected)


def test_a_compiler_that_wants_no_writes_gets_none() -> None:
    model = Tied(3)
    joint = capture(model, Inputs((ids(),), {}), compiler=lambda partition: aot_backend(partition))
    lower_as_run(model, joint, Options())
    assert not any("add_." in str(node.target) for node in joint.graph.nodes)
    joint = capture(model, Inputs((ids(),), {}))
    lower_as_run(model, joint, Options())
    assert sum("add_." in str(node.target) for node in joint.graph.nodes) >= 2
