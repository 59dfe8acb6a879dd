"""A budget is for one call at a time: what holds more than one is said, and nothing else is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from planner.runtimes._overlapping_calls import OpenCalls


def called(calls: OpenCalls, model: nn.Module) -> dict[str, torch.Tensor]:
    """Call a model as a wrapped one is called."""
    calls.check()
    outputs = {"left": model(torch.ones(2, 3)), "right": model(torch.zeros(2, 3)).exp()}
    calls.begun(outputs)
    return outputs


def test_a_call_before_the_backward_of_the_last_is_said_once() -> None:
    model = nn.Linear(3, 3)
    calls = OpenCalls(model)
    held = [called(calls, model)]
    with pytest.warns(UserWarning, match="Linear is called again before the backward of its last call"):
        held.append(called(calls, model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held.append(called(calls, model))


@pytest.mark.filterwarnings("error")
def test_calls_that_are_over_are_not_said() -> None:
    model = nn.Linear(3, 3)
    calls = OpenCalls(model)
    called(calls, model)  # nobody holds it
    loss = called(calls, model)["right"].sum()
    loss.backward(retain_graph=True)
    other = called(calls, model)["left"].sum()
    other.backward()
    with torch.no_grad():
        held = called(calls, model)
    called(calls, model)
    assert held


def test_a_call_before_the_backward_of_another_model_is_said_once() -> None:
    models = nn.Linear(3, 3), nn.Bilinear(3, 3, 3)
    first, second = map(OpenCalls, models)
    held = called(first, models[0])
    with pytest.warns(UserWarning, match="Bilinear is called before the backward of Linear, which is planned too"):
        second.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.check()
        held["left"].sum().backward()
        OpenCalls(models[1]).check()
