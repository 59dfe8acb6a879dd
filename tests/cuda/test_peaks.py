"""What CUDA's allocator counts in a planned step, held against the plan: bytes asked for, allocated, reserved."""

from __future__ import annotations

import gc

import pytest
import torch

import planner
from benchmarks.blocks import built, counted
from planner.common.options import grouped
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()

MODELS: dict[str, dict[str, int]] = {
    "minigpt": {"layers": 2},
    "minimind-26m": {"layers": 2},
    "resnet50": {"layers": 2},
    "vit-b16": {"layers": 2},
    "bert-large": {"layers": 2},
    "unet": {"layers": 2},
}


@pytest.mark.parametrize("budget", ["100%", "70%"])
@pytest.mark.parametrize("name", tiered(MODELS, quick=["minigpt", "resnet50", "vit-b16"]))
def test_a_plan_says_what_is_asked_allocated_and_reserved(name: str, budget: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    model, example = built(name, **MODELS[name])
    options = {"runtime": "graph", "time_limit_seconds": 1}
    try:
        planner.auto_wrap(model, example, **grouped(budget=budget, **options))
    except planner.errors.InfeasibleBudgetError as refusal:  # little of so small a model can be recomputed
        least = refusal.minimum_feasible_peak_bytes
        planner.auto_wrap(model, example, **grouped(budget=least, **options))
    plan = planner.plan_of(model)
    seen = counted(model, example)
    assert plan.reserved is not None
    tensors = len(plan.operations) + len([*model.parameters(), *model.buffers()])  # each is rounded up
    assert abs(seen["requested"] - plan.peak_bytes) <= 512 * tensors
    assert seen["allocated"] == pytest.approx(plan.reserved.allocated_bytes, rel=1e-3)
    assert seen["allocated"] <= plan.budget_bytes
    assert seen["reserved"] == pytest.approx(plan.reserved.reserved_bytes, rel=0.01)
