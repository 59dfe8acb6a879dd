"""Blocks that Inductor compiles: what their code holds in the step around them, and how often one is compiled."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.fake_internals import mode_of
from planner.capture.inductor_internals import Draft
from planner.capture.lowering import LoweredGraph
from planner.capture.storages import PeakRecorder
from planner.capture.trees import tensors_in
from planner.common.options import grouped
from planner.errors import PlanMismatchError
from planner.ir.schedule import Schedule
from planner.rewrite.inductor_peak import with_code
from planner.runtimes import inductor_blocks
from planner.runtimes._units import blocks_of, bytes_alone, decisions_on
from tests.models import Convolutions, Layers, Stack, TransformerBlock, linear, perceptron, rows
from tests.runtimes.steps import assert_same, beside, hold_peak, train

ASK: dict[str, Any] = {"runtime": "inductor_blocks", "time_limit_seconds": 1.0, "deterministic": True}
ALIKE = {"activation_budget": "95%", "policy": lambda op: "recompute" if op.module.endswith(".2") else "save"}
"""Asks the same of every block, so that one is compiled: to recompute its GELU."""


attends = partial(TransformerBlock, 32, 4, 0.1)


class Transformer(nn.Module):
    """Blocks between eager layers."""

    def __init__(self, depth: int, block: Callable[[], nn.Module] = attends) -> None:
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


given = lambda: rows().requires_grad_()  # noqa: E731 - with a gradient of its input the first block is like the others


class Routed(Layers, rise=linear(32, 128), fall=linear(64, 32)):
    """Passes on what it is given in part, and saves two results of which one is a part of the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.rise(x).chunk(2, -1)
        return x * self.fall(F.silu(left) * right).sigmoid()


def added_up(drafts: list[Draft], lowered: LoweredGraph) -> int:
    forward, backward = drafts
    mode = mode_of(tensors_in(forward.inputs))
    recorder = PeakRecorder(lowered.graph.alignment_bytes, [forward.inputs, backward.inputs])
    recorder.supports_higher_order_operators = True
    with mode, recorder:
        made = list(forward.run(list(forward.inputs)))
        handed = [made.pop() for _ in range(len(made) - len(lowered.joint.outputs[0]))][::-1]
        handed += backward.inputs[len(handed) :]
        _gradients = backward.run(handed)
    return recorder.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("block", [attends, perceptron, Routed])
def test_operations_that_stand_for_code_hold_what_the_code_holds(
    block: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that is given to a block resident, they see the peak that is seen if nothing but sizes is added up."""
    drafted: list[Any] = []

    def noting(*given: Any) -> LoweredGraph:
        drafted.append((*given, with_code(*given)))
        return drafted[-1][-1]

    monkeypatch.setattr(inductor_blocks, "with_code", noting)
    planner.plan(Transformer(2, block), batch(), **grouped(activation_budget="75%", compare=False, **ASK))
    for lowered, _, drafts, *_, code in drafted:
        found_bytes = bytes_alone(code.graph, Schedule.keep_all(code.graph))
        tangents = (value for node in lowered.joint.tangents for value in lowered.storage_of[node])
        tangents_bytes = sum(code.graph.values[value].size_bytes for value in tangents)
        workspaces = [value.size_bytes for value in code.graph.values if value.name.startswith("workspace")]
        # Where they are added up the gradient that comes in is resident, like the block's input.
        expected_bytes = added_up(drafts, lowered)
        assert expected_bytes <= found_bytes <= expected_bytes + tangents_bytes + max(workspaces, default=0)
    assert drafted


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "75%", "60%"])  # a C++ compiler is called for each kind of block
def test_a_step_holds_what_is_said_and_has_the_gradients_of_eager(budget: str) -> None:
    plain, model = beside(Transformer(4), batch(), activation_budget=budget, **ASK)
    assert budget == "100%" or planner.plan_of(model).overhead > 0.02
    for _ in range(2):
        assert_same(train(plain, batch()), train(model, batch()), 1e-5)  # dropout draws what it draws in eager
    hold_peak(model, batch())
    plan = planner.plan_of(model)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes - plan.peak_bytes <= 0.03 * plan.budget_bytes or not plan.recomputations


@pytest.mark.slow
def test_batch_norm_and_convolutions_run_in_blocks() -> None:
    plain = Convolutions().double()  # in float32 eager's own gradients are off by a thousandth
    model = copy.deepcopy(plain)
    x = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    planner.auto_wrap(model, x, **grouped(activation_budget="80%", **ASK))
    found, expected = train(model, x), train(plain, x)
    unbiased = {name for name in expected if not re.search(r"[03]\.bias|3\.4\.bias", name)}  # of which all is rounding
    assert_same(*({name: left[name] for name in unbiased} for left in (expected, found)), 1e-9)
    hold_peak(model, x, least=0.98)


def test_equal_blocks_of_which_the_same_is_asked_are_compiled_once(calls: Any) -> None:
    compiled = calls(inductor_blocks, "compile_with_inductor")
    plain, model = beside(Stack(2), **ALIKE, **ASK)
    for _ in range(2):
        assert_same(train(plain, given()), train(model, given()), 1e-4)
    hold_peak(model, given())
    plan = planner.plan_of(model)
    assert len(compiled) == len({decisions_on(plan, path) for path in blocks_of(plan)}) == 1 and plan.recomputations


def test_a_plan_that_is_given_is_held_against_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner.plan(Stack(2), given(), **grouped(compare=False, **ALIKE, **ASK))
    again = planner.Plan.from_json(plan.to_json())
    model = planner.auto_wrap(Stack(2), budget=again)
    model(given()).backward()
    assert planner.plan_of(model).peak_bytes == plan.peak_bytes
    honest = inductor_blocks._Code.attempt
    more = lambda *given: replace(honest(*given), needed_bytes=1 << 40)  # noqa: E731
    monkeypatch.setattr(inductor_blocks._Code, "attempt", more)
    with pytest.raises(PlanMismatchError, match="compiled here, the plan needs"):
        planner.auto_wrap(Stack(2), budget=again)(given())


def test_code_that_holds_more_than_was_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = inductor_blocks._Code.attempt
    monkeypatch.setattr(inductor_blocks._Code, "attempt", lambda *given: replace(honest(*given), code=1000))
    model = planner.auto_wrap(Stack(2), **grouped(activation_budget="100%", **ASK))
    with pytest.raises(PlanMismatchError, match="needs more than was planned"):
        model(rows())
