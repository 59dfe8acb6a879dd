"""Sums of gradients that autograd makes in place are in place in a recorded step too, and others are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.eager.record import record
from planner.capture.inputs import Inputs
from tests.models import Layers

SIZE = 64

Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def waited_for(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Let the sine hold the first gradient of ``h`` too: its turn comes after that of the second."""
    sine, cosine = w.sin(), h.cos()
    return (h + sine) * 2 + cosine


USES: dict[str, Use] = {
    "two products": lambda h, w: h @ w + h @ w.detach().t(),
    "a product beside": lambda h, w: h + h @ w,
    "views": lambda h, w: (h.view(8, 8, SIZE) @ w).view(SIZE, SIZE) + h.sin(),
    "a gradient that goes two ways": lambda h, w: (h + h.sin() @ w).tanh(),
    "one that goes three ways": lambda h, w: (h + w + h.cos()).tanh() @ w,
    "one that is held for another": waited_for,
    "twice the same": lambda h, w: (h + h).tanh() @ w,
    "another layout": lambda h, w: h.t().sin() @ w + h.cos(),
    "an expanded gradient": lambda h, w: h.sum(0, keepdim=True).sin() + h.mean(0, keepdim=True) @ w,
    "a norm": lambda h, w: h / h.norm() @ w,
}
"""What is made of a value and a parameter."""


def scale() -> nn.Parameter:
    return nn.Parameter(torch.ones(SIZE))


class Uses(Layers, scale=scale, weight=lambda: nn.Parameter(torch.randn(SIZE, SIZE))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x * self.scale, self.weight).sin().sum()


def sums_in_place(loss: torch.Tensor) -> int:
    """Run the backward, and count the sums whose result has the memory of what the engine was given first."""
    given: dict[tuple[Any, int], list[int]] = defaultdict(list)
    found = 0

    def ended(node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        for (following, slot), gradient in zip(node.next_functions, gradients, strict=True):
            if gradient is not None:
                given[following, slot].append(gradient.data_ptr())

    def begins(node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        nonlocal found
        for slot, gradient in enumerate(gradients):
            first, *others = given[node, slot] or [0]
            found += bool(others and gradient is not None and gradient.data_ptr() == first)

    pending = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_hook(lambda made, _given, node=node: ended(node, made))
            node.register_prehook(partial(begins, node))
            pending += [following for following, _ in node.next_functions]
    loss.backward()
    return found


@pytest.mark.parametrize("case", USES)
def test_sums_are_in_place_where_autograd_makes_them_so(case: str) -> None:
    model, x = Uses(use=USES[case]), torch.randn(SIZE, SIZE)
    trace = record(model, Inputs((x,), {}))
    in_place = sum(run.node.target is torch.ops.aten.add_.Tensor for run in trace.runs)
    assert in_place == sums_in_place(model(x))
    verified_as_recorded(model, x)


def verified_as_recorded(model: nn.Module, x: torch.Tensor) -> None:
    plan = planner.plan(model, x, runtime="modules", budget="100%", search=planner.Search(compare=False))
    measured = planner.verify(model, x, plan, timed_steps=1)
    assert measured.exact
    assert plan.peak_bytes - 1024 <= measured.peak_bytes <= plan.peak_bytes


class Spreading(torch.autograd.Function):
    """A program's own derivative writes beside its zeros."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x[:, ROWS]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_zeros(SIZE, SIZE).index_add(1, ROWS, gradient)


ROWS = torch.arange(SIZE // 2)
PICKED: dict[str, Use] = {
    "gather": lambda h, w: h.gather(1, ROWS.expand(SIZE, -1)) * w[0, : SIZE // 2],
    "topk": lambda h, w: h.topk(SIZE // 2, 1).values * w[0, : SIZE // 2],
    "index_select": lambda h, w: h.index_select(1, ROWS) * w[0, : SIZE // 2],
    "index": lambda h, w: h[:, ROWS] * w[0, : SIZE // 2],
    "take": lambda h, w: h.take(torch.arange(SIZE)) * w[0],
    "its own": lambda h, w: Spreading.apply(h) * w[0, : SIZE // 2],  # type: ignore[no-untyped-call]
}
"""What reads a part of a value: the gradient is written into zeros."""


@pytest.mark.parametrize("case", PICKED)
def test_derivatives_write_into_zeros_in_place_but_for_a_programs_own(case: str) -> None:
    verified_as_recorded(Uses(use=PICKED[case]), torch.randn(SIZE, SIZE))


class Hooked(Layers, weight=lambda: nn.Parameter(torch.ones(SIZE, SIZE))):
    """A program's own hook sums, too: what it makes is new."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        h.register_hook(lambda gradient: gradient * 2 + gradient * 3)
        return h.sin().sum()


def test_a_sum_of_a_hook_is_not_the_engines() -> None:
    trace = record(Hooked(), Inputs((torch.randn(SIZE, SIZE),), {}))
    assert torch.ops.aten.add_.Tensor not in [run.node.target for run in trace.runs]
