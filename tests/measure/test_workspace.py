"""What kernels hold beyond what a graph shows: the predicted peak is the real one however a plan is made."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import planner
from planner.capture import fake_mode
from planner.common.options import grouped
from planner.measure import workspace
from tests.models import Layers, Stack, perceptron
from tests.runtimes.steps import measured_bytes, wrap_and_hold, wrap_and_hold_under_autocast
from tests.tiers import tiered

aten = torch.ops.aten

ROWS, WIDTH = 512, 64


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_known", {})


def blocks(depth: int = 2) -> Stack:
    """Return blocks with dropout, which on a CPU draws integers before it has a mask."""
    return Stack(depth, partial(perceptron, WIDTH, hidden=512, dropout=0.1))


def three_layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(3)))


class Reconstruction(Layers, layers=three_layers):
    """A loss of an output that is as large as what a layer saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layers(x).sigmoid(), x.sigmoid())


class Recurrent(Layers, layers=lambda: nn.LSTM(WIDTH, 256, num_layers=2)):
    """Its hidden and its cell state begin as one tensor, of which oneDNN's backward makes a copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(4, -1, WIDTH))[0].square().mean()


def in_16_bits(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, dtype=torch.bfloat16))


class Experts(Layers, rise=partial(in_16_bits, 4, WIDTH, 4 * WIDTH), fall=partial(in_16_bits, 4, 4 * WIDTH, WIDTH)):
    """A grouped product, whose kernel copies as much as the largest group has rows: only the data say how much."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, :4].argmax(dim=1)
        ends = (chosen[None] <= torch.arange(4)[:, None]).sum(dim=1).to(torch.int32)
        hidden = torch.tanh(torch._grouped_mm(x.bfloat16(), self.rise, offs=ends))
        return torch._grouped_mm(hidden, self.fall, offs=ends).float().square().mean()


def data(width: int = WIDTH) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("hold", [wrap_and_hold, wrap_and_hold_under_autocast])
def test_it_is_seen_while_the_model_is_traced(hold: Callable[..., planner.Plan]) -> None:
    hold(blocks(), data(), activation_budget="60%", time_limit_seconds=1.0)


@pytest.mark.parametrize("solver", tiered(["sqrt", "chain-dp"], slow=["chain-dp"]))
def test_the_state_of_the_generator_is_counted_where_random_operations_run_again(solver: str) -> None:
    plan = wrap_and_hold(blocks(4), data(), activation_budget="60%", solver=solver, time_limit_seconds=1.0)
    again = itertools.chain(*plan.recomputations.values())
    assert any("native_dropout" in operation for operation in again)


@pytest.mark.parametrize(
    "loss",
    tiered(
        [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.l1_loss, F.huber_loss],
        quick=[F.mse_loss, F.binary_cross_entropy],
    ),
)
def test_losses_keep_the_memory_that_their_kernels_keep(loss: Callable[..., torch.Tensor]) -> None:
    wrap_and_hold(Reconstruction(loss=loss), data(512), activation_budget="100%")


def test_arguments_that_are_one_tensor_are_tried_as_one() -> None:
    wrap_and_hold(Recurrent(), data(), activation_budget="100%")


@pytest.mark.parametrize("shift", [0.0, 9.0])
def test_groups_may_be_of_any_size(shift: float) -> None:
    x = data() + shift * (torch.arange(WIDTH) == 1)  # with a shift all rows are of one group
    model = planner.auto_wrap(Experts(), **grouped(activation_budget="100%", time_limit_seconds=1.0))
    found_bytes, plan = measured_bytes(model, x), planner.plan_of(model)
    assert found_bytes + sum(plan.static_bytes.values()) <= plan.peak_bytes


def test_a_busy_machine_sees_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks()
    asked = {"activation_budget": "60%", "deterministic": True, "time_limit_seconds": 0.25, "compare": False}
    expected = planner.plan(copy.deepcopy(model), data(), **grouped(**asked))
    workspace._known.clear()
    minutes = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 60.0 * next(minutes))
    plan = planner.plan(model, data(), **grouped(**asked))
    assert (plan.peak_bytes, plan.recomputations) == (expected.peak_bytes, expected.recomputations)
    assert "workspace-unseen" not in {warning.rule for warning in plan.warnings}


@pytest.mark.parametrize("effort", [{"seconds": 0.0}, {"operation_bytes": 0}])
def test_what_is_not_tried_is_named(monkeypatch: pytest.MonkeyPatch, effort: dict[str, float]) -> None:
    monkeypatch.setattr(workspace, "TO_RUN", replace(workspace.TO_RUN, **effort))
    plan = planner.plan(blocks(4), data(), budget=planner.Budget(activations="60%"), search="sqrt")
    (warning,) = [warning for warning in plan.warnings if warning.rule == "workspace-unseen"]
    assert "aten." in warning.evidence and warning.is_problem


@pytest.mark.parametrize("rows", [2**14, 2**40])
def test_no_more_memory_is_filled_than_an_operation_reads(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    made: list[int] = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, **kw: made.append(math.prod(sizes)) or ones(*sizes, **kw))
    graph = fx.Graph()
    with fake_mode():
        table, chosen = graph.placeholder("table"), graph.placeholder("chosen")
        table.meta["val"], chosen.meta["val"] = torch.empty(rows, 64), torch.zeros(8, dtype=torch.int64)
        calls = [
            graph.call_function(aten.embedding.default, (table, chosen)),
            graph.call_function(aten.empty_like.default, (table,), {"pin_memory": False}),
            graph.call_function(aten.bernoulli.p, (table, 0.5)),
            graph.call_function(aten.sum.default, (table,)),
        ]
        for call in calls:
            call.meta["val"] = call.target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in call.args))
    found = workspace.of_calls(calls, torch.device("cpu"), workspace.TO_PLAN)
    assert found[:3] == [0 if rows == 2**14 else None] * 3  # what does not fit here is not known
    assert max(made, default=0) <= workspace.TO_PLAN.operation_bytes / 4
    assert made == [64 * rows] * (rows < 2**20)  # what is summed up is read


def test_a_profile_that_saw_less_hides_nothing() -> None:
    model = blocks()
    made = planner.profile(model, data(), time_limit_seconds=5.0)
    blind = replace(made, measurements={s: replace(m, workspace_bytes=0) for s, m in made.measurements.items()})
    plan = planner.plan(model, data(), budget=planner.Budget(activations="100%"), target=planner.Target(profile=blind))
    assert plan.peak_bytes == planner.plan(model, data(), budget=planner.Budget(activations="100%")).peak_bytes


def test_what_inductor_writes_itself_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()
    on_cpu = workspace._on_cpu

    def seen(nodes: Any, device: torch.device) -> Any:
        ran.update(str(node.target) for node in nodes.values())
        return on_cpu(nodes, device)

    monkeypatch.setattr(workspace, "_on_cpu", seen)
    planner.plan(blocks(), torch.randn(ROWS, WIDTH), **grouped(budget="1GiB", runtime="inductor", compare=False))
    assert {"aten.mm.default", "aten.addmm.default", "aten.native_dropout.default"} <= ran
    assert not {name for name in ran if name.startswith(("aten.add.", "aten.mul.", "prims."))}
