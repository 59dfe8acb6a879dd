"""Sizes of inputs that what-if is asked about in Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.capture.inputs import Inputs
from planner.common.options import grouped
from planner.errors import UsageError
from tests.models import Trained


def test_sizes_are_asked_about_in_python() -> None:
    model, x = Trained(nn.Linear(64, 64), nn.GELU()), torch.randn(4, 6, 64)
    whole = planner.study(model, x, target=planner.Target(cost_model="roofline")).whole_bytes
    curve = planner.what_if(
        model,
        x,
        sizes={"batch_size": [2, 8, 64], "seq_len": "4,64"},
        budgets=[whole, 2 * whole],
        **grouped(deterministic=True, time_limit_seconds=1.0, budget=2 * whole),
    )
    assert curve.batch_sizes is not None and curve.seq_lens is not None
    assert curve.batch_sizes.budget_bytes == curve.seq_lens.budget_bytes == 2 * whole
    assert curve.batch_sizes.largest is not None and curve.batch_sizes.largest.size == 8
    assert [row.outcome.fits for row in curve.seq_lens.rows] == [True, False]
    assert "batch_sizes" not in curve.report()  # the curve's own fields are what they were


def test_what_cannot_be_asked_is_refused_before_anything_is_captured(captures: list[int]) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for asked, words in (
        ({"sizes": {"batch_size": "1..4"}}, "give budget"),
        ({"sizes": {"batch_size": "4..1"}, "budget": 2**20}, "smaller end first"),
        ({"sizes": {"seq_len": "some"}, "budget": 2**20}, "cannot read sequence lengths"),
        ({"sizes": {"seq_len": []}, "budget": 2**20}, "cannot read sequence lengths ''"),
        ({"sizes": {"batch_size": [1.5]}, "budget": 2**20}, "cannot read batch sizes '1.5'"),
        ({"sizes": {"batch_size": [4, 2]}, "budget": 2**20}, "out of order"),
    ):
        with pytest.raises(UsageError, match=words):
            planner.what_if(model, x, **asked)
    assert not captures


def test_inputs_of_another_size_keep_values_layout_and_gradients() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    picture = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    mask = torch.ones(2, 1, 3, 3)
    inputs = Inputs.of({"ids": ids, "picture": picture, "mask": mask, "weight": torch.ones(7)})
    larger = inputs.with_batch(5).kwargs
    assert larger["ids"].tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6], [1, 2, 3]]
    assert larger["picture"].is_contiguous(memory_format=torch.channels_last) and larger["picture"].requires_grad
    assert larger["weight"].shape == (7,) and inputs.with_batch(2).kwargs["ids"] is ids
    longer = inputs.with_length(4).kwargs
    assert longer["ids"].tolist() == [[1, 2, 3, 1], [4, 5, 6, 4]] and longer["mask"].shape == (2, 1, 4, 4)
    with pytest.raises(UsageError, match="no sequence length"):
        Inputs.of(torch.ones(3)).with_length(4)
