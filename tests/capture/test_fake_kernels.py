"""Where fake tensors trace another layout than kernels give, the peak is still that of the kernels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner import runtimes
from planner.capture.eager.record import record
from planner.capture.inputs import Inputs
from planner.capture.joint import tensors_of
from planner.capture.joint_capture import capture
from planner.ir.static_memory import LossMemory
from planner.rewrite.graphs import _group_norm_backward as group_norm_backward
from tests.models import Layers, linear
from tests.runtimes.steps import assert_same, beside, measured_bytes, train, verified, wrap_and_hold_under_autocast
from tests.tiers import tiered


class Transposed(Layers, conv=lambda: nn.Conv1d(64, 64, 3, padding=1)):
    """A convolution over a transposed sequence; the backward of what follows gives a transposed gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = getattr(F, self.function)(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return ((x + y) ** 2).sum()


@pytest.mark.parametrize("function", tiered(["celu", "gelu", "softplus", "logsigmoid"], quick=["celu"]))
def test_what_follows_a_transposed_gradient_is_counted(function: str) -> None:
    model, x = Transposed(function=function), torch.randn(4, 64, 64, requires_grad=True)
    plan = planner.plan(model, x, budget="100%", search=planner.Search(compare=False))
    verified(model, x, plan)


class Normalized(Layers, norm=lambda: nn.BatchNorm1d(64), up=linear(64, 128)):
    """BatchNorm over the channels of a sequence, whose kernel undoes the transposition that fake tensors keep."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return ((y + F.glu(self.up(y))) ** 2).sum()


@pytest.mark.parametrize("training", tiered([True, False], slow=[False]))
def test_what_was_traced_as_a_view_and_can_only_be_copied_is_copied(training: bool) -> None:
    model, x = Normalized().train(training), torch.randn(4, 64, 64, requires_grad=True)
    plan = planner.plan(model, x, budget=planner.Budget(activations="100%"), search=planner.Search(compare=False))
    verified(model, x, plan)


class GroupNormalized(
    Layers, conv=lambda: nn.Conv2d(4, 8, 3, padding=1), norm=lambda: nn.GroupNorm(2, 8),
    scale=lambda: nn.Parameter(torch.randn(8)),
):  # fmt: skip
    """GroupNorm before a function whose derivative lays out a transposed gradient as it comes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = getattr(F, self.function)(self.norm(self.conv(x)))
        return (y.permute(0, 2, 3, 1) * self.scale).sum()


@pytest.mark.parametrize("function", tiered(["elu", "hardswish", "relu6", "gelu"], quick=["elu"]))
def test_what_copies_a_gradient_by_its_layout_computes_what_eager_does(function: str) -> None:
    """CPU kernels of GroupNorm's backward read it as if it were laid out as their input, up to torch 2.13."""
    eager, model = beside(GroupNormalized(function=function), budget="1GiB", cost_model="roofline")
    for size in (8, 6, 7):  # captured, captured with symbols, made plain
        x = torch.randn(2, 4, size, size)
        assert_same(train(eager, x), train(model, x))


def test_a_gradient_of_another_layout_is_copied_in_the_step() -> None:
    x = torch.randn(2, 8, 4, 4)
    weight = torch.ones(8)
    _, mean, rstd = torch.ops.aten.native_group_norm(x, weight, None, 2, 8, 16, 2, 1e-5)
    gradient = torch.randn(2, 8, 4, 4)
    told = (x, mean, rstd, weight, 2, 8, 16, 2, [True, True, True])
    expected = torch.ops.aten.native_group_norm_backward(gradient, *told)
    found = group_norm_backward(gradient.to(memory_format=torch.channels_last), *told)
    assert all(map(torch.equal, found, expected))


def weight(rows: int = 64) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, 64))


class TurnedGradients(Layers, turned=lambda: nn.ParameterList(map(weight, (64, 128, 192))), left=weight, right=weight):
    """Gradients of several sizes that come turned around, and one that two parameters get."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = [weight.t().clone(memory_format=torch.contiguous_format).sin() for weight in self.turned]
        return x * (torch.cat(copies, 1).sum() + (self.left + self.right).sin().sum())


@pytest.mark.parametrize("runtime", tiered(["graph", "inductor"], slow=["inductor"]))
def test_of_gradients_that_are_copied_one_at_a_time_is_there_twice(runtime: str) -> None:
    x = torch.ones(())
    plain, model = beside(TurnedGradients(), (x,), budget=2**40, runtime=runtime)
    assert_same(train(plain, x), train(model, x), runtimes.get(runtime).tolerance)
    found_bytes = measured_bytes(model, x)
    plan = planner.plan_of(model)
    weights_bytes = 4 * 64 * (64 + 128 + 192 + 64 + 64)
    assert found_bytes > weights_bytes + 4 * 64 * 192  # the largest, and not the sum of all that are copied
    assert 0 <= plan.peak_bytes - plan.total_static_bytes - found_bytes < 256  # sizes are rounded up


class Pooled(nn.Module):
    """Pooling of a batch of one that a transposition made: what its strides say is of no element but of the layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = (2 * x).transpose(1, 2).reshape(1, 64, 8, 16)
        return F.avg_pool2d(image, 2)


def test_a_batch_of_one_is_laid_out_as_kernels_see_it() -> None:
    model, x = Pooled(), torch.randn(1, 128, 64, requires_grad=True)
    pooled = [n for n in capture(model, Inputs((x,), {})).graph.nodes if "avg_pool2d.default" in str(n.target)]
    pooled += [
        run.node
        for run in record(model, Inputs((x,), {}), loss=LossMemory()).runs
        if "avg_pool2d.d" in str(run.node.target)
    ]
    assert [tensors_of(node)[0].stride() for node in pooled] == [model(x).stride()] * 2


class AsksForStrides(Layers, conv=lambda: nn.Conv2d(64, 64, 2, stride=2)):
    """Reads a convolution's result by strides that it asks for, which are in the program as numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv((2 * x).transpose(1, 2).reshape(1, 64, 8, 16))
        return (y * y.as_strided((1, 64, 32), (1, y.stride(1), y.stride(3))).sin().reshape(y.shape)).sum()


def test_strides_that_the_forward_asks_for_are_those_of_kernels() -> None:
    model, planned = beside(AsksForStrides(), activation_budget="100%", deterministic=True, runtime="graph")
    x = (torch.randn(1, 128, 64),)
    assert_same(train(model, x), train(planned, x))


class Turned(Layers, up=lambda: nn.ConvTranspose2d(64, 64, 2, stride=2)):
    """A loss between what is turned and what is not: its kernel's gradient has the usual layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = (2 * x).transpose(1, 2).reshape(1, 64, 8, 16)
        y = self.up(F.max_pool2d(image, 2))
        return F.mse_loss(y.flatten(2).transpose(1, 2), x.detach())


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_a_step_that_is_followed_has_the_layouts_of_kernels(runtime: str) -> None:
    model, x = Turned(), torch.randn(1, 128, 64)
    plan = planner.plan(model, x, budget="100%", runtime=runtime, search=planner.Search(compare=False))
    verified(model, x, plan, least=0.998)


class Normed(nn.Module):
    """Norms with weights of 32 bits, whose statistics wait for the backward."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.start = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        norms = {"layer": lambda: nn.LayerNorm(32), "batch": lambda: nn.BatchNorm1d(32)}
        norms["group"] = lambda: nn.GroupNorm(16, 32)
        self.norms = nn.ModuleList(norms[norm]() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(norm(x))
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("norm", "runtime"),
    tiered(
        product(("layer", "batch", "group"), ("graph", "regional", "modules")),
        quick=[("layer", "regional"), ("batch", "graph"), ("group", "modules")],
    ),
)
def test_statistics_of_norms_have_32_bits_under_autocast(norm: str, runtime: str) -> None:
    x = torch.randn(512, 16)
    wrap_and_hold_under_autocast(Normed(norm), x, activation_budget="200%", runtime=runtime, cost_model="roofline")
