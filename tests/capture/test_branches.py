"""A forward that looks at its inputs is captured whole, and never runs a branch that eager would not take."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.branches import Branches
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.capture.state_restore import RandomStates
from planner.common.options import grouped
from planner.errors import CaptureError
from tests.models import Layers, linear
from tests.runtimes.steps import assert_gradients, beside
from tests.tiers import tiered

BATCH, WIDTH = 8, 16

GRAPH = {"activation_budget": "100%", "runtime": "graph"}


class Looks(
    Layers, steps=lambda: nn.Buffer(torch.tensor(0)), first=linear(WIDTH, 4 * WIDTH), last=linear(4 * WIDTH, WIDTH)
):
    """Scales what it computes by a branch that ``look`` decides."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(x).relu(), 0.2, self.training)
        if self.look(self, labels, hidden):
            hidden = hidden.tanh()
        self.steps += 1
        return self.last(hidden).pow(2).mean()


def in_place(_model: nn.Module, labels: torch.Tensor, _hidden: torch.Tensor) -> torch.Tensor:
    shifted = labels.clone()
    shifted[1:] = labels[:-1]
    shifted[0] = 7
    return (shifted == 7).sum() > 1


def as_a_value(_model: nn.Module, labels: torch.Tensor, hidden: torch.Tensor) -> bool:
    found = labels.eq(7).any() or hidden.new_zeros(())
    return found.dtype == torch.bool


LOOKS: dict[str, Callable[..., Any]] = {
    "at a tensor": lambda _model, labels, _hidden: labels.eq(7).any(),
    "at a number": lambda _model, labels, _hidden: labels.eq(7).any().item(),
    "at a comparison of numbers": lambda _model, labels, _hidden: labels.sum().item() > 9,
    "and negates": lambda _model, labels, _hidden: not labels.eq(7).any(),
    "twice": lambda _model, labels, _hidden: labels.max() > 6 and labels.min() < 0,
    "at a buffer": lambda model, _labels, _hidden: model.steps % 2 == 0,
    "and keeps what it saw": as_a_value,
}
BATCHES = ([0, 1], [7, 1], [7, -100], [1, 7], [0, -1], [7, 7])


def batch(labels: list[int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, torch.tensor(labels * (BATCH // len(labels)))


def trained(model: nn.Module, step: int, labels: list[int]) -> tuple[list[torch.Tensor], RandomStates]:
    """Take one step; return loss, gradients, buffers and labels, and the random states."""
    torch.manual_seed(step)
    random.seed(step)
    given = batch(labels, step)
    model.zero_grad()
    loss = model(*given)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers()), given[1]], RandomStates()


def equal(ours: tuple[list[torch.Tensor], RandomStates], plain: tuple[list[torch.Tensor], RandomStates]) -> bool:
    return all(map(torch.equal, ours[0], plain[0])) and ours[1] == plain[1]


@pytest.mark.parametrize("look", tiered(LOOKS, slow=("at a number", "at a comparison of numbers", "and negates")))
def test_every_step_takes_the_branch_of_eager(look: str) -> None:
    plain, wrapped = beside(Looks(look=LOOKS[look]), **GRAPH)
    for step, labels in enumerate(BATCHES):
        assert equal(trained(wrapped, step, labels), trained(plain, step, labels)), (step, labels)


def test_what_the_forward_makes_itself_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def increases(_model: nn.Module, _labels: torch.Tensor, _hidden: torch.Tensor) -> torch.Tensor:
        return (torch.arange(4, device="cpu").diff() == 1).all()

    def looks(_branches: Branches, _inputs: Any) -> None:
        raise AssertionError("there is nothing to look at in a call")

    monkeypatch.setattr(Branches, "check", looks)
    plain, wrapped = beside(Looks(look=increases), **GRAPH)
    for step, labels in enumerate(BATCHES[:3]):
        assert equal(trained(wrapped, step, labels), trained(plain, step, labels))
    assert not [warning for warning in planner.plan_of(wrapped).warnings if warning.rule == "branches-taken"]


def test_a_program_for_each_branch_is_captured_once() -> None:
    model = planner.auto_wrap(Looks(look=LOOKS["at a tensor"]), **grouped(maximum_shapes=2, **GRAPH))
    for step, labels in enumerate(BATCHES * 2):
        trained(model, step, labels)  # a third capture would be one too many
    plan = planner.plan_of(model)
    assert plan is not None and plan.runtime == "graph"


@pytest.mark.parametrize(
    "look",
    [
        lambda model, _labels, _hidden: model.first.weight.sum() > 0,
        lambda _model, _labels, hidden: hidden.sum() > 0,
        lambda _model, _labels, _hidden: torch.rand(()) < 0.5,
        lambda _model, labels, _hidden: (labels + torch.rand(())).sum() < 0.5,
        in_place,
    ],
    ids=["at a parameter", "at what is computed", "at a random number", "at an input and a random number", "at writes"],
)
def test_what_is_known_only_when_it_runs_is_refused(look: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        capture(Looks(look=look), Inputs(batch([0, 1], 0), {}))


def test_a_check_that_fails_raises_what_it_raises_in_eager() -> None:
    def look(_model: nn.Module, labels: torch.Tensor, _hidden: torch.Tensor) -> bool:
        if labels.max() >= 100:
            raise ValueError("labels are below 100")
        return True

    model = planner.auto_wrap(Looks(look=look), budget=planner.Budget(activations="100%"))
    trained(model, 0, [0, 1])
    with pytest.raises(ValueError, match="labels are below 100"):
        model(*batch([0, 100], 1))
    trained(model, 2, [1, 2])
    plan = planner.plan_of(model)
    assert plan is not None and plan.runtime == "graph"


class Packs(Layers, table=lambda: nn.Embedding(16, WIDTH), mix=linear(WIDTH, WIDTH)):
    """Looks at positions that it makes itself, as many as there are embedded tokens, if none are given."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(tokens)
        if positions is None:
            positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        if (torch.diff(positions) != 1).any():
            x = x * 2.0
        loss: torch.Tensor = torch.tanh(self.mix(x)).square().mean()
        return loss


def test_a_size_that_varies_is_no_data_whatever_it_is_the_size_of() -> None:
    plain, wrapped = beside(Packs(), maximum_shapes=2, **GRAPH)
    for length in (8, 12, 20):  # one capture at a size, and one with symbols
        losses = []
        for model in (wrapped, plain):
            model.zero_grad()
            losses.append(model(torch.arange(2 * length).reshape(2, length) % 16))
            losses[-1].backward()
        assert torch.equal(*losses)
        assert_gradients(plain, wrapped)
