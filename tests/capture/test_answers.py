"""What a forward is answered that asks whether it is compiled: no, as in eager, where that can be captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from planner.capture import tracing_internals
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from tests.models import Layers, linear
from tests.runtimes.steps import assert_same, beside, train

WIDTH = 8


class Asks(Layers, first=linear(WIDTH, WIDTH), last=linear(WIDTH, 1)):
    """A model of which a part asks."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(self.ask(self.first(x).relu(), mask)).sum()


def is_compiled() -> bool:
    return torch.compiler.is_compiling()


def looks(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Do something else where nothing is masked, as people do who then have a faster kernel."""
    if is_compiled() or not mask.all():
        return x * mask[:, None]
    return x * 3.0


def exports(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * 2.0 if torch.compiler.is_exporting() else x * 3.0


def captures_a_stream(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    try:
        is_captured = torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # without CUDA
        is_captured = False
    return x * 2.0 if is_captured else x * 3.0


def cannot_be_captured(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return x * 2.0
    torch._dynamo.graph_break()
    return x * 3.0


def loops(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for _ in range(3):  # layers
        x = x + 30.0 if torch.compiler.is_compiling() else added(x)
    return x


def added(x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x = x + 1.0
    return x


def batch(masked: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(4, dtype=torch.bool)
    mask[:masked] = False
    return torch.randn(4, WIDTH), mask


GRAPH = {"activation_budget": "100%", "runtime": "graph"}


@pytest.mark.parametrize("ask", [looks, exports, captures_a_stream])
def test_it_does_what_it_does_in_eager(ask: Callable[..., torch.Tensor]) -> None:
    plain, wrapped = beside(Asks(ask=ask), **GRAPH)
    for masked in (0, 2, 0):
        given = batch(masked)
        with warnings.catch_warnings(action="error"):
            assert_same(train(plain, given), train(wrapped, given))


def test_what_cannot_be_captured_so_is_told_yes_there_and_people_are_told() -> None:
    def also_looks(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return cannot_be_captured(looks(x, mask), mask)

    plain, wrapped = beside(Asks(ask=also_looks), **GRAPH)
    given = batch(0)
    with pytest.warns(UserWarning, match=r"asks whether it is compiled \(at .*test_answers.py:\d+\)\. The answer is"):
        ours = train(wrapped, given)
    told = Asks(ask=lambda x, mask: looks(x, mask) * 2.0)
    told.load_state_dict(plain.state_dict())
    assert_same(train(told, given), ours)


def test_a_loop_that_would_be_too_long_is_told_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch(0)
    assert str(capture(Asks(ask=loops), Inputs(given, {})).graph).count("aten.add.Tensor") == 90
    monkeypatch.setattr(tracing_internals, "_MOST_TRACED", 20)
    with pytest.warns(UserWarning, match="too many operations"):
        assert str(capture(Asks(ask=loops), Inputs(given, {})).graph).count("aten.add.Tensor") == 3


def test_without_data_nobody_can_look_and_nobody_is_warned() -> None:
    with FakeTensorMode():
        model, given = Asks(ask=looks), batch(0)
    with warnings.catch_warnings(action="error"):
        capture(model, Inputs(given, {}))
