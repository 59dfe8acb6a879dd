"""What people would do without a planner, simulated, to set a plan beside it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.ir.checkpoints import Region, schedule_of
from planner.ir.graph import TrainingGraph
from planner.ir.layers import find_layers, forward_of_blocks
from planner.ir.module_regions import region_of
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.plans.evaluated import evaluate
from planner.plans.plan import BaselineRow

NO_BLOCKS = "the model has no repeated blocks that can be checkpointed"

_SECONDS_EACH = 2.0
"""For a simple solver; counted as work, so that the same report comes out every time."""


def every_nth_layer(graph: TrainingGraph, n: int) -> Schedule | None:
    """Return the schedule of ``torch.utils.checkpoint`` around the first block and every n-th after it, if any."""
    blocks = find_layers(graph).blocks
    return checkpointed_blocks(graph, blocks[::n]) if blocks else None


def checkpointed_blocks(graph: TrainingGraph, blocks: Iterable[str]) -> Schedule:
    """Return the schedule of ``torch.utils.checkpoint`` around each of these blocks, which are paths."""
    inside = forward_of_blocks(graph, find_layers(graph))
    regions = (region_of(graph, block, inside[block]) for block in blocks)
    return schedule_of(graph, [region for region in regions if region is not None])


def regions_of_blocks(problem: Problem) -> tuple[Region, ...]:
    """Return those regions of a problem that are repeated blocks."""
    blocks = set(find_layers(problem.graph).blocks)
    return tuple(region for region in problem.regions or () if region.module in blocks)


def baseline_rows(problem: Problem, own: Problem, solution: Solution) -> Iterator[BaselineRow]:
    """Set a solution, the last row, beside no recompute, every layer, every second layer, and two simple solvers.

    The solution is of its ``own`` problem, whose operations may be in another order. Where modules are chosen, those
    solvers are left out. What does not exist is there with the reason.
    """
    yield _row(problem, "none", Schedule.keep_all(problem.graph), 0.0)
    yield _layer_row(problem, "every layer", 1)
    yield _layer_row(problem, "every second layer", 2)
    if problem.regions is None:
        yield _solver_row(problem, "sqrt(L)", "sqrt")
        yield _solver_row(problem, "chain DP", "chain-dp")
    yield _row(own, "this plan", solution.schedule, solution.solve_seconds)


def _layer_row(problem: Problem, name: str, n: int) -> BaselineRow:
    started = time.perf_counter()
    if problem.regions is None:
        schedule = every_nth_layer(problem.graph, n)
        missing = "the model has no repeated blocks"
    else:
        blocks = regions_of_blocks(problem)
        schedule = schedule_of(problem.graph, blocks[::n]) if blocks else None
        missing = NO_BLOCKS
    if schedule is None:
        return BaselineRow(name=name, reason=missing)
    return _row(problem, name, schedule, time.perf_counter() - started)


def _row(problem: Problem, name: str, schedule: Schedule, seconds: float) -> BaselineRow:
    found = evaluate(problem, schedule, name)
    return BaselineRow(
        name=name,
        peak_bytes=found.peak_bytes,
        overhead=found.overhead,
        seconds=seconds,
        fits=found.peak_bytes <= problem.budget_bytes + problem.graph.total_static_bytes,
    )


def _solver_row(problem: Problem, name: str, solver: str) -> BaselineRow:
    """Return what a simple solver does at the budget, or if it cannot keep that, the least that it can do."""
    from planner.solvers import solve

    try:
        found = solve(replace(problem, host=None), solver, time_limit_seconds=_SECONDS_EACH, deterministic=True)
    except InfeasibleBudgetError as error:
        lowest = format_bytes(error.minimum_feasible_peak_bytes)
        return BaselineRow(name=name, reason=f"no plan of this kind keeps the budget; one for {lowest} is known")
    except SolverUnavailableError as error:
        return BaselineRow(name=name, reason=str(error))
    return _row(problem, name, found.schedule, found.solve_seconds)
