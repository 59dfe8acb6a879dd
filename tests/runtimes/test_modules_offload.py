"""Modules that send what they save to the host: what was predicted happens, to the byte and to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.analysis.trade_off.answers import methods_beside
from planner.analysis.trade_off.curve import CurveSweep
from planner.capture.torch_internals import installed_call
from planner.common.limits import SolveLimits
from planner.common.options import Search, grouped
from planner.errors import InfeasibleBudgetError, PlanFileError, RuntimeUnsupportedError, UsageError
from planner.ir.checkpoints import schedule_of
from planner.ir.host import Host
from planner.ir.problem import Problem, Solution
from planner.ir.simulator import simulate
from planner.plans.module_choices import modules_of, variants_in
from planner.plans.offload import OffloadedModule
from planner.report import render
from planner.rewrite import host_copies
from planner.runtimes._hooks import Waiting
from planner.solvers import checkpoints
from planner.solving.modules.ilp import keeping
from planner.solving.modules.offload import (
    cheapest_with_offload,
    moved,
    offloading_variants,
    sending,
    sending_given,
    widened,
)
from tests.models import SEQUENCES, Convolutions, Transformer, images, rows
from tests.planned import by_hand, printed
from tests.runtimes.steps import assert_gradients, beside, wrap_and_hold
from tests.runtimes.test_modules import Stack, choices, problem_of

OPTIONS: Any = {"runtime": "modules", "offload": True, "offload_at_least": 1024, "time_limit_seconds": 1.5}


def plan_for(model: nn.Module, x: Any, budget: str) -> planner.Plan:
    return planner.plan(model, x, **grouped(activation_budget=budget, compare=False, **OPTIONS))


SEND, RUN_AGAIN, BOTH, KEEP_AND_SEND = range(4)

MIXED = (BOTH, SEND, KEEP_AND_SEND, SEND)


def take(monkeypatch: pytest.MonkeyPatch, kinds: tuple[int, ...], *, shift: int = 0) -> None:
    """Let plans take a way for each block, with transfers that begin and end so many modules earlier and later."""
    variants = {f"blocks.{number}": kind for number, kind in enumerate(kinds)}

    def choose(problem: Problem, regions: Any, *_: Any) -> Solution:
        region_of = {region.module: region for region in regions}
        taken = []
        for name, kind in variants.items():
            variant = region_of[name]
            if kind == KEEP_AND_SEND:
                variant = keeping(variant, variant.keepable[:1])
            taken.append(variant if kind == RUN_AGAIN else sending(variant) if kind == SEND else sending_given(variant))
        names = [name for name, kind in variants.items() if kind != RUN_AGAIN]
        later = dict(zip(names, names[shift:], strict=False))
        taken = [moved(variant, taken, later.get(variant.module), later.get(variant.module)) for variant in taken]
        return by_hand(problem, schedule_of(problem.graph, taken), regions=tuple(taken))

    monkeypatch.setattr(checkpoints, "cheapest_with_offload", choose)


class Given(nn.Module):
    """Is given tensors by position, by name and in a tuple, and returns views of what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, pair: Any, *, beside: torch.Tensor, times: float) -> tuple[torch.Tensor, ...]:
        y = torch.sigmoid(self.first(x.t().contiguous().t()) + pair[0])
        return (times * self.second(y * beside)).chunk(2, -1)


class GivesAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Given() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            parts = block(x.sin(), (x.cos(), 1), beside=x.exp(), times=2.0)
            x = torch.cat(parts, -1).tanh()
        return x.square().mean()


@pytest.mark.parametrize(
    ("model", "x", "kinds", "shift"),
    [
        pytest.param(Transformer(4), SEQUENCES, MIXED, 0, marks=pytest.mark.slow),
        (Transformer(4, cast=True), SEQUENCES, MIXED, 2),
        pytest.param(GivesAll(), rows(), MIXED, 0, marks=pytest.mark.slow),
        (GivesAll(), rows(), MIXED, 1),
        (Convolutions(), images(), (BOTH, SEND, BOTH, SEND), 1),
        pytest.param(Convolutions(), images(), (SEND, RUN_AGAIN, SEND, BOTH), 1, marks=pytest.mark.slow),
    ],
)
def test_every_way_is_as_predicted(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: torch.Tensor, kinds: tuple[int, ...], shift: int
) -> None:
    take(monkeypatch, kinds, shift=shift)
    plan = wrap_and_hold(model, x, activation_budget="97%", **OPTIONS)
    assert plan.offloading is not None and plan.offloading.modules
    assert planner.Plan.from_json(plan.to_json()) == replace(plan, operations=())


# The choice.


def host_at(rate: float) -> Host:
    return Host(bytes_per_second=rate, budget_bytes=2**40, least_bytes=64)


@pytest.mark.parametrize("rate", [2e5, 2e6])
def test_the_bound_is_one_and_the_choice_is_near_it(rate: float) -> None:
    problem, regions = problem_of(Stack(2), rows(64), host_at(rate))
    variants = offloading_variants(regions, problem.graph, problem.costs)
    chosen = [[variants[r] for r in numbers] for numbers in choices(variants)]
    found = [problem.evaluate(schedule_of(problem.graph, taken)) for taken in chosen]
    lowest, highest = min(one.peak_bytes for one in found), problem.baseline.peak_bytes
    for part, host_bytes in ((0, 2**40), (1, 2**40), (2, 2**16), (3, 2**40)):
        posed = replace(
            problem,
            budget_bytes=lowest + (highest - lowest) * part // 4,
            host=Host(bytes_per_second=rate, budget_bytes=host_bytes, least_bytes=64),
        )
        clock = SolveLimits(time_limit_seconds=5).clock()
        solution = cheapest_with_offload(posed, regions, clock)
        assert posed.evaluate(solution.schedule).host_bytes <= host_bytes
        assert solution.peak_bytes <= posed.budget_bytes
        fitting = [
            taken
            for taken, one in zip(chosen, found, strict=True)
            if one.peak_bytes <= posed.budget_bytes and one.host_bytes <= host_bytes
        ]
        best = min(widened(posed, taken)[1].added_seconds for taken in fitting)
        assert solution.lower_bound_seconds <= best * (1 + 1e-9)
        assert solution.added_seconds <= best + 0.05 * problem.baseline.seconds


def test_budgets_that_no_checkpoint_keeps() -> None:
    model = Stack()
    with pytest.raises(InfeasibleBudgetError) as alone:
        planner.plan(model, rows(), budget=planner.Budget(activations=64), runtime="modules")
    with pytest.raises(InfeasibleBudgetError) as together:
        plan_for(model, rows(), "1%")
    budget = together.value.minimum_feasible_peak_bytes
    assert budget < alone.value.minimum_feasible_peak_bytes
    plan = planner.plan(model, rows(), **grouped(budget=budget, **OPTIONS))
    assert plan.offloading is not None and plan.minimum_feasible_peak_bytes == budget
    shown = printed(render, plan, width=100, full=True)
    assert "in the host's memory" in shown and "of the tensors that it saves" in shown
    with pytest.raises(InfeasibleBudgetError, match=r"bytes\): give that much as host_budget") as small:
        planner.plan(model, rows(), **grouped(budget=budget, host_budget=4096, **OPTIONS))
    needed: Any = small.value.__cause__
    enough = planner.plan(model, rows(), **grouped(budget=budget, host_budget=needed.host_budget_bytes, **OPTIONS))
    assert enough.offloading is not None and enough.offloading.host_bytes <= needed.host_budget_bytes


def test_more_of_the_budget_buys_time_to_hide() -> None:
    problem, regions = problem_of(Transformer(4), SEQUENCES, host_at(2e6))
    posed = replace(problem, budget_bytes=problem.baseline.peak_bytes * 6 // 10)
    found, again = (
        cheapest_with_offload(posed, regions, SolveLimits(time_limit_seconds=2, deterministic=True).clock())
        for _ in range(2)
    )
    assert found.regions == again.regions and found.schedule == again.schedule
    tight = [
        replace(variant, sent=(variant.sends.saved, variant.sends.given)[bool(variant.recompute)])
        for variant in found.regions
        if variant.sent
    ]
    assert any(variant.leaves_with or variant.returns_with for variant in found.regions)
    evaluation = posed.evaluate(
        schedule_of(posed.graph, [*(variant for variant in found.regions if not variant.sent), *tight])
    )
    assert evaluation.stall_seconds > posed.evaluate(found.schedule).stall_seconds


# Plans.


def test_a_plan_is_carried_over_and_refused_elsewhere() -> None:
    plan = plan_for(Stack(), rows(), "45%")
    assert plan.offloading is not None
    model = planner.auto_wrap(Stack(), budget=planner.Budget(plan=plan, replan=True))
    model(rows(128)).backward()
    over = planner.plan_of(model)
    assert over.offloading is not None and (
        over.offloading.modules == plan.offloading.modules or not over.added_seconds
    )
    with pytest.raises(UsageError, match="made for something else"):
        planner.auto_wrap(Stack(3), rows(), budget=plan)
    with pytest.raises(PlanFileError, match="tensors"):
        planner.Plan.from_json(plan.to_json().replace('"tensors": [', '"tensors": ["x", ', 1))
    assert variants_in(plan, ()) is None


def test_a_study_offloads_as_a_plan_does() -> None:
    step = planner.study(Stack(), rows(), runtime="modules")
    told = {**OPTIONS, "deterministic": True, "compare": False}
    plan = planner.plan(Stack(), rows(), **grouped(activation_budget="45%", **told))
    del told["runtime"]
    asked = step.plan(**grouped(activation_budget="45%", **told))
    for found in (plan, asked):
        assert found.offloading is not None and found.offloading.modules
    assert replace(asked, capture_seconds=plan.capture_seconds, solve_seconds=plan.solve_seconds) == plan
    assert step.plan(budget=planner.Budget(activations="70%")).offloading is None, (
        "what was asked before leaves nothing behind"
    )


def test_a_curve_of_choices_of_modules() -> None:
    """Every point is a choice of modules, which arbitrary schedules of the eager step are not."""
    told: Any = {"runtime": "modules", "budgets": 4, "time_limit_seconds": 4.0}
    alone = planner.what_if(Stack(), rows(), **grouped(**told))
    step = planner.study(Stack(), rows(), runtime="modules")
    for point in alone.points[:-1]:
        assert point.overhead is not None
        plan = step.plan(budget=point.budget_bytes, search=planner.Search(time_limit_seconds=2.0))
        assert plan.overhead == pytest.approx(point.overhead) and plan.peak_bytes == point.predicted_peak_bytes
        assert modules_of(plan)
    assert alone.points[-1].overhead == 0 and alone.points[0].budget_bytes == alone.minimum_feasible_peak_bytes
    both = planner.what_if(Stack(), rows(), **grouped(offload=True, offload_at_least=1024, **told))
    assert both.minimum_feasible_peak_bytes <= alone.minimum_feasible_peak_bytes
    assert any(point.host_bytes for point in both.points)
    with pytest.raises(UsageError, match="'ilp' decides on a whole graph"):
        planner.what_if(Stack(), rows(), **grouped(solver="ilp", **told))


def test_other_ways_beside_such_a_curve() -> None:
    step = planner.study(Stack(), rows(), runtime="modules")
    tracing = CurveSweep(step, Search(time_limit_seconds=2.0), points=2, host=step.host("1GiB", 1024))
    tracing.run()
    every, second, chunked, alone = methods_beside(tracing, ["every-layer", "every-2", "chunked", "recompute"])
    layers = [region for region in step.regions if region.module.count(".") == 1]
    found = simulate(step.graph, step.costs, schedule_of(step.graph, layers))
    assert every.points[0].predicted_peak_bytes == found.peak_bytes + step.graph.total_static_bytes
    assert 0 < second.points[0].overhead < every.points[0].overhead
    assert not chunked.points and "alone, not 'chunked'" in chunked.reason
    assert len(alone.points) == 2 and not any(point.host_bytes for point in alone.points)
    for name in ("ilp", "pytorch"):
        with pytest.raises(UsageError, match="decides on a whole graph"):
            methods_beside(tracing, [name])


def test_an_audit_of_a_plan_is_of_choices_of_modules() -> None:
    plan = plan_for(Stack(), rows(), "45%")
    assert plan.offloading is not None
    found = planner.audit(Stack(), rows(), search=planner.Search(time_limit_seconds=2.0), current=plan, budget="90%")
    assert (found.now.peak_bytes, found.now.added_seconds) == (plan.peak_bytes, pytest.approx(plan.added_seconds))
    assert found.now.offloading is not None and found.now.offloading.host_bytes == plan.offloading.host_bytes
    assert not found.notes and found.fits
    for best in (found.best, found.within_budget):
        assert best is not None and best.runtime == "modules" and best.added_seconds <= plan.added_seconds
    layers = planner.audit(Stack(), rows(), current="every-layer", **grouped(runtime="modules", time_limit_seconds=2.0))
    assert layers.now.recompute_seconds > 0 and modules_of(layers.best)


def test_nothing_changes_without_offload() -> None:
    alone = planner.plan(Stack(), rows(), **grouped(activation_budget="70%", runtime="modules", compare=False))
    allowed = plan_for(Stack(), rows(), "100%")
    assert alone.offloading is None and "offload" not in alone.report()
    assert alone.fingerprint == allowed.fingerprint


# Running.


class Fails(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.failing: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
            if self.failing and block is self.blocks[2]:
                raise ValueError("broken off")
        return x.square().mean()


def test_nothing_is_left_after_steps_that_break_off() -> None:
    model = Fails().eval()
    wanted = torch.autograd.grad(model(rows()), list(model.parameters()))
    pool = host_copies.POOL = host_copies.Pool()
    planner.auto_wrap(model, rows(), **grouped(activation_budget="45%", **OPTIONS))
    with torch.no_grad():
        model(rows())
    assert pool.peak_bytes == 0
    model(rows()).backward()
    assert pool.peak_bytes > 0 and pool.in_use_bytes == 0
    model.zero_grad()
    model.failing.append("now")
    with pytest.raises(ValueError, match="broken off") as raised:
        model(rows())
    assert all(installed_call(m) is None for name, m in model.named_modules() if name)
    del raised
    assert pool.in_use_bytes == 0
    model.failing.clear()
    loss = model(rows())
    assert pool.in_use_bytes > 0
    del loss
    assert pool.in_use_bytes == 0
    found = torch.autograd.grad(model(rows()), list(model.parameters()))
    assert all(map(torch.equal, wanted, found))


def test_two_steps_at_once_and_backwards_again(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, MIXED, shift=1)
    torch.manual_seed(0)
    plain, wrapped = beside(Transformer(4, dropout=0.0), SEQUENCES, activation_budget="97%", **OPTIONS)
    assert planner.plan_of(wrapped).offloading.modules and modules_of(planner.plan_of(wrapped))
    for model in (plain, wrapped):
        losses = [model(SEQUENCES), model(2 * SEQUENCES)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
    assert_gradients(plain, wrapped)
    assert host_copies.POOL.in_use_bytes == 0


def test_double_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, MIXED, shift=1)
    torch.manual_seed(0)
    plain = Stack().eval()
    wrapped = copy.deepcopy(plain)
    x = rows().requires_grad_()
    planner.auto_wrap(wrapped, x, **grouped(activation_budget="97%", **OPTIONS))
    assert planner.plan_of(wrapped).offloading.modules
    for model in (plain, wrapped):
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        gradient.square().sum().backward()
    assert_gradients(plain, wrapped)


# The hooks alone.


def saved_by(call: Any, *numbers: int) -> tuple[Waiting, Any]:
    waiting = Waiting([OffloadedModule(module="m", tensors=numbers, leaves_with="m", returns_with="m")])
    with waiting.saving("m"):
        return waiting, call()


@pytest.mark.parametrize("numbers", [(), (0,)])
def test_what_is_changed_after_it_was_saved_is_refused(numbers: tuple[int, ...]) -> None:
    p = torch.randn(8, requires_grad=True)
    x = p * 2
    waiting, loss = saved_by(lambda: x.sin().sum(), *numbers)
    x.add_(1)
    waiting.end()
    with pytest.raises(RuntimeUnsupportedError, match="'m' saved for its backward was changed in place"):
        loss.backward()


def test_what_is_changed_after_it_was_let_go_is_right_or_refused() -> None:
    p = torch.randn(8, requires_grad=True)
    for sent in (True, False):
        x = p * 2
        waiting, loss = saved_by(lambda x=x: x.sin().sum(), *((0,) if sent else ()))
        waiting.end()
        x.add_(1)
        if sent:
            (gradient,) = torch.autograd.grad(loss, p)
            assert torch.equal(gradient, (2 * p).cos() * 2)
        else:
            with pytest.raises(RuntimeUnsupportedError, match="changed in place"):
                loss.backward()


def test_what_was_saved_before_and_after_a_change_has_two_places() -> None:
    pool = host_copies.POOL = host_copies.Pool()
    x = torch.randn(16, requires_grad=True) * 2

    def call() -> Any:
        before = x.sin().sum()
        x.mul_(2)
        return before, x.cos().sum()

    waiting, losses = saved_by(call, 0, 1)
    waiting.end()
    assert pool.in_use_bytes == 2 * x.nbytes
    losses[1].backward(retain_graph=True)
    with pytest.raises(RuntimeUnsupportedError, match="changed in place"):
        losses[0].backward()


def test_views_share_a_place_and_come_back_as_they_were() -> None:
    pool = host_copies.POOL = host_copies.Pool()
    p = torch.randn(6, 8, requires_grad=True)

    def call() -> torch.Tensor:
        x = p * 2
        turned = (x.t() @ x[:, 2:5]).square().sum() + (x[::2] * x[1::2]).sin().sum()
        waves = torch.view_as_complex(x.view(6, 4, 2).contiguous())
        return turned + (waves.conj() * waves.mT.flatten().reshape(6, 4)).abs().sum()

    (wanted,) = torch.autograd.grad(call(), p)
    waiting, loss = saved_by(call, *range(20))
    waiting.end()
    in_use_bytes = pool.in_use_bytes
    (found,) = torch.autograd.grad(loss, p, retain_graph=True)
    assert torch.equal(wanted, found) and pool.in_use_bytes == in_use_bytes
    assert torch.equal(wanted, torch.autograd.grad(loss, p)[0])
    pool = host_copies.POOL = host_copies.Pool()
    x = torch.randn(32, requires_grad=True) * 2
    product = saved_by(lambda: x * x, 0, 1)[1]
    assert pool.in_use_bytes == x.nbytes
    product.sum().backward()
    assert pool.in_use_bytes == 0
