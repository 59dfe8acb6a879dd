"""Questions asked of an eager step: every answer is a choice of modules, which arbitrary schedules of it are not."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from planner.analysis.trade_off.answers import methods_beside
from planner.analysis.trade_off.curve import CurveSweep
from planner.common.options import Search, grouped
from planner.errors import UsageError
from planner.ir.checkpoints import schedule_of
from planner.ir.simulator import simulate
from planner.plans.module_choices import modules_of, variants_in
from tests.models import rows
from tests.runtimes.test_modules import Stack

DOES_NOT_OFFLOAD = "the runtime 'modules' does not offload: use another, or save_on_cpu"


def test_a_curve_of_choices_of_modules() -> None:
    told: Any = {"runtime": "modules", "budgets": 4, "time_limit_seconds": 4.0}
    curve = planner.what_if(Stack(2), rows(), **grouped(**told))
    step = planner.study(Stack(2), rows(), runtime="modules")
    for point in curve.points[:-1]:
        assert point.overhead is not None
        plan = step.plan(budget=point.budget_bytes, search=planner.Search(time_limit_seconds=2.0))
        assert plan.overhead == pytest.approx(point.overhead) and plan.peak_bytes == point.predicted_peak_bytes
        assert modules_of(plan)
    assert curve.points[-1].overhead == 0 and curve.points[0].budget_bytes == curve.minimum_feasible_peak_bytes
    with pytest.raises(UsageError, match="'ilp' decides on a whole graph"):
        planner.what_if(Stack(2), rows(), **grouped(solver="ilp", **told))


def test_other_ways_beside_such_a_curve() -> None:
    step = planner.study(Stack(2), rows(), runtime="modules")
    tracing = CurveSweep(step, Search(time_limit_seconds=2.0), points=2)
    tracing.run()
    every, second, chunked = methods_beside(tracing, ["every-layer", "every-2", "chunked"])
    layers = [region for region in step.regions if region.module.count(".") == 1]
    found = simulate(step.graph, step.costs, schedule_of(step.graph, layers))
    assert every.points[0].predicted_peak_bytes == found.peak_bytes + step.graph.total_static_bytes
    assert 0 < second.points[0].overhead < every.points[0].overhead
    assert not chunked.points and ", not 'chunked'" in chunked.reason
    with pytest.raises(UsageError, match="decides on a whole graph"):
        methods_beside(tracing, ["ilp"])


def test_an_audit_is_of_choices_of_modules() -> None:
    layers = planner.audit(Stack(2), rows(), current="every-layer", **grouped(runtime="modules", time_limit_seconds=1))
    assert layers.now.recompute_seconds > 0 and modules_of(layers.best)
    plan = planner.plan(Stack(2), rows(), **grouped(activation_budget="70%", runtime="modules", compare=False))
    assert variants_in(plan, ()) is None


def test_no_module_waits_in_the_hosts_memory() -> None:
    step = planner.study(Stack(2), rows(), runtime="modules")
    for asked in (
        lambda: planner.plan(Stack(2), rows(), **grouped(budget="60%", runtime="modules", offload=True)),
        lambda: planner.what_if(Stack(2), rows(), **grouped(runtime="modules", offload=True)),
        lambda: step.plan(budget="60%", offload=True),
    ):
        with pytest.raises(UsageError, match=DOES_NOT_OFFLOAD):
            asked()
