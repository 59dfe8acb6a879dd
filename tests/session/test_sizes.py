"""Studies at many sizes of the inputs: each is that of a capture at that size, and few captures make them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.analysis.study import Study
from planner.capture.inputs import Inputs
from planner.common.options import grouped
from planner.errors import UsageError
from planner.session.step import Options
from planner.session.studying import studies_by_size
from tests.models import Convolutions, Transformer, images, mean_square
from tests.tiers import tiered


def said_by(study: Study) -> Any:
    """Return all that a study says of a step but the names that its nodes happen to have."""
    operations = [dataclasses.replace(operation, name="") for operation in study.graph.operations]
    values = [dataclasses.replace(value, name="") for value in study.graph.values]
    rest = {f.name: getattr(study.graph, f.name) for f in dataclasses.fields(study.graph)}
    rest |= {"operations": (), "values": ()}
    return operations, values, rest, study.costs, study.static_memory


@pytest.mark.parametrize("of", tiered(["length", "images"], quick=["length"]))
def test_each_size_is_what_a_capture_of_it_gives(of: str, captures: list[int]) -> None:
    model: nn.Module = Convolutions() if of == "images" else Transformer(1)
    inputs, loss_fn = Inputs.of(torch.randn(4, 6, 64)), None
    if of == "images":
        inputs, loss_fn = Inputs.of(images()), mean_square
    at = inputs.with_length if of == "length" else inputs.with_batch
    studies = studies_by_size(model, Options(target=planner.Target(cost_model="roofline")))
    made = {size: studies.at(at(size), loss_fn) for size in (1, 3)}
    assert len(captures) == 2  # of one row, and with symbols
    for size, study in made.items():
        alone = planner.study(model, at(size).args, target=planner.Target(cost_model="roofline"), loss_fn=loss_fn)
        assert said_by(study) == said_by(alone), size


@pytest.mark.parametrize("first", tiered([1, 4], quick=[4]))
def test_one_capture_serves_all_sizes_that_are_expected(first: int, captures: list[int]) -> None:
    model, inputs = Transformer(1), Inputs.of(torch.randn(4, 6, 64))
    studies = studies_by_size(model, Options(target=planner.Target(cost_model="roofline")))
    studies.expect([inputs.with_batch(8), inputs.with_length(5)])
    asked = [inputs.with_batch(first), inputs.with_batch(8), inputs.with_batch(3).with_length(7)]
    made = [studies.at(each) for each in asked]
    assert len(captures) == (2 if first == 1 else 1)  # of one row no symbol is made
    for each, study in zip(asked, made, strict=True):
        assert said_by(study) == said_by(planner.study(model, each.args, target=planner.Target(cost_model="roofline")))


class Summed(nn.Module):
    """The program itself depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        for at in range(x.shape[1]):
            state = torch.tanh(self.step(state) + x[:, at])
        return state.square().mean()


def test_a_size_that_makes_another_program_is_captured_by_itself() -> None:
    model, inputs = Summed(), Inputs.of(torch.randn(3, 4, 8))
    studies = studies_by_size(model, Options(target=planner.Target(cost_model="roofline")))
    for size in (2, 4):
        alone = planner.study(model, inputs.with_length(size).args, target=planner.Target(cost_model="roofline"))
        assert said_by(studies.at(inputs.with_length(size))) == said_by(alone)


def test_sizes_are_asked_about_in_python() -> None:
    model, x = Transformer(1), torch.randn(4, 6, 64)
    whole = planner.study(model, x, target=planner.Target(cost_model="roofline")).whole_bytes
    curve = planner.what_if(
        model,
        x,
        sizes={"batch_size": [8, 64], "seq_len": "4,64"},
        budgets=[whole, 2 * whole],
        **grouped(deterministic=True, time_limit_seconds=0.5, budget=2 * whole),
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
