"""A step is planned to begin without gradients: where it does not, and there is no room for them, that is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

import planner
from tests.models import Stack, rows


def wrap(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return planner.auto_wrap(Stack(), time_limit_seconds=0.2, **options)


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_gradients_that_break_the_budget_are_said_once(runtime: str) -> None:
    model = wrap(budget="70%", runtime=runtime)
    model(rows()).backward()
    plan = planner.plan_of(model)
    held_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert plan.peak_bytes <= plan.budget_bytes < plan.peak_bytes + held_bytes
    with pytest.warns(UserWarning, match="Stack is called while it holds .* of gradients.*gradient_accumulation=True"):
        model(rows()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(rows()).backward()


@pytest.mark.filterwarnings("error::UserWarning")
def test_gradients_that_are_counted_freed_or_fit_are_not_said() -> None:
    for options in ({"budget": "85%", "gradient_accumulation": True}, {"activation_budget": "70%"}, {"budget": "1GiB"}):
        model = wrap(**options)
        for _ in range(3):
            model(rows()).backward()
    model = wrap(budget="70%")
    for _ in range(3):
        model(rows()).backward()
        model.zero_grad()


def test_computed_parameters_have_no_gradient_to_look_at() -> None:
    model = wrap(budget="1GiB")
    computed = {name: p * 0.9 for name, p in model.named_parameters()}
    functional_call(model, computed, (rows(),)).backward(retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional_call(model, computed, (rows(),)).backward()
