"""Equal pure operations are merged; draws of random numbers, reads around a write, and outputs are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import planner
from planner.capture.common_subexpressions import eliminate_common_subexpressions
from tests.models import Layers, linear
from tests.runtimes.steps import assert_same, beside, measured_bytes, train
from tests.session.test_eager_baseline import Own

Function = Callable[[torch.Tensor], torch.Tensor]


class Twice(Layers, linear=linear(16, 16)):
    """The same function of the same tensor, twice: in eager each call draws numbers of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return (2 * self.function(h) + self.function(h)).square().mean()


DRAWS: dict[str, Function] = {
    "alpha dropout": lambda h: functional.alpha_dropout(h, 0.3, training=True),
    "attention": lambda h: functional.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3)[0],
    "bernoulli": lambda h: h * torch.empty_like(h).bernoulli_(0.3),
    "dropout": lambda h: functional.dropout(h, 0.3),
    "multinomial": lambda h: h[torch.multinomial(h.detach().abs().sum(1), 8)].mean() * h,
    "rand_like": lambda h: h * torch.rand_like(h),
    "randperm": lambda h: h * h[torch.randperm(len(h))],
    "rrelu": lambda h: functional.rrelu(h, training=True),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_two_draws_stay_two(draw: str) -> None:
    plain, model = beside(Twice(function=DRAWS[draw]), budget="1GiB", runtime="graph")
    x = torch.randn(32, 16)
    assert_same(train(plain, x), train(model, x))


def test_draws_from_other_distributions_are_known_by_the_same_tag() -> None:
    in_place = ("cauchy", "exponential", "geometric", "log_normal", "normal", "uniform")
    for name in (*in_place, "poisson", "randint_like", "randn", "randn_like"):
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        assert all(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads), name


def merged(function: Callable[..., object], *inputs: torch.Tensor) -> list[str]:
    """Return what is left of the operations of a function, and check that its results stay."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    graph = eliminate_common_subexpressions(traced.graph)
    graph.lint()
    expected = traced(*(x.clone() for x in inputs))
    actual = fx.GraphModule(traced, graph)(*(x.clone() for x in inputs))
    assert all(map(torch.equal, actual, expected))
    return [node.target.overloadpacket.__name__ for node in graph.nodes if node.op == "call_function"]


def test_equal_operations_are_one_and_so_is_what_follows_from_them() -> None:
    x = torch.randn(4)
    assert merged(lambda x: [x.exp().sin() + x.exp().sin()], x) == ["exp", "sin", "add"]


def test_arguments_that_are_equal_in_python_alone_are_told_apart() -> None:
    def numbers(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([x / 0.0, x / -0.0]), torch.stack([x * 2, x * 2.0])]

    assert merged(numbers, torch.ones(3)).count("div") == 2
    assert merged(numbers, torch.ones(3)).count("mul") == 2


def test_outputs_that_are_equal_stay_two_tensors() -> None:
    assert merged(lambda x: [x.exp(), x.exp()], torch.randn(4)) == ["exp", "exp"]
    assert merged(lambda x: [x.exp().view(2, 2), x.exp().sin()], torch.randn(4)) == ["exp", "view", "exp", "sin"]


def test_reads_on_both_sides_of_a_write_stay_two() -> None:
    def writes(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 3
        before = y.exp()
        y.add_(1)
        return [before + y.exp(), y * 1]

    assert merged(writes, torch.randn(4)).count("exp") == 2


class _Plain(nn.Module):
    """A function of what is saved anyhow: tanh saves its result, and the product its factors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * functional.softplus(x).tanh()


class _Stack(Layers, layers=lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(6))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x.square().sum()


OWN: Any = Own.apply


@pytest.mark.parametrize("activation", [OWN, _Plain()], ids=["computes again", "saves"])
def test_a_captured_step_holds_no_more_than_eagers(activation: Any) -> None:
    plain, model = beside(_Stack(activation=activation), budget="1GiB", runtime="graph")
    x = torch.randn(512, 32)
    assert_same(train(plain, x), train(model, x))
    plan, captured_bytes, eager_bytes = planner.plan_of(model), measured_bytes(model, x), measured_bytes(plain, x)
    resident_bytes = sum(plan.static_bytes.values())
    assert captured_bytes <= eager_bytes
    assert captured_bytes == pytest.approx(plan.peak_bytes - resident_bytes, rel=1e-3)
    assert (plan.recompute_seconds > 0) is (activation is OWN) and plan.budget_bytes == 2**30
    assert plan.baseline_peak_bytes > eager_bytes + resident_bytes or activation is not OWN
