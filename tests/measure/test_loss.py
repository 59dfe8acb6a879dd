"""A loss outside the model is measured wherever the model and the loss run, with data where they need that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import DependingOnData, Layers, Stack, mean_square, perceptron, rows
from tests.runtimes.steps import assert_same, beside, hold_peak, train

BUDGET = {"budget": "85%", "time_limit_seconds": 0.5}


class Forces(Layers, energy=perceptron, after=lambda: Stack(2, has_loss=False)):
    """Differentiates an energy by its own input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.after(forces)


def of_the_large(y: torch.Tensor) -> torch.Tensor:
    """Chooses rows by what is in them, as losses of detection do."""
    chosen = y.square().sum(1) > y.square().sum(1).median()
    return y[chosen.nonzero()[:, 0]].square().mean()


plain_stack, on_data = partial(Stack, has_loss=False), partial(DependingOnData, has_loss=False)


@pytest.mark.filterwarnings("ignore:runtime 'modules'")
@pytest.mark.parametrize(
    ("build", "loss_fn"), [(on_data, mean_square), (Forces, mean_square), (plain_stack, of_the_large)]
)
def test_what_needs_data_is_planned(build: Callable[[], nn.Module], loss_fn: Any) -> None:
    model, x = build(), rows(64)
    before = torch.get_rng_state()
    plain, model = beside(model, x, loss_fn=loss_fn, **BUDGET)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(train(plain, x, loss_fn), train(model, x, loss_fn), 1e-6)
    if build is not Forces:
        hold_peak(model, x, loss_fn=loss_fn, least=0.99)
