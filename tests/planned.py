"""Plans and problems of a graph by keywords, as people ask for them of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from planner.common.options import Budget, Search, flat_name, picked
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.problem import Problem
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
