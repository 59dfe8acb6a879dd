"""Blocks planned one by one, with eager PyTorch around them: what is seen there is what really happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import UsageError
from tests.models import Layers, Trained, language_model, linear
from tests.runtimes.steps import wrap_and_hold
from tests.runtimes.test_contract import IMAGES, TABLE, Normed, Shared, Twice

ROWS, WIDTH = 256, 32


def plan(model: nn.Module, x: torch.Tensor, budget: str) -> planner.Plan:
    options = {"runtime": "regional", "time_limit_seconds": 1.0, "deterministic": True, "compare": False}
    return planner.plan(model, x, **grouped(activation_budget=budget, **options))


def test_blocks_that_do_not_fit_the_mould_stay_eager() -> None:
    found = plan(Twice(), TABLE, "100%").warnings
    left = {w.evidence: w.cause for w in found if w.rule == "block-left-eager"}
    assert left.keys() == {"block layers.0", "block layers.2"}
    assert "called 2 times" in left["block layers.0"]
    assert "returns" in left["block layers.2"]


def test_blocks_that_fill_a_cache_are_refused_with_the_way_out() -> None:
    model = language_model(num_hidden_layers=2).train()
    ids = torch.randint(64, (2, 8))
    with pytest.raises(UsageError, match=r"set model.config.use_cache = False .*, or use runtime='graph'"):
        planner.plan(model, {"input_ids": ids, "labels": ids}, budget="90%", runtime="regional")


def test_a_model_without_blocks_is_sent_elsewhere() -> None:
    with pytest.raises(UsageError, match=r"has no repeated blocks.*use runtime='graph'"):
        plan(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), TABLE, "100%")


def test_a_plan_of_several_ranks_is_not_verified_in_one_process() -> None:
    with pytest.raises(UsageError, match="verify runs one process"):
        sharded = planner.plan(
            Shared(), TABLE, **grouped(budget="100%", runtime="regional", data_parallel="fsdp2", ranks=2, compare=False)
        )
        planner.verify(Shared(), TABLE, sharded)


def test_a_block_has_its_own_forward_whenever_the_model_is_not_called() -> None:
    model = planner.auto_wrap(
        Normed(), IMAGES, **grouped(activation_budget="100%", runtime="regional", time_limit_seconds=1.0)
    )
    model(IMAGES).backward()
    model.eval()
    model(IMAGES).backward()  # planned anew: BatchNorm is another operation there
    assert all("forward" not in vars(module) for module in model.modules() if module is not model)


class Alike(Layers, layer=linear(WIDTH, WIDTH), drop=lambda: nn.Dropout(0.5)):
    """A block whose forward depends on more than its tensors."""

    scale, power = 1.0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.drop(self.layer(x)) * self.scale) ** self.power


def test_blocks_that_differ_in_anything_that_they_use_have_code_of_their_own(captures: list[Any]) -> None:
    blocks = nn.Sequential(Alike(), Alike(scale=2.0), Alike(power=2), *(Alike() for _ in range(4)))
    blocks[3].drop.eval()
    blocks[4].layer.weight.requires_grad_(False)
    blocks[5].layer.register_forward_hook(lambda module, inputs, output: -output)
    wrap_and_hold(Trained(nn.Linear(WIDTH, WIDTH), blocks), TABLE, activation_budget="100%", runtime="regional")
    assert len(captures) == 2 * 6  # the first and the last are equal
