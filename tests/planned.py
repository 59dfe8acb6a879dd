"""Plans and problems of a graph by keywords, as people ask for them of a model; and reports as text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from rich.console import Console

from planner.analysis.study import Study
from planner.common.options import Budget, Search, flat_name, picked
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans import planning
from planner.plans.plan import Plan, PlanOrigin


def make_problem(
    graph: TrainingGraph, costs: Sequence[OperationCost], host: Host | None = None, **budget: Any
) -> Problem:
    return planning.make_problem(graph, costs, picked(Budget, budget), host=host)


def make_plan(
    graph: TrainingGraph,
    costs: Sequence[OperationCost],
    *,
    host: Host | None = None,
    origin: PlanOrigin | None = None,
    static_memory: StaticMemory | None = None,
    **asked: Any,
) -> Plan:
    budget, search = picked(Budget, asked), picked(Search, asked)
    assert asked.keys() <= {flat_name(option) for kind in (Budget, Search) for option in fields(kind)}
    problem = planning.make_problem(graph, costs, budget, host=host)
    return planning.make_plan(problem, search, origin=origin, static_memory=static_memory)


def study_of(graph: TrainingGraph, costs: tuple[OperationCost, ...], **static_memory: Any) -> Study:
    """Return what a capture would."""
    origin = PlanOrigin(device="toy-device", cost_model="roofline", torch_version="2.13.0")
    return Study(graph=graph, costs=costs, origin=origin, static_memory=StaticMemory(**static_memory))


def problem_at(step: tuple[TrainingGraph, tuple[OperationCost, ...]], share: float) -> Problem:
    """Return the problem of a step with a share of what keeping everything takes."""
    problem = Problem(graph=step[0], costs=step[1], budget_bytes=0)
    return replace(problem, budget_bytes=int(share * problem.baseline.peak_bytes))


def by_hand(problem: Problem, schedule: Schedule, **more: Any) -> Solution:
    """Return a schedule as a solution, with the peak and the time that the simulator finds."""
    found = problem.evaluate(schedule)
    taken = {"peak_bytes": found.peak_bytes, "recompute_seconds": found.added_seconds}
    return Solution(**{"solver": "by hand", "schedule": schedule, **taken, **more})


def without_recompute(graph: TrainingGraph) -> TrainingGraph:
    """Return a step of which nothing can run twice."""
    return replace(graph, operations=tuple(replace(operation, recomputable=False) for operation in graph.operations))


def printed(render: Callable[..., object], report: Any, *, width: int = 80, **options: Any) -> str:
    """Return what a report prints, without spaces at the ends of lines."""
    stream = io.StringIO()
    render(report, Console(file=stream, width=width, highlight=False), **options)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
