"""``torch.compile(..., backend=planner.backend(budget=...))``: graphs that share a budget, and what goes with it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.memory import record
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError, RuntimeUnsupportedError, UsageError
from planner.runtimes._backend import Backend
from tests.models import SEQUENCES, OneLinear, Stack, Transformer, mean_square, perceptron, rows
from tests.runtimes.steps import assert_gradients, assert_same, peak_of, step, train
from tests.tiers import tiered

AMPLE = "1GiB"

RUNTIMES = tiered(["graph", "inductor"], slow=["inductor"])  # which calls a C++ compiler
TOLERANCE = {"graph": 0.0, "inductor": 1e-4}

SHARE = {"graph": 0.8, "inductor": 1.1}
"""Of eager's peak: plans for Inductor are made on graphs that hold more."""


class Broken(nn.Module):
    """Two stacks, and Python between them that Dynamo cannot follow."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        block = partial(perceptron, dropout=dropout)
        self.first, self.second = Stack(1, block, has_loss=False), Stack(1, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def backend(budget: Any = AMPLE, runtime: str = "graph", **options: Any) -> Backend:
    return planner.backend(
        budget=budget, **grouped(runtime=runtime, time_limit_seconds=0.3, cost_model="roofline", **options)
    )


class Compiled(nn.Module):
    """Trains as the model does that it was compiled from."""

    def __init__(self, model: nn.Module, backend: Backend, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.backend = backend
        self.compiled: Callable[..., Any] = torch.compile(model.__call__, backend=backend, **options)

    def forward(self, *args: Any) -> Any:
        return self.compiled(*args)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


def peak_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Measure a step, with all that is resident."""
    model.zero_grad()
    with record() as recording:
        step(model, x)
    return peak_of(recording) + sum(p.nbytes for _, p in model.named_parameters()) + x.nbytes


def hold(plain: nn.Module, x: torch.Tensor, share: float, runtime: str = "graph", **options: Any) -> Backend:
    """Hold three compiled steps to plain ones, and to a budget."""
    budget = int(share * peak_bytes(copy.deepcopy(plain), x))
    model = Compiled(copy.deepcopy(plain), backend(budget, runtime, offload=options.pop("offload", False)), **options)
    for _ in range(2):
        assert_same(train(plain, x), train(model, x), TOLERANCE[runtime])
        assert peak_bytes(model, x) <= budget
    return model.backend


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_graphs_share_one_budget_and_say_so(runtime: str) -> None:
    share = hold(Broken(dropout=0.2), rows(512), SHARE[runtime], runtime)
    first, second = share.plans.values()
    assert first.recomputations and second.recomputations
    assert all(any(w.rule == "share-of-budget" for w in plan.warnings) for plan in (first, second))
    assert str(share).startswith("2 planned graphs under one budget of")
    assert "graph 1: " in str(share) and "graph 2: " in str(share)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_graphs_offload(runtime: str) -> None:
    share = hold(Broken(dropout=0.2), rows(2048), SHARE[runtime], runtime, offload=True)
    assert all(plan.offloading and plan.offloading.values for plan in share.plans.values())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_graph_has_all_of_it(runtime: str) -> None:
    plan = next(iter(hold(Stack(2), rows(512), SHARE[runtime], runtime, fullgraph=True).plans.values()))
    assert plan.recomputations


def test_what_nothing_keeps_is_refused_by_an_error_of_ours() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"no plan fits 10\.0 KiB: .* graph 1 needs at least"):
        Compiled(Stack(1), backend("10KiB"))(rows())


@pytest.mark.slow
def test_a_later_graph_that_does_not_fit_beside_earlier_ones_is_refused() -> None:
    plain, x = Broken(), rows(512)
    least = 0.5 * peak_bytes(copy.deepcopy(plain), x)
    with pytest.raises(InfeasibleBudgetError, match="graph 2 needs at least"):
        Compiled(plain, backend(int(least)))(x)


@pytest.mark.slow
def test_blocks_that_are_compiled_one_by_one_share_it_too() -> None:
    """Dynamo has one graph for equal blocks; each call of it holds memory of its own."""
    plain, x = Transformer(6), SEQUENCES
    model = copy.deepcopy(plain)
    budget = int(0.8 * peak_bytes(copy.deepcopy(plain), x))
    share = backend(budget)
    for block in model.blocks:
        block.compile(backend=share, fullgraph=True)
    for _ in range(3):
        assert_same(train(plain, x), train(model, x))
        assert peak_bytes(model, x) <= budget
    # The first is given what needs no gradient; all others are calls of one graph, and equal ones share their code.
    assert set(share.plans) == {"graph 1", "graph 2", *(f"graph 2, call {number}" for number in range(2, 6))}
    assert any(plan.recomputations for plan in share.plans.values())
    assert len({id(call.made) for call in share._calls()}) <= 4


@pytest.mark.slow
def test_two_forwards_before_a_backward_count_twice() -> None:
    plain, x = Stack(2), rows(512)
    model = Compiled(copy.deepcopy(plain), backend())

    def both(one: nn.Module) -> torch.Tensor:
        return one(x) + one(-x)

    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        both(plain).backward()
        both(model).backward()
        assert_gradients(plain, model)
    assert set(model.backend.plans) == {"graph 1", "graph 1, call 2"}


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "dynamic"), [("graph", None), ("graph", True), ("inductor", True)])
def test_every_size_has_a_plan(runtime: str, dynamic: bool | None) -> None:
    plain = Broken()
    model = Compiled(copy.deepcopy(plain), backend(runtime=runtime), dynamic=dynamic)
    for count in (64, 128, 96, 128):
        assert_same(train(plain, rows(count)), train(model, rows(count)), TOLERANCE[runtime])
    assert any("sizes 2" in name for name in model.backend.plans)


def test_so_many_sizes_and_no_more() -> None:
    model = Compiled(Stack(1), backend(maximum_shapes=2), dynamic=True)
    for count in (8, 16):
        model(rows(count)).backward()
    with pytest.raises(RuntimeUnsupportedError, match=r"pass runtime=Runtime\(maximum_shapes="):
        model(rows(24))


class Sized(OneLinear):
    """Computes with a size after the break, and gives a number beside a tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        count = x.shape[0] * 2 + 1
        y = self.linear(x)
        torch._dynamo.graph_break()
        return mean_square(y) / count, count


def test_numbers_that_follow_from_sizes_cross_a_break() -> None:
    model, plain = Sized(), Sized()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=backend(), dynamic=True)
    for count in (8, 24, 16):
        found, expected = compiled(rows(count)), plain(rows(count))
        assert found[1] == expected[1] and torch.equal(found[0], expected[0])
        found[0].backward()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_without_gradients_nothing_is_planned(runtime: str) -> None:
    plain = Broken()
    model = Compiled(plain, backend("1KiB", runtime))
    with torch.no_grad():
        torch.testing.assert_close(model(rows()), plain(rows()))
    plain.requires_grad_(False)
    torch.testing.assert_close(model(rows()), plain(rows()))
    assert not model.backend.plans


@pytest.mark.slow
def test_autocast_around_it_holds_for_plans_made_later() -> None:
    plain, x = Broken(), rows()
    model = Compiled(copy.deepcopy(plain), backend())
    for _ in range(3):
        left = []
        for one in (plain, model):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(x)
            loss.backward()
            left.append({name: p.grad.clone() for name, p in one.named_parameters()} | {"loss": loss.detach()})
        assert_same(*left)


def test_the_first_call_holds_nothing_that_its_callers_let_go() -> None:
    share = backend()
    compiled = torch.compile(Stack(1), backend=share)
    x = rows()
    gone = [weakref.ref(x)]
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            loss = compiled(x)
            gone.append(weakref.ref(loss))
            loss = None
        x = None
        assert [it() for it in gone] == [None] * 3
        assert share.plans  # nothing was held when it was called again
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"mode": "reduce-overhead"}, "does not work with a memory plan: leave it out"),
        ({"mode": "max-autotune"}, "use 'max-autotune-no-cudagraphs'"),
        ({"options": {"fallback_random": False}}, "option 'fallback_random'"),
        ({"options": {"max_autotun": True}}, "did you mean 'max_autotune'"),
        ({"mode": "fast"}, "unknown mode 'fast'"),
    ],
)
def test_what_no_plan_goes_with_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Compiled(Stack(1), backend(runtime="inductor"), **asked)(rows())


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"mode": "default"}, {"options": {"epilogue_fusion": False}}])
def test_modes_and_options_go_to_inductor(asked: dict[str, Any]) -> None:
    hold(Stack(2), rows(), 1.3, "inductor", **asked)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"budget": "80%"}, "does not know what the whole step takes"),
        ({"budget": 0}, "above zero"),
        ({"runtime": "modules"}, "of runtime 'inductor' or 'graph', not 'modules'"),
        ({"solver": "best"}, "best"),
    ],
)
def test_wrong_arguments_are_refused_at_once(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        planner.backend(**grouped(**{"budget": "1GiB", **asked}))


def test_modes_are_not_for_eager_kernels() -> None:
    with pytest.raises(UsageError, match="Inductor's: leave them out"):
        Compiled(Stack(1), backend(), mode="max-autotune")(rows())


def test_resetting_the_compiler_forgets_the_graphs() -> None:
    model = Compiled(Stack(1), backend())
    model(rows()).backward()
    model(rows()).backward()
    assert model.backend.plans
    model.backend.reset()
    assert not model.backend.plans
