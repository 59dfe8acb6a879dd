"""The installed torch has every private API that the planner stands on, and they do what they did."""

from __future__ import annotations

import logging

import pytest
import torch

from planner.capture import torch_internals
from planner.errors import PlannerError


def test_this_torch_has_what_the_planner_stands_on():
    torch_internals.self_test()


def test_everything_that_is_offered_exists():
    assert [name for name in torch_internals.__all__ if not hasattr(torch_internals, name)] == []


def test_another_torch_gets_one_message_that_names_the_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_internals, "TangentAOTInput", int)
    with pytest.raises(PlannerError, match=rf"torch {torch.__version__.replace('+', '.')} is not supported: tangents"):
        torch_internals.self_test()


def test_the_switches_of_a_model_are_those_of_its_modules_and_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.BatchNorm1d(2))
    model.append(model[0])
    switches = torch_internals.training_switches(model)
    assert len(switches) == len([*model.modules(), *model.parameters()])
    model[2].eval()
    without_mode = torch_internals.training_switches(model)
    model[0].bias.requires_grad_(False)
    assert len({switches, without_mode, torch_internals.training_switches(model)}) == 3


def test_compilation_with_the_settings_logs_no_error(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("model")

    def double(x: torch.Tensor) -> torch.Tensor:
        logger.error("passes in silence")
        return x * 2

    with torch_internals.dynamo_settings():
        doubled = torch_internals.compile_isolated(double, lambda graph_module, _: graph_module)(torch.ones(2))
    assert doubled.tolist() == [2, 2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
