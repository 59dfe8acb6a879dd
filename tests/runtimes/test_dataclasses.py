"""Batches and outputs that are dataclasses, which torch takes for leaves: what they hold counts as in a tuple."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.trees import leaf_tensors, mapped
from tests.models import WIDTH, Layers, linear, looked_at, perceptron
from tests.runtimes.steps import assert_same, hold_peak, train, wrap_and_hold
from tests.tiers import tiered


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    labels: torch.Tensor
    name: str = "a batch"


@dataclass
class Hidden:
    state: torch.Tensor
    penalty: torch.Tensor
    seen: list[str] = field(default_factory=list)


class Block(Layers, body=perceptron):
    def forward(self, hidden: Hidden) -> Hidden:
        change = self.body(hidden.state)
        return Hidden(hidden.state + change, hidden.penalty + change.pow(2).mean())


class Model(Layers, blocks=lambda: nn.ModuleList(Block() for _ in range(2)), head=linear(WIDTH, 10)):
    """Dataclasses come in, come out, and go from block to block."""

    def forward(self, batch: Batch) -> Hidden:
        hidden = Hidden(batch.x, batch.x.new_zeros(()))
        for block in self.blocks:
            hidden = block(hidden)
            if self.looks and looked_at(self, hidden.state) > 1e9:
                return hidden
        loss = nn.functional.cross_entropy(self.head(hidden.state), batch.labels)
        return Hidden(loss, hidden.penalty)


def _loss(output: Hidden) -> torch.Tensor:
    return output.state + 0.1 * output.penalty


def _batch(count: int = 256) -> Batch:
    return Batch(torch.randn(count, WIDTH), torch.randint(10, (count,)))


@pytest.mark.parametrize(
    ("runtime", "looks"),
    tiered(
        [("graph", False), ("modules", False), ("regional", False), ("modules", True), ("parts", True)],
        quick=[("graph", False), ("modules", True)],
    ),
)
@pytest.mark.filterwarnings("ignore:data decide what Model runs")
def test_they_are_planned_as_tuples_are(runtime: str, looks: bool) -> None:
    model, batch = Model(looks=looks), _batch()
    plain = copy.deepcopy(model)
    plan = wrap_and_hold(model, batch, loss_fn=_loss, activation_budget="85%", runtime=runtime, time_limit_seconds=1.0)
    assert plan.static_bytes["inputs"] == sum(tensor.nbytes for tensor in (batch.x, batch.labels))
    assert plan.recompute_seconds > 0

    smaller = _batch(200)
    assert_same(train(plain, smaller, _loss), train(model, smaller, _loss))
    if runtime != "parts":  # which runs inputs that are little smaller by the plan that there is
        assert planner.plan_of(model).static_bytes["inputs"] < plan.static_bytes["inputs"]  # its size was seen
        hold_peak(model, smaller, loss_fn=_loss)


@dataclass
class Node:
    value: Any
    other: Any = None


def test_dataclasses_that_hold_each_other_end() -> None:
    first = Node(torch.ones(1))
    second = Node(torch.zeros(1), first)
    first.other = second
    assert [tensor.item() for tensor in leaf_tensors([first])] == [1.0, 0.0]
    assert mapped(lambda tensor: tensor + 1, first).value.item() == 2.0
    assert first.value.item() == 1.0


def test_what_holds_no_tensor_is_not_copied() -> None:
    settings, batch = Node("settings"), _batch(2)
    tree = mapped(lambda tensor: tensor * 2, {"settings": settings, "batch": batch})
    assert tree["settings"] is settings
    assert tree["batch"] is not batch
    assert torch.equal(tree["batch"].x, batch.x * 2)
    assert tree["batch"].name == batch.name
