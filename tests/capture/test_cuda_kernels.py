"""What would run on a GPU that is not here: attention kernels, their memory, workspace by allowance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cost_models
import planner
from planner.capture.cuda_attention import attention_on, choose
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.errors import PlanMismatchError
from planner.measure.cuda_workspace import allowance_bytes

BATCH, HEADS, LENGTH, SIZE = 2, 4, 96, 64


def heads(*, dtype: torch.dtype = torch.bfloat16, length: int = LENGTH, size: int = SIZE, count: int = HEADS) -> Any:
    return torch.empty(BATCH, count, length, size, dtype=dtype, device="meta")


def chosen(device: str, *, mask: torch.Tensor | None = None, **changes: Any) -> str:
    options = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    options |= {key: changes.pop(key) for key in list(changes) if key in options}
    shapes = {key: changes.pop(key, {}) for key in ("query", "key", "value")}
    made = [heads(**(changes | shape)) for shape in shapes.values()]
    return choose(cost_models.device(device), *made, mask, **options)


MASK = torch.empty(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("device", "case", "kernel"),
    [
        ("a100-80", {}, "flash"),
        ("h100", {}, "cudnn"),
        ("h200", {}, "cudnn"),
        ("b200", {}, "cudnn"),
        ("rtx-4090", {}, "flash"),
        ("mi300x", {}, "flash"),
        ("a100-80", {"dtype": torch.float32}, "efficient"),
        ("h100", {"dtype": torch.float32}, "efficient"),
        ("h100", {"dtype": torch.float64}, "math"),
        ("a100-80", {"mask": MASK}, "efficient"),
        ("h100", {"mask": MASK}, "cudnn"),
        ("h100", {"mask": MASK.float().requires_grad_()}, "efficient"),
        ("a100-80", {"mask": MASK, "is_causal": True}, "math"),
        ("a100-80", {"is_causal": True, "query": {"length": 8}}, "efficient"),
        ("a100-80", {"size": 256}, "flash"),
        ("a100-80", {"size": 264}, "efficient"),
        ("a100-80", {"size": 20, "dtype": torch.float32}, "efficient"),
        ("a100-80", {"size": 18, "dtype": torch.float32}, "math"),
        ("a100-80", {"size": 20}, "flash"),
        ("h100", {"size": 20}, "flash"),
        ("h100", {"size": 256}, "cudnn"),
        ("b200", {"size": 256}, "flash"),
        ("rtx-3090", {"size": 224}, "efficient"),
        ("rtx-3090", {"size": 256}, "flash"),
        ("rtx-3090", {"size": 256, "dropout_p": 0.1}, "efficient"),
        ("a100-80", {"key": {"count": 2}, "value": {"count": 2}, "enable_gqa": True}, "flash"),
        ("a100-80", {"key": {"count": 2}, "value": {"count": 2}, "enable_gqa": True, "mask": MASK}, "math"),
        ("h100", {"key": {"length": 1}, "value": {"length": 1}}, "flash"),
    ],
)
def test_the_kernel_that_torch_takes(device: str, case: dict[str, Any], kernel: str) -> None:
    assert chosen(device, **case) == kernel


def test_other_than_four_dimensions_and_unit_strides_go_to_the_fallback() -> None:
    spec = cost_models.device("a100-80")
    options = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    flat = torch.empty(BATCH, LENGTH, SIZE, dtype=torch.bfloat16)
    assert choose(spec, flat, flat, flat, None, **options) == "math"
    crossed = torch.empty(BATCH, HEADS, SIZE, LENGTH, dtype=torch.bfloat16).transpose(2, 3)
    assert choose(spec, crossed, crossed, crossed, None, **options) == "math"


class Attention(nn.Module):
    def __init__(self, *, dropout: float = 0.0, masked: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.mix = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE, dtype=dtype)
        self.dropout, self.masked = dropout, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in self.mix(x).chunk(3, dim=-1)
        )
        # A window: a causal mask would become a flag.
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-4) if self.masked else None
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=self.dropout)
        return mixed.float().square().sum()


def captured(device: str, *, length: int = LENGTH, **options: Any) -> Any:
    model = Attention(**options)
    x = torch.randn(BATCH, length, HEADS * SIZE, dtype=options.get("dtype", torch.bfloat16))
    return capture(model, Inputs.of(x), attention=attention_on(cost_models.device(device)))


@pytest.mark.parametrize(
    ("device", "options", "kernel"),
    [
        ("a100-80", {"dropout": 0.1}, "flash"),
        ("h100", {"dropout": 0.1}, "cudnn"),
        ("a100-80", {"dropout": 0.1, "masked": True}, "efficient"),
        ("a100-80", {"masked": True, "length": 97}, "efficient"),
        ("h100", {"masked": True}, "cudnn"),
        ("a100-80", {"dtype": torch.float32, "dropout": 0.1}, "efficient"),
    ],
)
def test_the_captured_step_runs_it_forward_and_backward(device: str, options: dict[str, Any], kernel: str) -> None:
    targets = [str(node.target) for node in captured(device, **options).graph.nodes if node.op == "call_function"]
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in targets
    assert f"aten._scaled_dot_product_{kernel}_attention_backward.default" in targets
    assert not any("softmax" in target for target in targets)


def test_the_fallback_is_made_of_single_operations() -> None:
    targets = [str(node.target) for node in captured("a100-80", dtype=torch.float64).graph.nodes]
    assert any("softmax" in target for target in targets)


def test_allowance_of_attentions_backward() -> None:
    (backward,) = (n for n in captured("a100-80").graph.nodes if "flash_attention_backward" in str(n.target))
    rounded = 128
    spec = cost_models.device("a100-80")
    assert allowance_bytes(backward, spec) == BATCH * HEADS * rounded * SIZE * 4 + BATCH * HEADS * rounded * 4


def test_allowance_of_a_convolution_is_what_it_moves_unless_channels_are_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten())
    image = torch.randn(2, 3, 16, 16)
    graph = capture(model, Inputs.of(image)).graph
    (forward,) = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    spec = cost_models.device("a100-80")
    assert allowance_bytes(forward, spec) == 4 * (2 * 3 * 16 * 16 + 8 * 3 * 3 * 3 + 2 * 8 * 16 * 16)
    last = capture(
        model.to(memory_format=torch.channels_last), Inputs.of(image.to(memory_format=torch.channels_last))
    ).graph
    (forward,) = last.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert allowance_bytes(forward, spec) == 0
    (other,) = last.find_nodes(op="placeholder")[:1]
    assert allowance_bytes(other, spec) == 0


def test_a_plan_for_a_gpu_that_is_not_here() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))
    plan = planner.plan(model, torch.randn(512, 64), activation_budget="90%", device="H100")
    assert plan.device == "h100" and plan.static_bytes["library workspace"] == 64 * 2**20
    assert all(size % 512 == 0 for size in plan.anatomy.values())
    assert "random state" not in plan.anatomy  # CUDA keeps it on the host
    assert "device-not-here" in {warning.rule for warning in plan.warnings}
    assert plan.reserved is not None
    assert plan.peak_bytes <= plan.reserved.allocated_bytes <= plan.reserved.reserved_bytes
    assert planner.Plan.from_json(plan.to_json()).reserved == plan.reserved


class Tower(nn.Module):
    """Attention with dropout in blocks and outside of them: a CPU has no fused kernel for it."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(dropout=0.1) for _ in range(3))
        self.last = Attention(dropout=0.1)
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        if self.looks and x.sum() > 1e9:
            x = 2 * x
        return self.last(x).float().square().mean()


@pytest.mark.parametrize("device", ["h100", "a100-80"])
def test_every_runtime_plans_with_the_kernels_of_that_gpu(device: str) -> None:
    x = torch.randn(BATCH, LENGTH, HEADS * SIZE, dtype=torch.bfloat16)
    plans = {
        runtime: planner.plan(Tower(), x, budget="100%", device=device, runtime=runtime, compare=False)
        for runtime in ("graph", "modules", "regional")
    }
    kernel = "cudnn" if device == "h100" else "flash"
    for plan in plans.values():
        found = [row.operation for row in plan.operations]
        assert sum(f"_scaled_dot_product_{kernel}_attention" in name and "backward" not in name for name in found) == 4
        assert not any("softmax" in name for name in found)
        assert "attention-of-here" not in {warning.rule for warning in plan.warnings}
    whole = plans["graph"].baseline_peak_bytes
    assert all(plan.baseline_peak_bytes == pytest.approx(whole, rel=0.02) for plan in plans.values())


def test_a_step_that_must_be_run_has_the_kernels_of_here_and_says_so() -> None:
    x = torch.randn(BATCH, LENGTH, HEADS * SIZE, dtype=torch.bfloat16)
    plan = planner.plan(Tower(looks=True), x, budget="100%", device="h100", runtime="modules", compare=False)
    assert {"depends-on-data", "attention-of-here"} <= {warning.rule for warning in plan.warnings}
    assert any("softmax" in row.operation for row in plan.operations)
    here = planner.plan(Tower(looks=True), x, budget="100%", runtime="modules", compare=False)
    assert "attention-of-here" not in {warning.rule for warning in here.warnings}


def test_it_is_not_verified_on_a_cpu() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(60, 60), nn.GELU()) for _ in range(6)))
    x = torch.randn(500, 60)
    plan = planner.plan(model, x, activation_budget="90%", device="a100-80")
    with pytest.raises(PlanMismatchError, match="device is 'a100-80' in the plan and 'cpu' here"):
        planner.verify(model, x, plan)
