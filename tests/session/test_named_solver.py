"""A solver that is asked for by name is asked, or it is said aloud that it is not: whoever is told its name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import UsageError
from planner.plans.module_choices import modules_of
from planner.session import eager_study
from tests.models import WIDTH, Stack, looked_at, rows
from tests.tiers import tiered

REFUSAL = "'chain-dp' decides on a whole graph, and the runtime 'modules' chooses modules by"
MODULES: dict[str, Any] = {"runtime": "modules", "solver": "chain-dp"}


class Perceptrons(Stack):
    """Without norms: where they cannot be captured whole, modules that run again do as well as captured parts."""

    def __init__(self) -> None:
        super().__init__(4, lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))


class Branching(Perceptrons):
    """Cannot be captured: what runs depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if looked_at(self, x) > 1e9 else -x)


class Breaking(Perceptrons):
    """Cannot be captured as one graph, and runs without data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize(
    "asked",
    [
        lambda: planner.plan(Perceptrons(), rows(), **grouped(budget="80%", **MODULES)),
        lambda: planner.plan(Perceptrons(), rows(), **grouped(strategy="every-2", **MODULES)),
        lambda: planner.auto_wrap(Perceptrons(), rows(), **grouped(budget="80%", **MODULES)),
        lambda: planner.auto_wrap(Perceptrons(), **grouped(budget="80%", **MODULES)),
        lambda: planner.what_if(Perceptrons(), rows(), **grouped(**MODULES)),
        lambda: planner.audit(Perceptrons(), rows(), current="none", **grouped(**MODULES)),
    ],
    ids=["plan", "plan a strategy", "auto_wrap at once", "auto_wrap", "what_if", "audit"],
)
def test_choices_of_modules_refuse_it_at_once(asked: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*arguments: object, **options: object) -> None:
        raise AssertionError("a step was recorded before the refusal")

    monkeypatch.setattr(eager_study, "record", record)
    with pytest.raises(UsageError, match=REFUSAL):
        asked()


def test_a_plan_of_modules_refuses_it_too() -> None:
    plan = planner.plan(Perceptrons(), rows(), **grouped(activation_budget="75%", runtime="modules", compare=False))
    with pytest.raises(UsageError, match=REFUSAL):
        planner.auto_wrap(Perceptrons(), budget=plan, search="chain-dp")
    with pytest.raises(UsageError, match=REFUSAL):
        planner.auto_wrap(Perceptrons(), **grouped(plan=plan, **MODULES))


def test_auto_asks_it_where_the_graph_is_captured() -> None:
    with warnings.catch_warnings(action="error", category=UserWarning):
        plan = planner.plan(Perceptrons(), rows(), **grouped(activation_budget="80%", solver="chain-dp", compare=False))
        model = planner.auto_wrap(Perceptrons(), budget=planner.Budget(activations="80%"), search="chain-dp")
        model(rows()).backward()
    for made in (plan, planner.plan_of(model)):
        assert (made.runtime, made.solver) == ("graph", "chain-dp") and made.recomputations
        assert "runtime" not in {finding.rule for finding in made.warnings}


def note_of(plan: planner.Plan) -> str:
    (note,) = (finding for finding in plan.warnings if finding.rule == "runtime")
    return note.cause


SAID = r"the solver 'chain-dp'.*is not used"


def test_auto_says_where_it_cannot_be_asked() -> None:
    with pytest.warns(UserWarning, match=rf"'modules' instead of 'graph'.*{SAID}"):
        plan = planner.plan(Branching(), rows(), **grouped(activation_budget="75%", solver="chain-dp", compare=False))
    assert modules_of(plan) and re.search(SAID, note_of(plan))
    with pytest.warns(UserWarning) as said:
        plan = planner.plan(Branching(), rows(), **grouped(activation_budget="75%", compare=False))
    assert not any("is not used" in text for text in (note_of(plan), *(str(one.message) for one in said)))


@pytest.mark.parametrize(
    ("at_once", "has_loss"), tiered(product([True, False], repeat=2), slow=[(True, True), (False, False)])
)
def test_auto_goes_on_without_it(at_once: bool, has_loss: bool) -> None:
    with pytest.warns(UserWarning, match=SAID):
        model = planner.auto_wrap(
            Breaking(),
            rows() if at_once else None,
            loss_fn=None if has_loss else torch.square,
            **grouped(activation_budget="75%", solver="chain-dp"),
        )
        model(rows()).backward()
    with warnings.catch_warnings(action="error", category=UserWarning):  # it is said once
        for count in (128, 512):
            model(rows(count)).square().backward()
            plan = planner.plan_of(model)
            assert plan.runtime == "modules" and re.search(SAID, note_of(plan))
