"""What is captured calls the kernels that eager training calls: upsampling is one operation, not thirty."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner.errors import CaptureError
from planner.ir.graph import LOSS_NAME, named_by
from tests.runtimes.steps import assert_gradients, measured_bytes, step
from tests.tiers import tiered

BESIDE = {"detach.default", "ones_like.default", "_unsafe_view.default", "lift_fresh_copy.default"}
"""What autograd adds, views and constants."""

LINES, IMAGES, VOLUMES = (2, 16, 300), (2, 16, 24, 20), (2, 16, 8, 10, 12)

CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), IMAGES),
    "nearest-exact": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), IMAGES),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "bicubic": (lambda x: F.interpolate(x, size=(40, 37), mode="bicubic", align_corners=True), IMAGES),
    "antialias": (lambda x: F.interpolate(x, size=(12, 11), mode="bilinear", antialias=True), IMAGES),
    "linear": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), LINES),
    "nearest, lines": (lambda x: F.interpolate(x, scale_factor=2), LINES),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), VOLUMES),
    "nearest, volumes": (lambda x: F.interpolate(x, scale_factor=2), VOLUMES),
    "softshrink": (F.softshrink, IMAGES),
    "hardshrink": (F.hardshrink, IMAGES),
    "multi margin": (lambda x: F.multi_margin_loss(x.flatten(1), torch.tensor([1, 2])), IMAGES),
    "multilabel margin": (lambda x: F.multilabel_margin_loss(x.flatten(1), torch.zeros(2, 7680).long()), IMAGES),
}


class Model(nn.Module):
    """One operation behind a convolution, so that its backward runs."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.operation, shape = CASES[case]
        kind = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
        self.enter = kind(shape[1], shape[1], 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(self.enter(x)).square().sum()  # type: ignore[no-any-return]


class Calls(TorchDispatchMode):
    """Count the operators that run, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(function)] += not function.is_view
        return function(*args, **(kwargs or {}))


def kernels(called: Iterable[str]) -> set[str]:
    return {name.removeprefix("aten.") for name in called} - BESIDE


QUICK = [("nearest", False), ("bilinear", True), ("softshrink", False)]


@pytest.mark.parametrize(("case", "channels_last"), tiered(product(CASES, [False, True]), quick=QUICK))
def test_a_planned_step_calls_the_kernels_of_eager(case: str, channels_last: bool) -> None:
    shape = CASES[case][1]
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d} if channels_last else {}
    layout = layouts.get(len(shape), torch.contiguous_format)
    x, model = torch.randn(shape).to(memory_format=layout), Model(case).to(memory_format=layout)
    with Calls() as calls:
        step(model, x)
    study = planner.study(model, x)
    called = {named_by(key)[1] for operation in study.graph.operations for key in operation.keys} - {LOSS_NAME}
    assert kernels(called) == kernels(+calls.counted)
    plan = study.plan(budget=planner.Budget(activations="100%"))
    planned = planner.auto_wrap(copy.deepcopy(model), budget=plan)
    peak_bytes = measured_bytes(planned, x) + plan.total_static_bytes
    assert 0.999 * plan.peak_bytes <= peak_bytes <= plan.peak_bytes
    assert_gradients(model, planned)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused_by_name(kind: type[nn.RNNBase]) -> None:
    """Tracing loses the dropout between layers, and what their kernels keep."""
    with pytest.raises(CaptureError, match=r"recurrent layers .*: the runtime 'modules' runs them"):
        planner.plan(kind(4, 4, 2, dropout=0.5), torch.randn(3, 2, 4), budget="100%", runtime="graph")
