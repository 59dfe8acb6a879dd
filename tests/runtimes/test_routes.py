"""Steps that run other modules than the one before, under the runtime that records one: planned for, or said."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.memory import record
from planner.common.options import grouped
from planner.runtimes._routes import outermost
from tests.models import Layers, Stack, looked_at, mean_square, perceptron, rows, set_dropout
from tests.runtimes.steps import assert_same, peak_of, step, train
from tests.tiers import tiered


class Dropping(Stack):
    """Drops each of its layers, but the first, at random."""

    draw: Callable[[], Any] = staticmethod(random.random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if not number or self.draw() < 0.6:
                x = x + block(x)
        return mean_square(x)


class DroppingByTorch(Dropping):
    """Draws from torch's random state, as models of Hugging Face's do."""

    draw = staticmethod(lambda: torch.rand([]))


class DroppingAndLooking(DroppingByTorch):
    """Cannot be recorded without data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if looked_at(self, x) > 1e9:
            raise ValueError(x)
        return super().forward(x)


class Switched(Stack):
    """Runs as many layers as it is told to, of which no random state says anything."""

    layers = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: self.layers]:
            x = x + block(x)
        return mean_square(x)


def peak_bytes(model: nn.Module, seed: int = 7) -> int:
    model.zero_grad()
    x = rows(512)
    with record() as recording:
        step(model, x, seed=seed)
    return planner.plan_of(model).total_static_bytes + peak_of(recording, alignment_bytes=1)


def wrap(model: nn.Module, budget_bytes: int) -> nn.Module:
    return planner.auto_wrap(model, **grouped(budget=budget_bytes, runtime="modules", time_limit_seconds=0.5))


def unplanned_bytes(model: nn.Module, x: torch.Tensor | None = None) -> int:
    return planner.plan(model, rows(512) if x is None else x, budget="100%", runtime="modules").baseline_peak_bytes


@pytest.mark.filterwarnings("error:.*not run as planned", "error:some steps", "ignore:data decide what")
@pytest.mark.parametrize("kind", tiered([Dropping, DroppingAndLooking], quick=[DroppingAndLooking]))
def test_layers_that_are_dropped_at_random_keep_the_budget(kind: type[Dropping]) -> None:
    whole = unplanned_bytes(Stack(6))
    plain, model = kind(6), kind(6)
    model.load_state_dict(plain.state_dict())
    wrap(model, int(0.6 * whole))
    for seed in (5, 2, 4, 3):  # the first drops most layers, the third none
        random.seed(seed)
        expected = train(plain, rows(512), seed=seed)
        random.seed(seed)
        assert_same(expected, train(model, rows(512), seed=seed))
        random.seed(seed)
        assert peak_bytes(model, seed) <= 0.6 * whole


def test_numbers_that_are_drawn_are_there_without_data() -> None:
    """So the step is recorded as it is for one that looks at no data."""
    plan = planner.plan(DroppingByTorch(6), rows(512), budget="100%", runtime="modules")
    assert "depends-on-data" not in {warning.rule for warning in plan.warnings}


def test_a_step_that_runs_more_than_was_planned_for_is_said_and_planned() -> None:
    model = Switched(6)
    budget_bytes = int(0.6 * unplanned_bytes(Stack(6)))
    wrap(model, budget_bytes)
    step(model, rows(512))
    with warnings.catch_warnings(action="error", category=UserWarning):
        for _ in range(2):
            assert peak_bytes(model) <= budget_bytes
    model.layers = 6
    with pytest.warns(UserWarning, match=r"Switched does not run as planned .*\(blocks.2"):
        assert peak_bytes(model) > budget_bytes
    step(model, rows(512))
    with warnings.catch_warnings(action="error", category=UserWarning):
        for model.layers in (6, 3, 2, 6):
            assert peak_bytes(model) <= planner.plan_of(model).peak_bytes <= budget_bytes


def test_what_no_plan_fits_is_said() -> None:
    model = Switched(6)
    wrap(model, int(0.9 * unplanned_bytes(Switched(6))))
    step(model, rows(512))
    model.layers = 6
    with pytest.warns(UserWarning, match="does not run as planned"):
        step(model, rows(512))
    with pytest.warns(UserWarning, match="some steps of Switched break the budget"):
        step(model, rows(512))


class Experts(Layers, experts=lambda: nn.ModuleList(perceptron() for _ in range(2))):
    """Sends each row to one of two experts, as it says itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(chosen):  # which no capture goes past
                y = y.index_add(0, chosen, expert(x[chosen]))
        return y


def test_experts_that_are_given_more_rows_are_said_and_planned() -> None:
    model = Stack(3, Experts)
    wrap(model, 10**9)
    few, many = rows(512), rows(512)
    few[:, 0], many[:, 0] = 1.0, -1.0
    few[:8, 0], many[:8, 0] = -1.0, 1.0
    step(model, few)
    with warnings.catch_warnings(action="error", category=UserWarning):
        step(model, few)
    with pytest.warns(UserWarning, match=r"Stack does not run as planned .*\(blocks.0.experts.0: "):
        step(model, many)
    with warnings.catch_warnings(action="error", category=UserWarning):
        for x in (many, few):
            step(model, x)


def test_where_parts_have_no_plan_any_more_modules_run() -> None:
    """What is given more rows than planned stays eager in parts, and is recomputed nowhere."""
    few, many = rows(512), rows(512)
    few[:, 0], many[:, 0] = torch.tensor([-1.0, 1.0]).repeat(256), torch.tensor([1.0, *[-1.0] * 511])
    budget_bytes = int(0.8 * unplanned_bytes(Stack(2, Experts), many))
    model = planner.auto_wrap(Stack(2, Experts), **grouped(budget=budget_bytes, time_limit_seconds=0.5))
    with pytest.warns(UserWarning, match="'parts' instead of 'graph'"):
        step(model, few)
    for x in (few, many):
        step(model, x)
    with pytest.warns(UserWarning, match="no plan fits .*Such calls run under the runtime 'modules'"):
        step(model, many)
    model.zero_grad()
    with record() as recording:
        step(model, many)
    plan = planner.plan_of(model)
    assert plan.runtime == "modules"
    assert plan.total_static_bytes + peak_of(recording, alignment_bytes=1) <= plan.peak_bytes <= budget_bytes


def test_what_two_steps_need_checkpointed_is_never_one_inside_the_other() -> None:
    """A module that runs again is not checkpointed inside: what it saves then would not be what it saved before."""
    chosen = {"layers.1.mlp": {}, "layers.1": {"mm": (0,)}, "layers.10": {}, "layers.2.mlp": {}, "layers.2.norm": {}}
    assert list(outermost(chosen)) == ["layers.1", "layers.10", "layers.2.mlp", "layers.2.norm"]


def test_a_dropout_that_is_switched_on_is_said_and_planned() -> None:
    plain = Stack(6, block=partial(perceptron, dropout=0.3))
    budget_bytes = int(0.85 * unplanned_bytes(plain))
    model = wrap(copy.deepcopy(plain), budget_bytes)
    for trained in (plain, model):
        set_dropout(trained, 0.0)
    assert_same(train(plain, rows(512)), train(model, rows(512)))
    for trained in (plain, model):
        set_dropout(trained, 0.3)
    with pytest.warns(UserWarning, match=r"does not run as planned .*\.p: more.*may break the budget"):
        assert_same(train(plain, rows(512)), train(model, rows(512)))
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert peak_bytes(model) <= budget_bytes
        set_dropout(model, 0.0)
        assert peak_bytes(model) <= budget_bytes
        set_dropout(model, 0.1)
        assert peak_bytes(model) <= budget_bytes
