"""What would run on a GPU that is not here: attention kernels, their memory, workspace by allowance."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import cost_models
import planner
from planner.capture import cuda_attention
from planner.capture.cuda_attention import choose
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.capture.target_device import TargetDevice, takes_cudnn
from planner.common.options import Target, grouped
from planner.ir.schedule import Schedule
from planner.measure.cuda_workspace import allowance_bytes
from planner.rewrite.graphs import extract_fwd_bwd
from planner.session import step
from planner.session.step import Options
from tests.models import Layers, Stack

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
        ("mi300x", {}, "flash"),
        ("a100-80", {"dtype": torch.float32}, "efficient"),
        ("h100", {"dtype": torch.float64}, "math"),
        ("a100-80", {"mask": MASK}, "efficient"),
        ("h100", {"mask": MASK}, "cudnn"),
        ("h100", {"mask": MASK.float().requires_grad_()}, "efficient"),
        ("a100-80", {"mask": MASK, "is_causal": True}, "math"),
        ("a100-80", {"is_causal": True, "query": {"length": 8}}, "efficient"),
        ("a100-80", {"size": 264}, "efficient"),
        ("a100-80", {"size": 20, "dtype": torch.float32}, "efficient"),
        ("a100-80", {"size": 18, "dtype": torch.float32}, "math"),
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
def test_the_kernel_that_torch_takes(
    device: str, case: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "VERSION", (2, 13))
    assert chosen(device, **case) == kernel


GROUPED = {"key": {"count": 2}, "value": {"count": 2}, "enable_gqa": True, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("device", "case", "kernels"),
    [
        ("h100", {"dropout_p": 0.1}, ("cudnn", "flash", "flash", "flash")),
        ("h100", {"dropout_p": 0.125}, ("cudnn", "cudnn", "cudnn", "cudnn")),
        ("h100", {"size": 160}, ("cudnn", "cudnn", "cudnn", "flash")),
        ("b200", {"size": 256}, ("flash", "flash", "flash", "cudnn")),
        ("b200", {"query": {"length": 1}}, ("cudnn", "cudnn", "cudnn", "flash")),
        ("a100-80", GROUPED, ("math", "math", "math", "efficient")),
    ],
)
def test_the_kernel_that_a_version_takes(
    device: str, case: dict[str, Any], kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, kernel in zip(cuda_attention.RULES, kernels, strict=True):
        monkeypatch.setattr(cuda_attention, "VERSION", version)
        assert chosen(device, **case) == kernel, version
    monkeypatch.setattr(cuda_attention, "VERSION", (9, 0))
    assert chosen(device, **case) == kernels[-1]


def test_what_a_person_switched_off_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        assert chosen("h100") == "efficient"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert chosen("h100") == "flash"


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
        query, key, value = (part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        # A window: a causal mask would become a flag.
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-4) if self.masked else None
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=self.dropout)
        return mixed.float().square().sum()


def captured(device: str, *, length: int = LENGTH, **options: Any) -> Any:
    model = Attention(**options)
    x = torch.randn(BATCH, length, HEADS * SIZE, dtype=options.get("dtype", torch.bfloat16))
    return capture(model, Inputs.of(x), elsewhere=TargetDevice(cost_models.device(device)))


@pytest.mark.parametrize(
    ("device", "options", "kernel"),
    [
        ("a100-80", {"dropout": 0.1}, "flash"),
        ("h100", {"dropout": 0.125}, "cudnn"),
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
    plan = planner.plan(model, torch.randn(512, 64), budget=planner.Budget(activations="90%"), target="H100")
    assert plan.device == "h100" and plan.static_bytes["library workspace"] == 64 * 2**20
    assert all(size % 512 == 0 for size in plan.anatomy.values())
    assert "random state" not in plan.anatomy  # CUDA keeps it on the host
    assert "device-not-here" in {warning.rule for warning in plan.warnings}
    assert plan.reserved is not None
    assert plan.peak_bytes <= plan.reserved.allocated_bytes <= plan.reserved.reserved_bytes
    assert planner.Plan.from_json(plan.to_json()).reserved == plan.reserved


dropping = partial(Attention, dropout=0.125)


class Tower(Stack, last=dropping, looks=bool):
    """Attention with dropout in blocks and outside of them: a CPU has no fused kernel for it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(block=dropping, has_loss=False, **given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.looks and x.sum() > 1e9:
            x = 2 * x
        return self.last(x).float().square().mean()


def test_every_runtime_plans_with_the_kernels_of_that_gpu() -> None:
    x = torch.randn(BATCH, LENGTH, HEADS * SIZE, dtype=torch.bfloat16)
    plans = {
        runtime: planner.plan(Tower(), x, **grouped(budget="100%", device="h100", runtime=runtime, compare=False))
        for runtime in ("graph", "modules", "regional")
    }
    for plan in plans.values():
        found = [row.operation for row in plan.operations]
        assert sum("_scaled_dot_product_cudnn_attention" in name and "backward" not in name for name in found) == 4
        assert not any("softmax" in name for name in found)
        assert not {"attention-of-here", "attention-of-another-version"} & {found.rule for found in plan.warnings}
    whole = plans["graph"].baseline_peak_bytes
    assert all(plan.baseline_peak_bytes == pytest.approx(whole, rel=0.02) for plan in plans.values())


def test_a_step_that_must_be_run_has_the_kernels_of_here_and_says_so() -> None:
    x = torch.randn(BATCH, LENGTH, HEADS * SIZE, dtype=torch.bfloat16)
    plan = planner.plan(Tower(looks=True), x, **grouped(budget="100%", device="h100", runtime="modules", compare=False))
    assert {"depends-on-data", "attention-of-here"} <= {warning.rule for warning in plan.warnings}
    assert any("softmax" in row.operation for row in plan.operations)


def test_a_version_whose_choice_of_attention_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(BATCH, LENGTH, HEADS * SIZE, dtype=torch.bfloat16)
    monkeypatch.setattr(step, "VERSION", (9, 0))
    plan = planner.plan(Tower(), x, budget="100%", target="h100", search=planner.Search(compare=False))
    assert "attention-of-another-version" in {warning.rule for warning in plan.warnings}


def norms_of_rows() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16)).bfloat16()


class Norms(Layers, maps=lambda: nn.BatchNorm2d(8), rows=norms_of_rows):
    """What a GPU runs otherwise than a CPU: BatchNorm by cuDNN, RMSNorm as one operator, statistics of 32 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(self.maps(x).bfloat16()).float().square().mean()


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_norms_are_those_of_that_gpu(runtime: str) -> None:
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    plan = planner.plan(Norms(), x, **grouped(budget="100%", device="a100-80", runtime=runtime, compare=False))
    found = {row.operation: row for row in plan.operations}
    named = "|".join(found)
    for norm in ("cudnn_batch_norm", "_fused_rms_norm"):
        assert f"aten.{norm}.default" in named and f"aten.{norm}_backward.default" in named
    assert "rsqrt" not in named and "checkpoint_planner" not in named


def test_statistics_of_norms_have_32_bits_there() -> None:
    model, x = nn.LayerNorm(16).bfloat16(), torch.randn(4, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    for elsewhere, dtype in ((None, torch.bfloat16), (TargetDevice(cost_models.device("h100")), torch.float32)):
        (node,) = capture(model, Inputs.of(x), elsewhere=elsewhere).graph.find_nodes(
            op="call_function", target=torch.ops.aten.native_layer_norm.default
        )
        assert [t.dtype for t in node.meta["val"]] == [torch.bfloat16, dtype, dtype]


@pytest.mark.parametrize(
    ("rows", "dtype", "weight", "training", "takes"),
    [
        (4, torch.float32, torch.float32, True, True),
        (4, torch.float16, torch.float32, True, True),
        (4, torch.float16, torch.float16, True, False),
        (4, torch.bfloat16, torch.float32, True, False),
        (131_071, torch.float32, torch.float32, True, False),
        (262_137, torch.float32, torch.float32, False, False),
    ],
)
def test_batch_norm_by_cudnn(rows: int, dtype: torch.dtype, weight: torch.dtype, training: bool, takes: bool) -> None:
    x, ones = torch.empty(rows, 4, dtype=dtype, device="meta"), torch.empty(4, dtype=weight, device="meta")
    assert takes_cudnn(x, ones, ones, training) is takes


def test_running_statistics_are_updated_once_where_cudnn_runs_batch_norm_again() -> None:
    """It writes over them without a word in its schema: only its first run in a step may be given them."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)))
    inputs, options = Inputs.of(torch.randn(512, 16)), Options(target=Target("h100", cost_model="roofline"))
    lowered = step.lower_as_run(model, step.captured(model, inputs, options), options).lowered
    operations = lowered.graph.operations
    norms = [i for i, o in enumerate(operations) if "cudnn_batch_norm.default" in o.key]
    kept = Schedule.keep_all(lowered.graph).order
    at = next(i for i, index in enumerate(kept) if "cudnn_batch_norm_backward" in operations[index].key)
    schedule = Schedule((*kept[:at], *norms, *kept[at:]))
    forward, backward = extract_fwd_bwd(lowered, schedule)
    target = torch.ops.aten.cudnn_batch_norm.default
    first, again = ([*half.graph.find_nodes(op="call_function", target=target)] for half in (forward, backward))
    assert [len(first), len(again)] == [3, 3]
    assert all(node.args[3] is not None and node.args[4] is not None for node in first)
    assert all(node.args[3:6] == (None, None, True) for node in again)
