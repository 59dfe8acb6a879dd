"""Gradients of inputs first, those of weights when they are asked for: the same bits, and nothing is held twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner.capture.inputs import Inputs
from planner.capture.joint import is_deferred
from planner.capture.planned_call import install_planned_call
from planner.common.options import Budget
from planner.extras.pipelines.deferred_weight_grads import LaterWeights
from planner.runtimes.graph import GraphRuntime
from planner.session.step import Options, captured, lower_as_run
from tests.models import WIDTH, Convolutions, Stack, images, perceptron, rows


class Shared(nn.Module):
    """One weight, used twice, and a bias that the input is added to first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x + self.bias)))


class Frozen(nn.Sequential):
    """A layer that does not train, between two that do."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self[1].requires_grad_(False)


MODELS = {
    "stack": (lambda: Stack(3, has_loss=False), rows),
    "dropout": (lambda: perceptron(dropout=0.3), rows),
    "convolutions": (lambda: Convolutions(), images),
    "shared": (Shared, rows),
    "frozen": (Frozen, rows),
}


def step(call: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    output = call(x)
    output.backward(torch.ones_like(output))
    return [p.grad for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_come_in_two_parts_with_eagers_bits(name: str, needs_input: bool) -> None:
    make, given = MODELS[name]
    torch.manual_seed(0)
    module = make()
    plain = make()
    plain.load_state_dict(module.state_dict())
    options = Options(budget=Budget("100%"), deferred=LaterWeights(), is_stage=True)
    runtime = GraphRuntime(module, options)
    later = options.deferred
    assert later is not None
    install_planned_call(module, runtime)
    for _ in range(2):  # the second adds to what is there
        x, same = (given().requires_grad_(needs_input) for _ in range(2))
        before = [None if g is None else g.clone() for g in (p.grad for p in module.parameters() if p.requires_grad)]
        expected, first = step(plain, plain, same), step(module, module, x)
        for now, then in zip(first, before, strict=True):
            assert (now is None) == (then is None) and (now is None or torch.equal(now, then))
        if needs_input:
            assert torch.equal(x.grad, same.grad)
        later.take()()
        found = [p.grad for p in module.parameters() if p.requires_grad]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        later.take()()  # nothing is left
        assert all(map(torch.equal, found, expected))


def test_only_what_weights_need_comes_last() -> None:
    module, x = Stack(2, has_loss=False), rows().requires_grad_()
    options = Options(budget=Budget("100%"))
    joint = captured(module, Inputs.of(x), options)
    step = lower_as_run(module, joint, Options(budget=Budget("100%"), deferred=LaterWeights()))
    operations = zip(step.lowered.graph.operations, step.lowered.operation_nodes, strict=True)
    late = [operation.target for operation, node in operations if is_deferred(node)]
    assert set(late) == {"aten.mm.default", "aten.sum.dim_IntList"} and len(late) == 8
    order = [is_deferred(node) for node in step.lowered.operation_nodes]
    assert order == sorted(order)
