"""What a plan says of its step over time and of its peak: held against the simulator."""

from __future__ import annotations

import dataclasses
import json

import pytest

from planner.errors import PlanFileError
from planner.ir.host import Host
from planner.plans.plan import AliveTensors, Plan
from planner.plans.step_details import MOST_POINTS
from tests.example_graphs import transformer
from tests.planned import make_plan
from tests.report.test_report import example_plan

plan = pytest.fixture(scope="module")(example_plan)


def test_timelines_peak_where_the_plan_does(plan: Plan) -> None:
    assert plan.details is not None
    assert plan.details.before.peak_bytes == plan.baseline_peak_bytes
    assert plan.details.after.peak_bytes == plan.peak_bytes
    (highest,) = (point for point in plan.details.after.points if point.size_bytes == plan.peak_bytes)
    assert (highest.operation, highest.phase) == (plan.peak_at.operation, plan.peak_at.phase)
    assert plan.details.after.step_seconds == pytest.approx(plan.baseline_step_seconds + plan.recompute_seconds)
    assert any(point.phase == "recompute" for point in plan.details.after.points)


def test_a_long_step_has_few_points_and_the_same_peak() -> None:
    graph, costs = transformer(20)
    plan = make_plan(graph, costs, budget="70%", solver="sqrt")
    assert plan.details is not None and len(graph.operations) > 2 * MOST_POINTS
    for line, peak_bytes in ((plan.details.before, plan.baseline_peak_bytes), (plan.details.after, plan.peak_bytes)):
        assert MOST_POINTS // 2 < len(line.points) <= MOST_POINTS
        assert line.peak_bytes == peak_bytes


def test_what_is_alive_fills_the_peak(plan: Plan) -> None:
    assert plan.details is not None
    made = {kind: size for kind, size in plan.anatomy.items()
            if kind not in (*plan.static_bytes, "workspace", "random state")}  # fmt: skip
    by_kind: dict[str, int] = {}
    for row in plan.details.alive:
        by_kind[row.kind] = by_kind.get(row.kind, 0) + row.size_bytes
    assert sum(by_kind.values()) == sum(made.values())
    assert all(by_kind[kind] <= made[kind] for kind in by_kind if kind)
    sizes = [row.size_bytes for row in plan.details.alive if row.kind]
    assert sizes == sorted(sizes, reverse=True)


def test_equal_layers_are_one_row() -> None:
    graph, costs = transformer(8)
    graph = dataclasses.replace(
        graph, operations=tuple(dataclasses.replace(op, source="model.py:1") for op in graph.operations)
    )
    plan = make_plan(graph, costs, budget="200%")
    assert plan.details is not None
    assert AliveTensors(
        count=8, size_bytes=8 * 4 * 2**20, kind="saved activations", operation="aten.gelu.default",
        module="transformer.h.0-7.mlp.1", source="model.py:1",
    ) in plan.details.alive  # fmt: skip


def test_one_more_gib_never_costs_more() -> None:
    graph, costs = transformer(2, unit_bytes=2**27)
    plan = make_plan(graph, costs, activation_budget="60%", solver="ilp", deterministic=True, time_limit_seconds=0.25)
    assert plan.details is not None and plan.details.one_more_gib is not None
    assert plan.details.one_more_gib.budget_bytes == plan.budget_bytes + 2**30
    assert 0 < plan.details.one_more_gib.overhead < plan.overhead
    free = make_plan(graph, costs, budget="100%", deterministic=True, time_limit_seconds=0.5)
    assert free.details is not None and free.details.one_more_gib is None
    host = Host(bytes_per_second=3e10, budget_bytes=2**40)
    both = make_plan(graph, costs, budget=plan.budget_bytes, host=host, deterministic=True, time_limit_seconds=0.05)
    assert both.details is not None and both.details.one_more_gib is not None
    assert 0 <= both.details.one_more_gib.overhead < both.overhead


def test_details_are_kept_in_the_file_and_held_to_the_plan(plan: Plan) -> None:
    read = Plan.from_json(plan.to_json())
    assert read == plan and read.details == plan.details
    for change, message in (
        (lambda details: details["timeline"]["after"]["points"].clear() or
         details["timeline"]["after"]["points"].append(plan_point()), "peaks at 1"),
        (lambda details: details["timeline"]["before"]["points"].reverse(), "order of time"),
        (lambda details: details["alive_at_peak"][0].update(size_bytes=2**60), "adds up"),
    ):  # fmt: skip
        data = json.loads(plan.to_json())
        change(data["details"])
        with pytest.raises(PlanFileError, match=message):
            Plan.from_json(json.dumps(data))


def plan_point() -> dict[str, object]:
    return {"seconds": 0.0, "size_bytes": 1, "operation": "", "module": "", "phase": ""}


def test_the_same_plan_comes_out_every_time() -> None:
    graph, costs = transformer(4, unit_bytes=2**27)
    asked = {"activation_budget": "60%", "solver": "ilp", "deterministic": True, "time_limit_seconds": 0.5}
    plans = [make_plan(graph, costs, **asked) for _ in range(2)]
    assert plans[0].details == plans[1].details
    first, second = ([dataclasses.replace(row, seconds=0.0) for row in plan.baselines] for plan in plans)
    assert first == second
