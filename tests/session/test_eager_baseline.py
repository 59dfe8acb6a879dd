"""Plans are held against the model's own step: percentages, overheads, and what capture makes slower or larger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner import runtimes
from planner.capture.inputs import Inputs
from planner.common.options import grouped
from planner.plans.plan import NoPlanFitsError, Plan
from planner.runtimes.graph import GraphRuntime
from planner.session.eager_study import with_eager
from planner.session.step import Options
from tests.models import Layers, OneLinear, Trained
from tests.runtimes.steps import measured_bytes


def eager_peak_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Measure a step of the model as it is, with what is resident around it."""
    return measured_bytes(model, x) + sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))


class Own(torch.autograd.Function):
    """An activation that saves its input alone, and computes all else again: capture keeps more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x).exp().sin().cos()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        inner = torch.sigmoid(x).exp()
        return grad * (inner.sin().cos() - x * inner.sin().sin() * inner.cos() * inner)


class Thrifty(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Own.apply(super().forward(x))


def thrifty(depth: int = 2) -> Trained:
    return Trained(*(Thrifty(64, 64) for _ in range(depth)))


def relus() -> Trained:
    return Trained(*(m for _ in range(2) for m in (nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Dropout(0.1))))


@pytest.mark.parametrize("make", [relus, thrifty])
def test_a_percentage_is_of_what_eager_takes(make: Any, tmp_path: Path) -> None:
    """The plan's file and report have it, and verifying runs the step as it is too."""
    model, x = make(), torch.randn(1024, 64)
    asked = {"budget": "80%", "runtime": "graph", "time_limit_seconds": 0.5}  # what is budgeted is the same at once
    plan = planner.plan(model, x, **grouped(**asked))
    assert plan.eager is not None
    plan.save(tmp_path / "step.plan")
    assert Plan.load(tmp_path / "step.plan").eager == plan.eager
    assert plan.report()["eager"]["peak_bytes"] == plan.eager.peak_bytes
    assert "eager" not in replace(plan, eager=None).report()
    found = planner.verify(model, x, plan, timed_steps=1).eager
    assert found is not None and found.equal
    assert found.peak_bytes == pytest.approx(plan.eager.peak_bytes, rel=1e-3)
    assert plan.eager.peak_bytes == pytest.approx(eager_peak_bytes(model, x), rel=1e-3)
    assert plan.budget_bytes == plan.eager.peak_bytes * 8 // 10
    planner.auto_wrap(model, **grouped(**asked))
    model(x).backward()
    assert planner.plan_of(model).budget_bytes == plan.budget_bytes


def test_what_capture_makes_larger_is_named() -> None:
    asked = grouped(budget="100%", time_limit_seconds=1, runtime="graph")
    plan = planner.plan(thrifty(6), torch.randn(1024, 64), **asked)
    assert plan.eager is not None and plan.baseline_peak_bytes > 1.5 * plan.eager.peak_bytes
    (found,) = [w for w in plan.warnings if w.rule == "larger-than-eager"]
    assert "of eager's" in found.evidence and "cos +" in found.evidence
    assert plan.peak_bytes <= plan.eager.peak_bytes


def test_auto_takes_the_eager_step_where_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = thrifty(), torch.randn(1024, 64)
    asked = {"inputs": x, "budget": "100%", "time_limit_seconds": 1.0}
    chosen = planner.plan(model, **grouped(**asked))
    captured, eager = (planner.plan(model, **grouped(runtime=name, **asked)) for name in ("graph", "modules"))
    assert chosen.step_seconds == min(captured.step_seconds, eager.step_seconds)
    dearer = replace(captured, baseline_step_seconds=2 * eager.step_seconds)
    monkeypatch.setattr(runtimes.get("graph"), "plan", lambda *_, **__: dearer, raising=False)
    plan = planner.plan(model, **grouped(**asked))
    assert plan.runtime == "modules"
    assert [w.rule for w in plan.warnings if "as captured the planned step" in w.evidence] == ["runtime"]
    planner.auto_wrap(model, budget=plan)
    model(x).backward()


class Writes(Layers, weight=lambda: nn.Parameter(torch.randn(16))):
    """Writes into parts of a tensor, which a captured step copies whole each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for part in range(16):
            found[:, part::16] = x[:, part::16] * self.weight[part]
        return found.sum()


def test_a_training_loop_takes_the_eager_step_once_the_captured_one_is_seen_to_be_dearer() -> None:
    model, x = Writes(), torch.randn(2048, 512)
    planner.auto_wrap(model, **grouped(budget="150%", time_limit_seconds=0.5))
    for step in range(6):
        model(x).backward()
        assert planner.plan_of(model).runtime == ("modules" if step else "graph")
        assert planner.plan_of(model) is planner.plan_of(model)
    assert any("as captured the planned step" in w.evidence for w in planner.plan_of(model).warnings)


def fits_nowhere(*_: Any, **__: Any) -> Plan:
    raise NoPlanFitsError("too little", report={}, minimum_feasible_peak_bytes=2**30, operation="")


def test_auto_takes_the_eager_step_where_only_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes.get("graph"), "plan", fits_nowhere, raising=False)
    plan = planner.plan(thrifty(), torch.randn(1024, 64), budget="100%", search=planner.Search(time_limit_seconds=1))
    assert plan.runtime == "modules" and any("does not fit" in w.evidence for w in plan.warnings)


def test_a_training_loop_takes_the_eager_step_where_only_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = thrifty(), torch.randn(1024, 64)
    planner.auto_wrap(model, **grouped(budget="1GiB", time_limit_seconds=1, cost_model="roofline"))
    model(x[:512]).backward()
    monkeypatch.setattr(GraphRuntime, "planned", fits_nowhere)
    with pytest.warns(UserWarning, match="too little"):
        model(x).backward()
    assert planner.plan_of(model).runtime == "modules"


def test_a_training_loop_that_nothing_fits_says_what_the_first_choice_needs() -> None:
    model, x = thrifty(), torch.randn(1024, 64)
    needed = []
    for runtime in ("auto", "graph"):
        asked = grouped(budget="64KiB", runtime=runtime, time_limit_seconds=0.2, cost_model="roofline")
        planner.auto_wrap(model, **asked)
        with pytest.raises(NoPlanFitsError) as caught:
            model(x)
        needed.append(caught.value.minimum_feasible_peak_bytes)
        planner.unwrap(model)
    assert needed[0] == needed[1]


def test_nothing_runs_to_learn_it() -> None:
    """A model whose eager step does not fit must be plannable; what only running shows is then not known."""

    class Watched(nn.Linear):
        ran = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, torch._subclasses.FakeTensor) and not torch.compiler.is_compiling():
                Watched.ran = True
            return super().forward(x if x[0, 0] > 0 else -x).sum()

    plan = planner.plan(
        Watched(16, 16), torch.randn(4, 16), **grouped(budget="100%", time_limit_seconds=1, runtime="graph")
    )
    assert plan.eager is None and not Watched.ran
    (note,) = [w for w in plan.warnings if w.rule == "eager-unknown"]
    assert "DataDependent" in note.evidence and plan.budget_bytes == plan.baseline_peak_bytes


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"budget": 2**30, "compare": False}, False), ({"budget": 2**30, "compare": True}, True),
     ({"budget": "50%", "compare": False}, True)],
)  # fmt: skip
def test_it_is_recorded_only_where_something_is_made_of_it(options: dict[str, Any], asked: bool) -> None:
    found = with_eager(relus(), Options.of(grouped(**options)), Inputs.of(torch.randn(8, 64)))
    assert (found.eager is not None) is asked


class OtherwiseWhenCaptured(OneLinear):
    """A model that has another formula for capture, and cannot be captured with its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).relu()
        if torch.compiler.is_compiling():
            return (x * 2.0).square().mean()
        torch._dynamo.graph_break()
        return (x * 3.0).square().mean()


def test_verify_sees_a_captured_step_that_is_not_eagers() -> None:
    model, x = OtherwiseWhenCaptured(64), torch.randn(32, 64)
    with pytest.warns(UserWarning, match="asks whether it is compiled .* The answer is yes"):
        plan = planner.plan(model, x, budget="100%", runtime="graph")
    found = planner.verify(model, x, plan, timed_steps=1)
    assert found.exact and not found.agrees  # the bits of the captured step, which is another one
    assert "loss or outputs differ, compared with the eager step" in found.differences
