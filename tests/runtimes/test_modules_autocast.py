"""The runtime of checkpointed modules under autocast that the training loop puts around the model's call."""

from __future__ import annotations

import pytest
from torch import nn

import planner
from planner.capture.memory import record
from planner.plans.module_choices import modules_of
from tests.models import Convolutions, Stack, images, rows
from tests.runtimes.steps import UnderAutocast, assert_same, peak_of, step, train


class Tied(Stack):
    """One weight in the first block and in the last, between which others run."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[3][3].weight = self.blocks[0][3].weight


@pytest.mark.parametrize("build", [Stack, Tied, Convolutions])
def test_autocast_around_the_call_hides_no_module(build: type[nn.Module]) -> None:
    """Weights that it has cast are kept no longer than the call, where they could be given up with their module."""
    plain, trained = UnderAutocast(build()), UnderAutocast(build())
    trained.load_state_dict(plain.state_dict())
    x = images() if build is Convolutions else rows(512)
    planner.auto_wrap(trained.model, budget="85%", runtime="modules", time_limit_seconds=1.0)
    assert_same(train(plain, x), train(trained, x))
    trained.zero_grad()
    with record() as recording:
        step(trained, x)
    plan = planner.plan_of(trained.model)
    assert modules_of(plan)
    assert 0.99 * plan.peak_bytes <= plan.total_static_bytes + peak_of(recording, alignment_bytes=1) <= plan.peak_bytes
