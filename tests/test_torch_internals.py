"""The installed torch has every private API that the planner stands on, and they do what they did."""

from __future__ import annotations

import pytest
import torch

from planner import torch_internals
from planner.errors import PlannerError


def test_this_torch_has_what_the_planner_stands_on():
    torch_internals.self_test()


def test_everything_that_is_offered_exists():
    assert [name for name in torch_internals.__all__ if not hasattr(torch_internals, name)] == []


def test_another_torch_gets_one_message_that_names_the_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_internals, "TangentAOTInput", int)
    with pytest.raises(PlannerError, match=rf"torch {torch.__version__.replace('+', '.')} is not supported: tangents"):
        torch_internals.self_test()
