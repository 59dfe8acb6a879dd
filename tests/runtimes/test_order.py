"""Steps whose operations run in another order than they were captured in: the same bits, and the predicted peak."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner.common.options import grouped
from planner.ir.order import renumbered, reordered
from planner.ir.schedule import recompute_lazily
from tests.models import SEQUENCES, Convolutions, Heads, Transformer, images, rows
from tests.orders import any_order
from tests.runtimes.steps import wrap_and_hold
from tests.tiers import tiered


class Drawing(Heads):
    """Draws in between, and writes into a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        noisy = x + torch.rand_like(x) * self.seen
        self.seen.mul_(2.0)
        return super().forward(noisy) + super().forward(x) * self.seen.sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "heads": (Heads, rows()),
    "draws and writes": (Drawing, rows()),
    "batch norm in place": (Convolutions, images()),
    "transformer": (Transformer, SEQUENCES),
}


@pytest.mark.slow
def test_heads_are_planned_in_another_order() -> None:
    model, x = Heads(6), rows()
    asked = {"activation_budget": "25%", "cost_model": "roofline", "deterministic": True, "time_limit_seconds": 0.5}
    plan = planner.plan(model, x, **grouped(compare=False, **asked))
    assert plan.order
    read = planner.Plan.from_json(plan.to_json())
    assert read == replace(plan, operations=())
    ran = wrap_and_hold(model, x, plan=read, rounded=True)
    assert ran.order == plan.order


@pytest.mark.parametrize(
    ("name", "seed"), tiered([(name, seed) for name in MODELS for seed in range(6)], quick=[("draws and writes", 0)])
)
def test_any_order_gives_the_same_bits(name: str, seed: int) -> None:
    build, x = MODELS[name]
    model, rng = build(), random.Random(seed)
    step = planner.study(model, x, target=planner.Target(cost_model="roofline"))
    order = any_order(step.graph, rng)
    graph = reordered(step.problem(), order).graph
    turn = graph.loss_index
    again = [u for u, maker in enumerate(graph.producer) if maker < turn and graph.operations[maker].recomputable]
    dropped = [u for u in again if rng.random() < 0.5]
    schedule = renumbered(recompute_lazily(graph, {turn: dropped}), order)
    plan = step.as_plan(schedule, "at random")
    assert plan.order
    wrap_and_hold(model, x, plan=plan, rounded=True)
