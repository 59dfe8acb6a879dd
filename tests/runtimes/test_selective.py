"""Modules that run again all but what their checkpoint keeps: which ways there are, and that they are kept to."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import planner
from planner.common.options import grouped
from planner.errors import PlanFileError
from planner.exporters import carries_exactly
from planner.ir.checkpoints import Keepable, Region
from planner.ir.graph import OperationCost, TrainingGraph
from planner.plans.plan import Plan
from planner.report import render
from planner.runtimes.modules import contexts
from planner.solving.modules.ilp import variants_of
from tests.example_graphs import Builder
from tests.models import SEQUENCES, Layers, OneLinear, Transformer, linear
from tests.planned import printed
from tests.runtimes.steps import assert_gradients, beside

WIDTH = 64


def plan_of(model: nn.Module, budget: str, x: torch.Tensor = SEQUENCES) -> Plan:
    return planner.plan(model, x, **grouped(activation_budget=budget, runtime="modules", compare=False))


def test_keeping_is_cheaper_than_running_whole_modules_again() -> None:
    step = planner.study(Transformer(2), SEQUENCES, runtime="modules")
    assert step.plan(budget=planner.Budget(activations="65%")).kept
    only_whole = replace(step, regions=tuple(replace(region, keepable=()) for region in step.regions))
    for budget in ("85%", "65%"):
        dearer = only_whole.plan(budget=planner.Budget(activations=budget))
        assert not dearer.kept
        assert step.plan(budget=planner.Budget(activations=budget)).recompute_seconds < dearer.recompute_seconds


# Which ways there are.


def region_of(*found: tuple[float, int, bool]) -> tuple[Region, TrainingGraph, tuple[OperationCost, ...]]:
    """Return a region of operations with these seconds, bytes and randomness, each with its stand-in after it."""
    build = Builder()
    made = [build.add(f"operation {n}", [], [size], seconds=seconds) for n, (seconds, size, _) in enumerate(found)]
    for n, values in enumerate(made):
        build.add(f"stand-in {n}", values, [], seconds=0.0)
    keepable = tuple(
        Keepable(index=n, stand_in=len(found) + n, operator="mm", occurrence=n, is_random=is_random)
        for n, (_, _, is_random) in enumerate(found)
    )
    everything = tuple(range(len(found)))
    region = Region(module="m", hold=None, recompute=everything, recompute_before=0, release_at=0, keepable=keepable)
    return region, build.graph("", {}), tuple(build.costs)


def kept_in(region: Region, graph: Any, costs: Any) -> list[set[int]]:
    return [{one.index for one in variant.kept} for variant in variants_of([region], graph, costs)]


def test_what_saves_most_for_its_bytes_is_kept_first() -> None:
    found = kept_in(*region_of((1.0, 64, False), (6.0, 128, False), (1.0, 128, False)))
    assert found == [set(), {1}, {0, 1, 2}]
    assert kept_in(*region_of((0.0, 64, False))) == [set()]
    assert len(kept_in(*region_of(*[(1.0, 64, False)] * 40))) == 5


def test_of_what_draws_random_numbers_all_is_kept_or_none() -> None:
    for kept in kept_in(*region_of((5.0, 64, True), (1.0, 64, False), (1.0, 6400, True))):
        assert len(kept & {0, 2}) in (0, 2)


class InPlace(Layers, linear=linear(WIDTH, WIDTH), last=linear(WIDTH, WIDTH)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(F.relu_(self.linear(x))))


def test_what_is_written_into_is_never_kept() -> None:
    model = nn.Sequential(*(InPlace() for _ in range(3)))
    step = planner.study(model, SEQUENCES, runtime="modules")
    found = {region.module: region for region in step.regions}
    assert [(one.operator, one.occurrence) for one in found["1"].keepable] == [("aten.addmm.default", 1)]


# Running.


class Drawing(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = torch.native_dropout(self.linear(x).sin(), 0.3, True)
        second, _ = torch.native_dropout(self.linear(first).sin(), 0.3, True)
        return second * torch.native_dropout(first, 0.3, True)[0]


@pytest.mark.parametrize(
    "kept", [{"aten.native_dropout.default": (0, 1, 2)}, {"aten.addmm.default": (1,), "aten.sin.default": (0,)}]
)
def test_random_operations_that_are_all_kept_or_all_run_again_give_the_same_bits(kept: Any) -> None:
    plain = Drawing(WIDTH)
    again = copy.deepcopy(plain)
    torch.manual_seed(1)
    plain(SEQUENCES).square().sum().backward()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    loss = checkpoint(again, SEQUENCES, use_reentrant=False, context_fn=lambda: contexts(again, kept)).square().sum()
    loss.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert_gradients(plain, again)
    again.zero_grad()
    loss.backward()  # nothing is kept any more: all runs again
    assert_gradients(plain, again)


def test_double_backward_and_two_steps_under_one_autocast() -> None:
    plain, wrapped = beside(Transformer(dropout=0.0), SEQUENCES, activation_budget="70%", runtime="modules")
    assert planner.plan_of(wrapped).kept
    for model in (plain, wrapped):
        with sdpa_kernel(SDPBackend.MATH):  # the other kernel has no second derivative
            (gradient,) = torch.autograd.grad(model(SEQUENCES), [model.blocks[0].first.weight], create_graph=True)
            gradient.square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16):  # the second finds the weights cast
            losses = [model(SEQUENCES), model(2 * SEQUENCES)]
        sum(losses).backward()
    assert_gradients(plain, wrapped)


def test_the_plan_says_what_is_kept() -> None:
    plan = plan_of(Transformer(2), "70%")
    assert plan.kept
    read = Plan.from_json(plan.to_json())
    assert read.kept == plan.kept
    model = planner.auto_wrap(Transformer(2), budget=read)
    model(SEQUENCES).backward()
    assert planner.plan_of(model).kept == plan.kept
    model(SEQUENCES[:2])  # carried over to other sizes
    assert planner.plan_of(model).kept == plan.kept or not planner.plan_of(model).recomputations
    shown = printed(render, plan, width=100, full=True)
    assert "Kept in checkpointed modules" in shown and "addmm #" in shown
    assert not carries_exactly(plan, "fsdp")
    damaged = plan.to_json().replace('"kept": {', '"kept": {"h.0": {"aten.mm.default": [-1]},', 1)
    with pytest.raises(PlanFileError, match="kept"):
        Plan.from_json(damaged)


def experts() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, WIDTH, 4 * WIDTH) / 16)


class Routed(Layers, norm=lambda: nn.LayerNorm(WIDTH), router=linear(WIDTH, 4), up=experts):
    """A layer that sends each row to two of four experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        share, chosen = self.router(h).softmax(-1).topk(2)
        shares = torch.zeros(len(h), 4).scatter(1, chosen, share)
        return x + (torch.einsum("tw,ewf->tef", h, self.up).relu().square().mean(-1) * shares).sum(-1, keepdim=True)


def test_what_a_router_chose_is_not_chosen_again() -> None:
    model, x = nn.Sequential(*(Routed() for _ in range(3))), torch.randn(256, WIDTH)
    for runtime, budget in (("graph", "60%"), ("regional", "80%"), ("modules", "80%")):
        plan = planner.plan(model, x, **grouped(activation_budget=budget, runtime=runtime))
        assert plan.recomputations and any(warning.rule == "choices-run-once" for warning in plan.warnings)
        if runtime == "modules":
            assert plan.kept and all("aten.topk.default" in kept for kept in plan.kept.values())
        else:
            assert not any("topk" in key for keys in plan.recomputations.values() for key in keys)
