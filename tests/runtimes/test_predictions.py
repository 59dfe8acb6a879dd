"""What each way to need less memory predicts of a step really happens, on the device, on the host, and to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.plans.module_choices import modules_of
from tests.models import SEQUENCES, Convolutions, Recurrent, Transformer, images, rows
from tests.runtimes import test_modules
from tests.runtimes.steps import wrap_and_hold
from tests.runtimes.test_offload import ChannelsLast, perceptrons

WAYS: dict[str, tuple[dict[str, Any], Callable[[planner.Plan], Any]]] = {
    "modules": ({"runtime": "modules"}, modules_of),
    "selective": ({"runtime": "modules"}, lambda plan: set(plan.kept) & set(modules_of(plan))),
    "offload": ({"runtime": "graph", "offload": True, "time_limit_seconds": 1.0}, lambda plan: plan.offloading.values),
    "modules with offload": (
        {"runtime": "modules", "offload": True, "offload_at_least": 1024, "time_limit_seconds": 1.5},
        lambda plan: plan.offloading.modules,
    ),
}
"""Options, and what of them a plan must use."""


class Mixed(test_modules.Stack):
    """Autocast, and some parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].inner[0].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "keywords and tuples": (test_modules.Stack, rows()),
    "branches": (test_modules.Branching, rows()),
    "autocast and frozen": (Mixed, rows()),
    "float64": (lambda: test_modules.Stack().double(), rows().double()),
    "batch norm in place": (Convolutions, images()),
    "channels last": (ChannelsLast, images(8, 3, 64)),
    "dropout": (perceptrons, rows(1024, 128)),
    "transformer": (Transformer, SEQUENCES),
    "cast transformer": (partial(Transformer, cast=True), SEQUENCES),
    "lstm": (partial(Recurrent, 3), rows().unflatten(0, (8, 32))),
}


@pytest.mark.parametrize(
    ("way", "name", "budget"),
    [
        ("modules", "keywords and tuples", "70%"),
        ("modules", "branches", "70%"),
        ("modules", "autocast and frozen", "70%"),
        ("modules", "float64", "70%"),
        ("modules", "batch norm in place", "70%"),
        ("modules", "lstm", "80%"),
        ("selective", "transformer", "65%"),
        ("selective", "cast transformer", "85%"),
        ("offload", "dropout", "48%"),
        ("offload", "channels last", "60%"),
        ("modules with offload", "branches", "45%"),
        ("modules with offload", "batch norm in place", "60%"),
        ("modules with offload", "transformer", "60%"),
    ],
)
def test_what_is_predicted_happens(way: str, name: str, budget: str) -> None:
    (options, used), (build, x) = WAYS[way], MODELS[name]
    model = build()
    plan = planner.plan(model, x, activation_budget=budget, compare=False, **options)
    assert used(plan)
    assert "workspace-unknown" not in {warning.rule for warning in plan.warnings}
    read = planner.Plan.from_json(plan.to_json())
    assert read == replace(plan, operations=())
    ran = wrap_and_hold(model, x, plan=read, rounded=options["runtime"] == "graph")
    assert (ran.offloading, ran.kept) == (plan.offloading, plan.kept)


class Factored(nn.Module):
    """A Cholesky factor, whose check for errors is an operator with an effect: a token orders it among others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        points = self.second(self.first(x).tanh())
        return torch.linalg.cholesky(points @ points.T + torch.eye(len(x))).diagonal().log().sum()


def test_tokens_of_effects_stand_for_no_parameter() -> None:
    model, x = Factored(), rows(64, 256)
    plan = wrap_and_hold(model, x, activation_budget="100%", runtime="graph")
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert plan.anatomy["gradients"] < 1.01 * parameter_bytes  # none is copied
