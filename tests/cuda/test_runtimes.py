"""Every runtime on CUDA: it runs, holds what it says, and computes beside copies only where the plan lets it."""

from __future__ import annotations

import gc
import json
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn

import planner
from benchmarks.blocks import built, counted
from benchmarks.gpu_cases import Tower
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError
from planner.rewrite import host_copies
from tests.cuda import gpu
from tests.models import Convolutions
from tests.tiers import tiered

gpu.required()


def wrapped(runtime: str, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    model, x = Tower(256, 4).to("cuda"), torch.randn(8192, 256, device="cuda")
    options = {"runtime": runtime, "time_limit_seconds": 1, "deterministic": True, **options}
    try:
        planner.auto_wrap(model, x, **grouped(activation_budget="60%", **options))
    except InfeasibleBudgetError as refusal:
        planner.auto_wrap(model, x, **grouped(budget=refusal.minimum_feasible_peak_bytes, **options))
    return model, x


def others() -> int:
    """Return what is held on behalf of no model: cuDNN keeps the states that dropout of recurrent layers draws from."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # a plan counts these
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def allocated(model: nn.Module, x: torch.Tensor) -> int:
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(x).backward()
        model.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    ("runtime", "offload"),
    [("graph", False), ("graph", True), ("modules", False), ("regional", False), ("regional", True), ("parts", True)],
)
def test_what_is_allocated_is_what_is_said(runtime: str, offload: bool) -> None:
    before_bytes = others()
    sends = lambda operation: "offload" if operation.name == "gelu" else None  # noqa: E731
    model, x = wrapped(runtime, offload=offload, policy=sends if offload else None)
    plan = planner.plan_of(model)
    seen = allocated(model, x) - before_bytes
    assert plan.reserved is not None
    assert seen <= plan.budget_bytes
    assert seen == pytest.approx(plan.reserved.allocated_bytes, rel=1e-3)
    if offload:
        assert plan.offloading is not None and plan.offloading.values


def compiled(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if name == "convolutions":
        return Convolutions(2, 32).to("cuda"), {"x": torch.randn(32, 32, 32, 32, device="cuda")}
    if name == "tower":
        return Tower(256, 4).to("cuda"), {"x": torch.randn(8192, 256, device="cuda")}
    return built(name, layers=2)


def train_compiled(runtime: str, name: str, offload: bool) -> None:
    """Print what is allocated and reserved for a model, what its plan says of that, and the budget."""
    model, example = compiled(name)
    # What a fast link takes is offloaded; nothing is where recompute is cheaper.
    options = {"runtime": runtime, "time_limit_seconds": 1, "deterministic": True}
    options |= {"offload": offload, **({"link": "450GB/s"} if offload else {})}
    try:
        planner.auto_wrap(model, example, **grouped(activation_budget="70%", **options))
    except InfeasibleBudgetError as refusal:
        planner.auto_wrap(model, example, **grouped(budget=refusal.minimum_feasible_peak_bytes, **options))
    seen, plan = counted(model, example), planner.plan_of(model)
    assert plan.reserved is not None and plan.runtime == runtime
    assert plan.offloading.values if offload else plan.recomputations
    assert host_copies.POOL.peak_bytes == (plan.offloading.host_bytes if offload else 0)
    print(json.dumps([seen["allocated"], seen["reserved"], *astuple(plan.reserved), plan.budget_bytes]))


@pytest.mark.parametrize("name", tiered(["tower", "convolutions", "minigpt"], quick=["tower"]))
@pytest.mark.parametrize("runtime", ["inductor", "inductor_blocks"])
@pytest.mark.parametrize("offload", [False, True])
def test_compiled_code_holds_what_is_said_of_it(runtime: str, name: str, offload: bool) -> None:
    """Its wrapper runs as it is, so that torch's own allocator counts it; what other tests left is not in its way."""
    pytest.importorskip("triton")
    code = f"from tests.cuda.test_runtimes import train_compiled\ntrain_compiled({runtime!r}, {name!r}, {offload})"
    allocated_bytes, reserved_bytes, *said, budget_bytes = json.loads(gpu.run(code).splitlines()[-1])
    assert allocated_bytes <= budget_bytes
    assert allocated_bytes == pytest.approx(said[0], rel=5e-3)
    assert reserved_bytes == pytest.approx(said[1], rel=0.03)


@gpu.only_fake
def test_a_planned_step_waits_for_the_device_no_more_than_eager() -> None:
    model, x = wrapped("graph", offload=False)
    allocated(model, x)
    before = gpu.calls()
    model(x).backward()
    after = gpu.calls()
    assert after.synchronisations == before.synchronisations
    assert after.copies_to_host == before.copies_to_host


@gpu.only_fake
def test_a_mask_is_looked_at_no_more_often_than_in_eager() -> None:
    """Transformers looks at each batch's padding, and so does a captured step whose masks are flags."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **sizes)).to("cuda").train()
    tokens = torch.ones(2, 64, dtype=torch.int64).to("cuda")

    def waits() -> tuple[int, int]:
        for _ in range(3):
            before, mask = gpu.calls(), tokens.clone()
            model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
            after = gpu.calls()
            model.zero_grad()
        return after.synchronisations - before.synchronisations, after.copies_to_host - before.copies_to_host

    in_eager = waits()
    given = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
    options: dict[str, Any] = {"runtime": "graph", "time_limit_seconds": 1, "cost_model": "roofline"}
    planner.auto_wrap(model, given, **grouped(activation_budget="80%", **options))
    assert waits() <= in_eager
