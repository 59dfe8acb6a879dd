"""Whole steps under CUDA's allocator, which says what a loop holds from before its first call."""

from __future__ import annotations

import pytest
import torch

import planner
from benchmarks import loops
from tests.cuda import gpu

gpu.required()


@pytest.mark.parametrize("name", ["teacher and student", "cached representations (GradCache)"])
def test_what_a_loop_holds_before_its_call_counts(name: str) -> None:
    torch.set_default_device("cuda")
    try:
        found = loops.tried(loops.LOOPS[name], share=0.65, seconds=0.5)
    finally:
        torch.set_default_device(None)
    assert all(step["peak_bytes"] <= found["budget_bytes"] for step in found["steps"])
    last = found["steps"][-1]
    assert 0.995 <= last["peak_bytes"] / last["predicted_bytes"] <= 1.001


def test_outputs_that_a_loop_drops_are_not_counted_in_blocks() -> None:
    model, x = torch.nn.Linear(1024, 50_000).cuda(), torch.randn(512, 1024).cuda()
    planner.auto_wrap(model, x, budget="8GiB", offload=False)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        model(x).log_softmax(1).mean().backward()
        model.zero_grad()
    predicted = planner.plan_of(model).reserved
    assert predicted and predicted.allocated_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=2e-3)
