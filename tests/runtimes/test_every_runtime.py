"""One contract for every runtime, which a new one is held to by itself: prediction, bits, sizes, and no trace left."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import planner
from planner import runtimes
from planner.capture.inputs import expected_losses
from planner.common.options import chunks_of, grouped
from planner.common.units import parse_size
from planner.ir.static_memory import LossMemory
from tests.models import Layers, Stack, linear, mean_square, perceptron, rows
from tests.runtimes.steps import assert_same, hold_peak, step, train, verified
from tests.tiers import tiered

SIZES = (128, 512, 16, 512)


# Blocks keep their prediction below, where sizes change, and parts in test_contract.py, by a plan from a file.
@pytest.fixture(params=tiered(runtimes.names(), quick=["graph", "modules"]))
def runtime(request: pytest.FixtureRequest) -> runtimes.Runtime:
    return runtimes.get(request.param)


def wrap(model: nn.Module, *example: torch.Tensor, runtime: str, **options: Any) -> nn.Module:
    options = {"activation_budget": "70%", **options} if "budget" not in options else options
    return planner.auto_wrap(model, *example, **grouped(runtime=runtime, time_limit_seconds=1.0, **options))


def test_it_introduces_itself(runtime: runtimes.Runtime) -> None:
    assert runtime.summary
    assert 0.0 <= runtime.tolerance < 0.01
    assert isinstance(runtime.exact_peak, bool)


def test_real_steps_keep_the_prediction(runtime: runtimes.Runtime) -> None:
    model, x = Stack(2, block=partial(perceptron, dropout=0.1)), rows(512)
    asked = {"activation_budget": "70%", "time_limit_seconds": 1.0, "compare": False}
    plan = planner.plan(model, x, **grouped(runtime=runtime.name, **asked))
    proof = planner.verify(model, x, plan, timed_steps=1)
    assert proof.agrees, proof.differences
    assert proof.exact or runtime.tolerance > 0
    assert proof.peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    if runtime.exact_peak:  # sizes are rounded up to the allocator's alignment
        assert proof.peak_bytes >= 0.999 * plan.peak_bytes
        assert 0.999 * plan.baseline_peak_bytes <= proof.baseline_peak_bytes <= plan.baseline_peak_bytes


def test_a_wrapped_model_trains_and_leaves_no_trace(runtime: runtimes.Runtime) -> None:
    model, x = Stack(2, block=partial(perceptron, dropout=0.1)), rows(512)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = {name: type(module) for name, module in model.named_modules()}
    assert wrap(model, x, runtime=runtime.name) is model
    plan = planner.plan_of(model)
    model(x).backward()
    model(rows(128)).backward()
    assert planner.plan_of(model).budget_bytes == plan.budget_bytes, "the example counts as a step"
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model(x)
    planner.unwrap(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    again = planner.Plan.from_json(plan.to_json())
    assert again.runtime == plan.runtime
    planner.auto_wrap(model, x, budget=again)
    assert planner.plan_of(model).recomputations == plan.recomputations
    model(x).backward()


QUICK = [("graph", True), ("modules", False), ("regional", False)]
"""Inductor calls a C++ compiler, 'auto' is 'graph' here, and 'parts' has its sizes in test_parts.py."""


@pytest.mark.parametrize(("name", "has_loss"), tiered(product(runtimes.names(), (True, False)), quick=QUICK))
def test_a_percentage_is_of_the_largest_step_so_far(name: str, has_loss: bool) -> None:
    """Every size keeps its budget and has the gradients of the model unwrapped."""
    budget = "budget" if has_loss else "activation_budget"
    loss_fn = None if has_loss else mean_square
    plain = Stack(2, has_loss=has_loss)
    model = wrap(copy.deepcopy(plain), runtime=name, loss_fn=loss_fn, **{budget: "80%"})
    least = 0.998 if runtimes.get(name).exact_peak else 0.0  # of few rows rounding is more
    plans = []
    for count in SIZES:
        assert_same(
            train(plain, rows(count), loss_fn), train(model, rows(count), loss_fn), runtimes.get(name).tolerance
        )
        hold_peak(model, rows(count), loss_fn=loss_fn, least=least)
        plans.append(planner.plan_of(model))
    budgets = [plan.budget_bytes for plan in plans]
    assert budgets[0] < budgets[1]
    assert budgets[:2] == [share_of(plan, budget) for plan in plans[:2]]
    assert budgets[1:] == budgets[1:2] * (len(SIZES) - 1)
    assert plans[1].overhead > plans[2].overhead
    assert plans[2].overhead == 0 or not runtimes.get(name).exact_peak
    roomy = wrap(Stack(2, has_loss=has_loss), rows(SIZES[2]), runtime=name, loss_fn=loss_fn, budget=budgets[2])
    assert plans[2].recomputations == planner.plan_of(roomy).recomputations  # of Inductor's, what its backward does
    assert plans[3] == plans[1]


def share_of(plan: planner.Plan, budget: str) -> int:
    """Return what the percentage comes to of the eager step that this plan is held against, or that it is of."""
    whole_bytes = plan.eager.peak_bytes if plan.eager is not None else plan.baseline_peak_bytes
    if budget == "budget":
        return parse_size("80%", whole_bytes=whole_bytes)
    return plan.total_static_bytes + parse_size("80%", whole_bytes=whole_bytes - plan.total_static_bytes)


def test_a_percentage_stays_one_of_the_step_in_one_piece() -> None:
    def build() -> Stack:  # perceptrons far wider than what goes between them, which chunks are for
        return Stack(2, block=partial(perceptron, hidden=600))

    whole = planner.study(build(), rows(512)).problem("80%")
    model = planner.auto_wrap(build(), **grouped(budget="80%", chunk=4, time_limit_seconds=1.0))
    for count in (512, 256):
        model(rows(count)).backward()
        model.zero_grad()
        plan = planner.plan_of(model)
        assert chunks_of(plan.fingerprint) == 4
        assert plan.budget_bytes == whole.budget_bytes + whole.graph.total_static_bytes


def test_compiling_a_wrapped_model_runs_the_plan(runtime: runtimes.Runtime) -> None:
    torch.compiler.reset()  # what another test compiled is not compiled again
    model = wrap(Stack(2), runtime=runtime.name)
    for fullgraph in (False, True):
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        if runtime.name == "modules" and fullgraph:
            with pytest.raises(RuntimeError, match="no compiled frames"):  # it runs the model itself: torch says so
                compiled(rows())
        else:
            compiled(rows()).backward()
            assert planner.plan_of(model).recomputations


def test_under_a_dispatch_mode_the_model_runs_as_it_is(runtime: runtimes.Runtime) -> None:
    with FlopCounterMode(display=False) as expected:
        Stack(2)(rows()).backward()
    model = wrap(Stack(2), runtime=runtime.name)
    model(rows()).backward()
    with FlopCounterMode(display=False) as found, warnings.catch_warnings(record=True, action="always") as told:
        model(rows()).backward()
    is_told = any("dispatch mode" in str(one.message) for one in told)
    if runtime.name == "modules":  # its checkpoints run under any mode
        assert found.get_total_flops() > expected.get_total_flops() and not is_told
    else:
        assert found.get_total_flops() == expected.get_total_flops() and is_told


class Wide(Stack, wide=linear(32, 512)):
    """Gives much, or, if told what is wanted, a loss of one number behind which there is as much memory."""

    def forward(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        y = self.wide(super().forward(x))
        return y if wanted is None else F.mse_loss(y, wanted)


WANTED = torch.randn(512, 512)


@pytest.mark.parametrize(
    ("name", "is_outside"),
    tiered(product(["graph", "modules", "regional"], [False, True]), quick=[("graph", False), ("modules", True)]),
)
def test_a_loss_that_shrinks_counts_whole_and_one_outside_until_the_backward_ends(name: str, is_outside: bool) -> None:
    model, loss_fn = Wide(2, has_loss=False), (lambda given: F.mse_loss(given, WANTED)) if is_outside else None
    x = rows(512) if is_outside else (rows(512), WANTED)
    wrap(model, runtime=name, budget="90%" if is_outside else "100%", loss_fn=loss_fn)
    step(model, x, loss_fn)  # holds the output, as the step that is measured does
    hold_peak(model, x, loss_fn=loss_fn)


class WithAuxiliary(Stack):
    """Gives a scalar beside its result, as mixtures of experts do, whose loss takes some of both."""

    def forward(self, x: torch.Tensor) -> Any:
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            y = block(x)
            x, auxiliary = x + y, auxiliary + mean_square(y)
        return x, {"auxiliary": auxiliary, "again": x}


class Scaled(Layers, stack=lambda: WithAuxiliary(2), temperature=lambda: nn.Parameter(torch.ones(()))):
    """Gives a temperature before its result, as CLIP does beside its features."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.temperature.exp(), self.stack(x)[0]


@pytest.mark.filterwarnings("error:a gradient arrived")
@pytest.mark.parametrize("name", ["graph", "modules"])
def test_a_scalar_that_shares_nothing_with_other_outputs_is_no_loss(name: str) -> None:
    model = wrap(Scaled(), rows(512), runtime=name)
    step(model, rows(512), lambda outputs: mean_square(outputs[0] * outputs[1]))
    verified(Scaled(), rows(512), planner.plan_of(model))


EXACT = ("graph", "modules", "regional")

OF_OUTPUTS = {
    "both": lambda outputs: mean_square(outputs[0]) + 0.01 * outputs[1]["auxiliary"],
    "the result": lambda outputs: mean_square(outputs[0]),
    "the scalar": lambda outputs: outputs[1]["auxiliary"],
}


@pytest.mark.parametrize(
    ("name", "of"),
    tiered(product(runtimes.names(), OF_OUTPUTS), quick=[*product(EXACT, ["both"])]),
)
def test_the_loss_says_which_outputs_count(name: str, of: str) -> None:
    """The first step keeps to the plan too: nothing of it is run again for a gradient that was not expected."""
    plain = WithAuxiliary(2)
    model = wrap(copy.deepcopy(plain), rows(512), runtime=name, loss_fn=OF_OUTPUTS[of])
    runtime = runtimes.get(name)
    expected, found = (train(each, rows(512), OF_OUTPUTS[of]) for each in (plain, model))
    assert_same(expected, found, max(runtime.tolerance, 1e-6))  # tracing adds gradients up in another order
    hold_peak(model, rows(512), loss_fn=OF_OUTPUTS[of], least=0.999 if runtime.exact_peak else 0.0)


def test_what_a_forward_leaves_behind_is_no_output() -> None:
    """Dynamo gives it beside the outputs, before them or after."""
    measured = LossMemory(outputs=(((), True), ((4, 8), False)))
    assert expected_losses([(), (4, 8)], measured) == [0]
    assert expected_losses([(1, 8), (), (4, 8)], measured) == [1]
    assert expected_losses([(), (4, 8), (1, 8)], measured) == [0]
    assert expected_losses([(), (4, 8), (), (4, 8)], measured) == [0, 1, 2, 3]
    assert expected_losses([(), (4, 8)]) == [0]
    assert expected_losses([(1, 8), (4, 8)]) == [0, 1]
