"""Numbers that change from step to step: captured once more as inputs of the program, never again."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import planner
from planner.capture import programs
from planner.common.options import grouped
from planner.errors import CaptureError
from planner.runtimes import graph
from tests.models import Stack, mean_square, perceptron, rows, set_dropout
from tests.runtimes.steps import assert_gradients, assert_same, beside, hold_peak, train
from tests.tiers import tiered


class Annealed(Stack):
    """Scales what each block adds by a number of its own, or by one that it is called with."""

    share = 0.25

    def forward(self, x: torch.Tensor, share: float | None = None) -> torch.Tensor:
        share = self.share if share is None else share
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x) * share, 0.1)
        return mean_square(x) * (1 - share / 2)


class Counting(Stack):
    """Counts its steps, and scales what each block adds by that."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 2
        for block in self.blocks:
            x = x + block(x) * min(1.0, self.count / 50)
        return mean_square(x)


def wrapped() -> tuple[nn.Module, nn.Module]:
    return beside(Annealed(2), activation_budget="70%", time_limit_seconds=0.5)


@pytest.mark.parametrize("is_argument", tiered([False, True], quick=[False]))
def test_a_number_that_changes_costs_one_more_capture(is_argument: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="planner")
    plain, model = wrapped()
    for step in range(4):
        share = 0.1 + step / 7
        inputs = (rows(2048), share) if is_argument else (rows(2048),)
        plain.share = model.share = share
        assert_same(train(plain, inputs), train(model, inputs))
        hold_peak(model, inputs)
    assert len(caplog.records) == 2


def test_a_counter_that_the_forward_moves_is_captured_three_times_at_most(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="planner")
    plain, model = beside(Counting(2), activation_budget="70%", time_limit_seconds=0.5)
    for _ in range(5):
        assert_same(train(plain, rows()), train(model, rows()))
        assert model.count == plain.count
    assert len(caplog.records) <= 3


def test_each_backward_has_the_number_of_its_forward() -> None:
    plain, model = wrapped()
    for share in (0.1, 0.2):
        plain(rows(), share).backward(), model(rows(), share).backward()
    for trained in (plain, model):
        trained.zero_grad()
        torch.manual_seed(1)
        losses = [trained(rows(), share) for share in (0.3, 0.4, 0.5)]
        for loss in reversed(losses):
            loss.backward()
    assert_gradients(plain, model)


def test_sizes_and_numbers_change_together() -> None:
    plain, model = wrapped()
    for count, share in ((256, 0.1), (128, 0.2), (256, 0.4), (192, 0.5)):
        assert_same(train(plain, (rows(count), share)), train(model, (rows(count), share)))


@pytest.mark.slow
def test_old_numbers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_KEPT", 2)
    plain, model = wrapped()
    for share in (0.1, 0.2, 0.3, 0.4, 0.2, 0.1):
        assert_same(train(plain, (rows(), share)), train(model, (rows(), share)))


def test_a_number_that_tracing_pins_has_a_program_for_each_value(recwarn: pytest.WarningsRecorder) -> None:
    """A dropout's probability is one: annealed, or switched off for the last epochs."""
    dropping = Stack(2, block=partial(perceptron, dropout=0.1))
    plain, model = beside(dropping, activation_budget="70%", time_limit_seconds=0.5)
    for probability in (0.1, 0.3, 0.0, 0.3):
        for trained in (plain, model):
            set_dropout(trained, probability)
        assert_same(train(plain, rows(2048)), train(model, rows(2048)))
        hold_peak(model, rows(2048))
        assert planner.plan_of(model).runtime == "graph"
    assert not [str(warning.message) for warning in recwarn if "'modules'" in str(warning.message)]


class Reading(Stack):
    """Scales what each block adds by a number that it reads from a tensor of its own, as a count of labels is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.read(x.detach() > 0) / x.numel()
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x) * share, 0.1)
        return mean_square(x) * self.read(x.detach() > 1)


READ: dict[str, Callable[[torch.Tensor], int | float]] = {
    "int": lambda positive: int(positive.sum()),
    "float": lambda positive: float(positive.sum()),
}


@pytest.mark.parametrize("kind", tiered(READ, quick=["int"]))
def test_a_number_that_is_read_from_a_tensor_is_there_in_the_backward(kind: str) -> None:
    plain, model = beside(Reading(2, read=READ[kind]), activation_budget="70%", time_limit_seconds=0.5)
    for count in (1024, 512, 768, 1024):
        inputs = (rows(count),)
        assert_same(train(plain, inputs), train(model, inputs))
        hold_peak(model, inputs)
    assert planner.plan_of(model).runtime == "graph"


class Warming(Stack, steps=lambda: nn.Buffer(torch.zeros(()))):
    """Scales its loss by how many steps there were, which a buffer counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x) * (float(self.steps) / 10)


@pytest.mark.slow
def test_a_number_that_is_read_from_a_buffer_is_none_that_is_given() -> None:
    plain, model = beside(Warming(2), activation_budget="70%", time_limit_seconds=0.5)
    for count in (1024, 1024, 512, 1024):
        assert_same(train(plain, (rows(count),)), train(model, (rows(count),)))
        assert planner.plan_of(model).runtime == "graph"


class Checking(Stack):
    """Checks a number that it reads from a tensor, and computes nothing with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check((x.detach() > 0).sum().item() > 2)
        return super().forward(x)


@pytest.mark.slow
def test_a_number_that_is_only_checked_is_one_at_all_sizes(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    caplog.set_level(logging.INFO, logger="planner")
    plain, model = beside(Checking(2), activation_budget="70%", time_limit_seconds=0.5)
    for count in (1024, 512, 768):
        assert_same(train(plain, (rows(count),)), train(model, (rows(count),)))
    assert len(caplog.records) == 2
    assert not [str(warning.message) for warning in recwarn if "Raw Sym" in str(warning.message)]


class Noting(Stack, sizes=list[int]):
    """Notes in a list how large its batches were, and so looks at another list in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(x.shape[0])
        return super().forward(x)


def test_calls_that_are_all_captured_anew_are_said_with_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_OFTEN", 2)
    model = planner.auto_wrap(Noting(1), **grouped(activation_budget="70%", runtime="graph", time_limit_seconds=0.2))
    for _ in range(2):
        model(rows()).backward()
    with pytest.warns(
        UserWarning, match=r"no longer true that len\(self\.sizes\) == 1 \(at test_numbers\.py:\d+ in forward"
    ):
        model(rows()).backward()


# Numbers that a forward draws from Python's and numpy's random states: inputs of the captured program, eager's own.


class Mixing(Stack):
    """Mixes the rows of a batch by shares that it draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.draw()
        x = share * x + (1 - share) * x.flip(0)
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.1) * random.uniform(0.5, 1.5)
        return mean_square(x) * self.draw()


DRAWS: dict[str, Callable[[], Any]] = {
    "random": lambda: random.random(),
    "numpy.beta": lambda: numpy.random.beta(0.4, 0.4),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_what_draws_from_the_hosts_random_states_is_refused(draw: str) -> None:
    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        planner.plan(Mixing(draw=DRAWS[draw]), rows(), budget="100%", runtime="graph")
