"""Planned graphs run below autograd, as far as nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import planner
from planner.capture import torch_internals
from planner.capture.planned_graph_internals import below_autograd
from planner.capture.torch_internals import boxed
from tests.models import Layers

aten = torch.ops.aten


@torch.library.custom_op("planner_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Stand for an operator of a user's."""
    return x * 2


twice.register_fake(torch.empty_like)


def new(x: Tensor) -> list[Tensor]:
    """Return results with memory of their own, among them one that is seen through views only."""
    norm, _, deviation = aten.native_layer_norm(x.view(-1).view(4, 4), [4], None, None, 1e-5)
    return [norm, deviation, aten.relu_((x + 1).t())]


def is_given_twice(x: Tensor) -> list[Tensor]:
    """Return what shares memory."""
    y = x + 1
    return [y, y.view(-1)]


def is_cut(x: Tensor) -> list[Tensor]:
    """Return two parts of one tensor."""
    return [*torch.split(x + 1, 2)]


def is_shown(x: Tensor) -> list[Tensor]:
    """Return what it was given, in another shape."""
    return [x.view(-1)]


def writes_over(x: Tensor) -> list[Tensor]:
    """Write over what it was given, through a view."""
    aten.mul_(x.view(-1), 2)
    return [x + 1]


def writes_out(x: Tensor) -> list[Tensor]:
    """Write a result over what it was given."""
    return [aten.add.out(x, x, out=x)]


def has_a_users_operator(x: Tensor) -> list[Tensor]:
    """Run what is not torch's."""
    return [twice(x)]


BELOW_AUTOGRAD, BELOW_VIEWS = torch._C._AutoDispatchBelowAutograd, torch._C._AutoDispatchBelowADInplaceOrView


@pytest.mark.parametrize(
    ("function", "below"),
    [
        (new, BELOW_VIEWS),
        (is_given_twice, BELOW_AUTOGRAD),
        (is_cut, BELOW_AUTOGRAD),
        (is_shown, BELOW_AUTOGRAD),
        (writes_over, BELOW_AUTOGRAD),
        (writes_out, BELOW_AUTOGRAD),
        (has_a_users_operator, nullcontext),
    ],
)
def test_how_far_below(function: Callable[[Tensor], list[Tensor]], below: Any) -> None:
    traced = make_fx(function, tracing_mode="fake")(torch.ones(4, 4))
    assert below_autograd(traced.graph) is below
    given = torch.randn(4, 4)
    expected = traced(given.clone())
    with torch.no_grad():
        actual = boxed(traced)([given.clone()])
    assert all(map(torch.equal, actual, expected))


def test_what_is_not_noted_is_seen_by_nobody() -> None:
    traced = make_fx(new, tracing_mode="fake")(torch.ones(4, 4))
    with torch.no_grad():
        results = boxed(traced)([torch.ones(4, 4)])
    storages = {tensor.untyped_storage().data_ptr() for tensor in results}
    assert len(storages) == len(results)
    assert not any(tensor._is_view() for tensor in results)


class _Counts(Layers, weight=lambda: nn.Parameter(torch.randn(4, 4)), calls=lambda: nn.Buffer(torch.zeros(()))):
    """Returns what its backward needs, and counts its calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x @ self.weight).sigmoid()


def test_writes_are_counted_where_autograd_asks() -> None:
    model, x = _Counts(), torch.randn(2, 4)
    planner.auto_wrap(model, x, budget="100%", runtime="graph", search=planner.Search(time_limit_seconds=1))
    before = model.calls._version
    output = model(x)
    assert model.calls._version > before
    with pytest.raises(RuntimeError, match="modified"):
        output.mul_(2).sum().backward()


@pytest.mark.parametrize(("function", "below"), [(nullcontext, nullcontext), (below_autograd, BELOW_AUTOGRAD)])
def test_functions_that_are_no_operators_count_as_giving_what_they_take(function: Any, below: Any) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"),)),))
    assert below_autograd(graph) is below


def test_dropout_and_offload_leave_a_graph_below_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function for the random state in a graph let all of it run through autograd's kernels."""
    seen: list[Any] = []
    monkeypatch.setattr(torch_internals, "below_autograd", lambda graph: seen.append(below_autograd(graph)) or seen[-1])
    does = {"gelu": "offload", "native_dropout": "recompute"}
    model, x = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(), nn.Linear(512, 512)), torch.randn(512, 512)
    policy = lambda operation: does.get(operation.name)  # noqa: E731
    planner.auto_wrap(model, x, budget="100%", runtime="graph", offload=True, policy=policy)
    model(x).sum().backward()
    plan = planner.plan_of(model)
    assert plan.recomputations and plan.offloading is not None
    assert seen == [BELOW_VIEWS] * 2
