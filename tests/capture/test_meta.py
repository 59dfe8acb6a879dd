"""Models on the meta device are planned as they will be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.inputs import Inputs, placed
from planner.common.options import grouped
from planner.plans.plan import Plan
from tests.models import SEQUENCES, Transformer
from tests.runtimes.steps import assert_same, train
from tests.tiers import tiered

OPTIONS: dict[str, Any] = {"budget": "80%", "deterministic": True, "time_limit_seconds": 0.5, "cost_model": "roofline"}


def decided(plan: Plan) -> tuple[Any, ...]:
    return plan.peak_bytes, plan.budget_bytes, plan.recomputations, plan.fingerprint


@pytest.mark.parametrize(("runtime", "device"), [("graph", "cpu"), ("regional", "meta"), ("modules", "meta")])
def test_its_plan_is_that_of_the_model_with_data(runtime: str, device: str) -> None:
    asked = grouped(runtime=runtime, compare=False, **OPTIONS)
    depth = 1 if runtime == "graph" else 2  # blocks are captured, and modules chosen, where there are several
    expected = planner.plan(Transformer(depth), SEQUENCES, **asked)
    model = Transformer(depth).to("meta")
    before = dict(model.named_parameters())
    assert decided(planner.plan(model, SEQUENCES.to(device), **asked)) == decided(expected)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("runtime", tiered(["auto", "regional"], slow=["regional"]))
def test_wrapped_there_and_allocated_later_it_trains_as_it_would(runtime: str) -> None:
    depth = 2 if runtime == "regional" else 1
    plain, model = Transformer(depth), Transformer(depth).to("meta")
    planner.auto_wrap(model, SEQUENCES, **grouped(runtime=runtime, **OPTIONS))
    plan = planner.plan_of(model)
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert_same(train(plain, SEQUENCES), train(model, SEQUENCES))
    assert planner.plan_of(model).recomputations == plan.recomputations != {}


def test_shared_parameters_stay_shared_and_what_has_data_keeps_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.register_buffer("kept", torch.ones(1))
    x = torch.ones(2, 4)
    with placed(model, Inputs.of(x)) as inputs:
        assert model[0].weight is model[1].weight and model[0].weight.device.type == "cpu"
        assert model.kept.item() == 1 and inputs.tensors() == [x]
    assert model[0].weight.is_meta and model[0].weight is model[1].weight


def test_one_with_statistics_is_checked_without_leaving_it() -> None:
    """Buffers without data can be neither compared nor restored."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.empty(4, 8)
    assert [found.rule for found in planner.check(model, x, loss_fn=torch.mean).findings] == ["batch-norm"]
