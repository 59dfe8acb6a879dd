"""Blocks that Inductor compiles: what their code holds in the step around them, and how often one is compiled."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.blocks.regions import placeholders_given
from planner.capture.inductor_internals import Draft, draft_with_inductor
from planner.capture.inputs import Inputs
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import Stopped
from planner.capture.lowering import LoweredGraph
from planner.common.options import Budget
from planner.errors import PlanMismatchError
from planner.ir.graph import OperationCost
from planner.ir.schedule import Schedule
from planner.ir.static_memory import LossMemory
from planner.measure.workspace import effort_for
from planner.rewrite.block_code import with_code
from planner.rewrite.graphs import extract_fwd_bwd
from planner.rewrite.inductor_peak import peak_of_drafts
from planner.runtimes import inductor_blocks
from planner.runtimes.regional import blocks_of, bytes_alone, decisions_on, lower_regional, lowering
from planner.session.step import Options
from tests.models import Convolutions, Stack, perceptron, rows
from tests.runtimes.steps import assert_same, hold_peak, train
from tests.tiers import tiered

ASK: dict[str, Any] = {"runtime": "inductor_blocks", "time_limit_seconds": 1.0, "deterministic": True}


class Attends(nn.Module):
    """Attention and a perceptron, each added to what comes in, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.mixed, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.rise, self.fall = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.mixed(self.norms[0](x)).chunk(3, -1))
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.fall(F.gelu(self.rise(self.norms[1](x)))), 0.1)


class Transformer(nn.Module):
    """Blocks between eager layers."""

    def __init__(self, depth: int, block: Callable[[], nn.Module] = Attends) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(32, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def batch(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 64, 32, generator=torch.Generator().manual_seed(0))


class Routed(nn.Module):
    """Passes on what it is given in part, and saves two results of which one is a part of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.rise(x).chunk(2, -1)
        return x * self.fall(F.silu(left) * right).sigmoid()


def drafted(model: nn.Module, x: torch.Tensor) -> tuple[LoweredGraph, list[Any], list[Draft]]:
    """Draft the code of a model's first block as it is."""
    options = Options(budget=Budget(budget="1GiB"))
    around = lower_regional(model, Inputs.of(x), options, inductor_blocks.RUNTIME.compiler)
    step, block = around.followed, around.blocks["blocks.0"]
    own, parted = step.state_of(block.path).values(), []

    def partition(joint: JointGraph) -> Any:
        given = placeholders_given(joint, own)
        parted.append((lowering(model, options)(joint, given), given))
        return extract_fwd_bwd(parted[-1][0], Schedule.keep_all(parted[-1][0].graph))

    def stop(partition: Any, graph_module: Any, inputs: Any) -> Any:
        raise Stopped(draft_with_inductor(partition, graph_module, inputs))

    drafts = step.compiled(block, partition, lambda p: partial(stop, p))
    return *parted[-1], drafts


@pytest.mark.parametrize("block", tiered([Attends, perceptron, Routed], slow=[perceptron]))
def test_operations_that_stand_for_code_hold_what_the_code_holds(block: Callable[[], nn.Module]) -> None:
    """With all that is given to the block resident, both ways to follow the code see the same peak."""
    model = Transformer(2, block)
    lowered, given, drafts = drafted(model, batch())
    costs = [OperationCost(seconds=0.0)] * len(lowered.graph.operations)
    code = with_code(lowered, given, drafts, costs, effort_for(model))
    found_bytes = bytes_alone(code.graph, Schedule.keep_all(code.graph))
    tangents_bytes = sum(
        code.graph.values[v].size_bytes for node in lowered.joint.tangents for v in lowered.storage_of[node]
    )
    # In the other the gradient that comes in is resident, like the block's input.
    expected_bytes = peak_of_drafts(*drafts, lowered, costs, LossMemory(), effort_for(model))
    assert expected_bytes <= found_bytes <= expected_bytes + tangents_bytes
    assert all(not operation.recomputable for operation in code.graph.operations)


@pytest.mark.parametrize("budget", tiered(["100%", "75%", "60%"], quick=["60%"]))  # a C++ compiler is called
def test_a_step_holds_what_is_said_and_has_the_gradients_of_eager(budget: str) -> None:
    torch.manual_seed(0)
    plain = Transformer(4)
    model = copy.deepcopy(plain)
    planner.auto_wrap(model, batch(), activation_budget=budget, **ASK)
    assert budget == "100%" or planner.plan_of(model).overhead > 0.02
    for _ in range(2):
        assert_same(train(plain, batch()), train(model, batch()), 1e-5)  # dropout draws what it draws in eager
    hold_peak(model, batch())
    plan = planner.plan_of(model)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes - plan.peak_bytes <= 0.03 * plan.budget_bytes or not plan.recomputations


@pytest.mark.slow
def test_batch_norm_and_convolutions_run_in_blocks() -> None:
    torch.manual_seed(0)
    plain = Convolutions().double()  # in float32 eager's own gradients are off by a thousandth
    model = copy.deepcopy(plain)
    x = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    planner.auto_wrap(model, x, activation_budget="80%", **ASK)
    found, expected = train(model, x), train(plain, x)
    unbiased = {name for name in expected if not re.search(r"[03]\.bias|3\.4\.bias", name)}  # of which all is rounding
    assert_same(*({name: left[name] for name in unbiased} for left in (expected, found)), 1e-9)
    hold_peak(model, x, least=0.98)


def test_equal_blocks_of_which_the_same_is_asked_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    honest = inductor_blocks.compile_with_inductor

    def noting(*given: Any) -> Any:
        compiled.append(1)
        return honest(*given)

    monkeypatch.setattr(inductor_blocks, "compile_with_inductor", noting)
    model = planner.auto_wrap(Stack(12), activation_budget="80%", **ASK)
    model(rows()).backward()
    plan = planner.plan_of(model)
    assert len(compiled) == len({decisions_on(plan, path) for path in blocks_of(plan)}) <= 6


def test_a_plan_that_is_given_is_held_against_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner.plan(Stack(2), rows(), activation_budget="80%", **ASK)
    again = planner.Plan.from_json(plan.to_json())
    model = planner.auto_wrap(Stack(2), plan=again)
    model(rows()).backward()
    assert planner.plan_of(model).peak_bytes == plan.peak_bytes
    honest = inductor_blocks._Code.held_by
    monkeypatch.setattr(inductor_blocks._Code, "held_by", lambda *given: (1 << 40, honest(*given)[1]))
    with pytest.raises(PlanMismatchError, match="compiled here, the plan holds"):
        planner.auto_wrap(Stack(2), plan=again)(rows())


def test_code_that_holds_more_than_was_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = inductor_blocks._Code.held_by
    monkeypatch.setattr(inductor_blocks._Code, "held_by", lambda *given: (honest(*given)[0], 1000))
    model = planner.auto_wrap(Stack(2), activation_budget="100%", **ASK)
    with pytest.raises(PlanMismatchError, match="holds more than was planned"):
        model(rows())
