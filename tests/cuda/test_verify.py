"""Bits on CUDA: two steps without a plan are the measure of one with it, unless torch is deterministic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from tests.cuda import gpu

gpu.required()


@pytest.mark.parametrize("strict", [False, True])
def test_a_control_is_run_where_bits_may_differ(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products are refused without it
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).to("cuda")
    x = torch.randn(256, 64, device="cuda")
    plan = planner.plan(model, x, budget="100%", target=planner.Target(cost_model="roofline"), loss_fn=torch.sum)
    torch.use_deterministic_algorithms(strict)
    try:
        found = planner.verify(model, x, plan, loss_fn=torch.sum, timed_steps=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.control == (None if strict else 0.0)
    assert found.agrees
