"""Recurrent layers are captured as eager runs them: dropout between layers, oneDNN's LSTM in one piece."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from torch import nn

import planner
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.common.options import grouped
from tests.models import Recurrent
from tests.runtimes.steps import assert_same, train
from tests.tiers import tiered

BATCH, LENGTH, FEATURES, SIZE = 3, 4, 16, 24


class Stack(nn.Module):
    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.stack = getattr(nn, kind)(FEATURES, SIZE, **options)
        self.head = nn.LazyLinear(3)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        output, last = self.stack(x, None if state is None else (state, state.neg()))
        return self.head(output).square().mean() + sum(part.square().mean() for part in last)


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, FEATURES, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize(
    ("kind", "layers", "bidirectional"),
    tiered(
        product(("LSTM", "GRU", "RNN"), (1, 3), (False, True)),
        quick=[("LSTM", 1, False), ("LSTM", 3, True), ("GRU", 1, True), ("RNN", 1, False)],
    ),
)
def test_a_stack_gives_what_eager_gives(kind: str, layers: int, bidirectional: bool) -> None:
    options = {"num_layers": layers, "bidirectional": bidirectional, "dropout": 0.5 if layers > 1 else 0.0}
    model = Stack(kind, batch_first=True, **options)
    model(x())  # its lazy layer has drawn its weights
    expected = train(model, x())
    planner.auto_wrap(model, x(), budget="100%")
    torch.testing.assert_close(train(model, x()), expected, rtol=1e-4, atol=1e-6)


WITHOUT_BIAS, PROJECTED, PLAIN = {"bias": False}, {"proj_size": 8}, {}


@pytest.mark.parametrize(
    ("options", "dtype"),
    tiered(
        product((WITHOUT_BIAS, PROJECTED, PLAIN), (torch.float32, torch.bfloat16, torch.float64)),
        quick=[(WITHOUT_BIAS, torch.float32), (PROJECTED, torch.float64), (PLAIN, torch.bfloat16)],
    ),
)
def test_an_lstm_gives_what_eager_gives(options: dict[str, object], dtype: torch.dtype) -> None:
    model = Stack("LSTM", num_layers=2, dropout=0.5, **options)
    model(x())
    model.to(dtype)
    expected = train(model, x(dtype))
    planner.auto_wrap(model, x(dtype), budget="100%")
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(train(model, x(dtype)), expected, rtol=tolerance, atol=tolerance)


def test_what_comes_before_a_stack_of_16_bits_gets_its_gradient() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), Stack("LSTM", num_layers=2)).to(torch.bfloat16)
    model(x(torch.bfloat16))
    expected = train(model, x(torch.bfloat16))
    planner.auto_wrap(model, x(torch.bfloat16), budget="100%")
    assert_same(expected, train(model, x(torch.bfloat16)))


def test_an_lstm_under_autocast_has_the_bits_of_eager() -> None:
    model = Stack("LSTM", num_layers=2, bidirectional=True)
    model(x())

    def under_autocast(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x())
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    try:
        expected = under_autocast(model)
    except RuntimeError as error:  # oneDNN has no LSTM of 16 bits on processors without AVX-512
        planner.auto_wrap(model, budget="100%")
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:60])):
            under_autocast(model)
        return
    planner.auto_wrap(model, budget="100%")
    for actual, wanted in zip(under_autocast(model), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_a_state_that_is_given_gets_its_gradient() -> None:
    model = Stack("LSTM", num_layers=2)
    state = torch.randn(2, LENGTH, SIZE, generator=torch.Generator().manual_seed(3), requires_grad=True)
    model(x())
    expected, gradient = train(model, (x(), state)), state.grad.clone()
    state.grad = None
    planner.auto_wrap(model, (x(), state), budget="100%")
    assert_same(expected, train(model, (x(), state)))
    assert torch.equal(state.grad, gradient)


def test_a_layer_of_onednn_is_one_operation_each_way() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    model = Stack("LSTM", num_layers=3, batch_first=True)
    model(x())
    targets = [str(n.target) for n in capture(model, Inputs.of(x())).graph.nodes if n.op == "call_function"]
    assert targets.count("checkpoint_planner.lstm_layer.default") == 3
    assert targets.count("checkpoint_planner.lstm_layer_backward.default") == 3


# oneDNN keeps as much for the backward of a layer in evaluation, and gives gradients in 32 bits.
@pytest.mark.parametrize(
    ("training", "dtype"),
    tiered(
        product((True, False), (torch.float32, torch.bfloat16)), quick=[(True, torch.float32), (False, torch.bfloat16)]
    ),
)
def test_a_planned_stack_keeps_bits_and_budget(training: bool, dtype: torch.dtype) -> None:
    model = Stack("LSTM", num_layers=2, dropout=0.3, batch_first=True).train(training)
    model(x())
    model.to(dtype)
    wide = torch.randn(256, 4, FEATURES, dtype=dtype)
    plan = planner.plan(model, wide, **grouped(activation_budget="85%", time_limit_seconds=1.0, compare=False))
    proof = planner.verify(model, wide, plan, timed_steps=1)
    assert plan.recomputations
    assert proof.exact, proof.differences
    assert 0.999 * plan.peak_bytes <= proof.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("runtime", ["regional", "modules"])
def test_planning_leaves_a_layer_with_its_own_weights(runtime: str) -> None:
    model = Recurrent(width=FEATURES)
    expected = train(model, x())
    planner.auto_wrap(model, x(), budget="100%", runtime=runtime, search=planner.Search(time_limit_seconds=1.0))
    for layer in model.layers:  # what it last ran with, and tells a change by
        assert all(own is kept for own, kept in zip(layer.all_weights[0], layer._flat_weights, strict=True))
        assert all(own is ref() for own, ref in zip(layer.all_weights[0], layer._flat_weight_refs, strict=True))
    for _ in range(3):
        assert_same(expected, train(model, x()))
