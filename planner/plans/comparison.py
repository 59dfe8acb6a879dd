"""Evaluate schedules for tables of ways to train a step, and the baselines that a plan is compared with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.ir.checkpoints import Region, region_of, schedule_of
from planner.ir.graph import TrainingGraph
from planner.ir.layers import find_layers, forward_of_blocks
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.plans.plan import OWN, ComparisonRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A schedule, who it is from, its peak on the whole device, and the recompute and waiting that it adds."""

    name: str
    schedule: Schedule
    peak_bytes: int
    added_seconds: float
    step_seconds: float
    host_bytes: int = 0

    @property
    def overhead(self) -> float:
        """Added time as a share of the step."""
        return self.added_seconds / (self.step_seconds or 1.0)


def evaluate(
    problem: Problem,
    schedule: Schedule,
    name: str,
    *,
    evaluation: Evaluation | None = None,
    optimizer_peak_bytes: int = 0,
) -> Evaluated:
    """Evaluate a schedule for a table, by its simulation if given; the problem's budget is ignored.

    What the device holds during the optimizer's own step may count too.
    """
    found = evaluation or problem.evaluate(schedule)
    return Evaluated(
        name=name,
        schedule=schedule,
        peak_bytes=max(found.peak_bytes + problem.graph.total_static_bytes, optimizer_peak_bytes),
        added_seconds=found.added_seconds,
        step_seconds=problem.baseline.seconds,
        host_bytes=found.host_bytes,
    )


def cheapest_within(budget_bytes: int, found: Iterable[Evaluated]) -> Evaluated | None:
    """Return the cheapest whose peak is within a budget for the whole device."""
    fitting = (one for one in found if one.peak_bytes <= budget_bytes)
    return min(fitting, key=lambda one: (one.added_seconds, one.peak_bytes), default=None)


NO_BLOCKS = "the model has no repeated blocks that can be checkpointed"

_SECONDS_EACH = 2.0
"""For a simple solver; counted as work, so that the same report comes out every time."""


def every_nth_layer(graph: TrainingGraph, n: int) -> Schedule | None:
    """Return the schedule of ``torch.utils.checkpoint`` around the first block and every n-th after it, if any."""
    blocks = list(forward_of_blocks(graph, find_layers(graph)).items())
    regions = (region_of(graph, block, inside) for block, inside in blocks[::n])
    return schedule_of(graph, [region for region in regions if region is not None]) if blocks else None


def regions_of_blocks(problem: Problem) -> tuple[Region, ...]:
    """Return those regions of a problem that are repeated blocks."""
    blocks = set(find_layers(problem.graph).blocks)
    return tuple(region for region in problem.regions or () if region.module in blocks)


def baseline_rows(problem: Problem, own: Problem, solution: Solution) -> Iterator[ComparisonRow]:
    """Compare a solution, the last row, with no recompute, every layer, every second layer, and two simple solvers.

    The solution is of its ``own`` problem, whose operations may be in another order. Where modules are chosen, those
    solvers are left out. What does not exist is there with the reason.
    """
    yield _baseline(problem, "none", Schedule.keep_all(problem.graph), 0.0)
    yield _layer_row(problem, "every layer", 1)
    yield _layer_row(problem, "every second layer", 2)
    if problem.regions is None:
        yield _solver_row(problem, "sqrt(L)", "sqrt")
        yield _solver_row(problem, "chain DP", "chain-dp")
    yield _baseline(own, OWN, solution.schedule, solution.solve_seconds)


def _layer_row(problem: Problem, name: str, n: int) -> ComparisonRow:
    started = time.perf_counter()
    if problem.regions is None:
        schedule = every_nth_layer(problem.graph, n)
        missing = "the model has no repeated blocks"
    else:
        blocks = regions_of_blocks(problem)
        schedule = schedule_of(problem.graph, blocks[::n]) if blocks else None
        missing = NO_BLOCKS
    if schedule is None:
        return ComparisonRow(name=name, reason=missing)
    return _baseline(problem, name, schedule, time.perf_counter() - started)


def _baseline(problem: Problem, name: str, schedule: Schedule, seconds: float) -> ComparisonRow:
    found = evaluate(problem, schedule, name)
    return ComparisonRow(
        name=name,
        peak_bytes=found.peak_bytes,
        overhead=found.overhead,
        seconds=seconds,
        fits=found.peak_bytes <= problem.budget_bytes + problem.graph.total_static_bytes,
    )


def _solver_row(problem: Problem, name: str, solver: str) -> ComparisonRow:
    """Return a simple solver's plan at the budget, or at its smallest budget if it cannot keep that."""
    from planner.solvers import solve

    try:
        found = solve(replace(problem, host=None), solver, time_limit_seconds=_SECONDS_EACH, deterministic=True)
    except InfeasibleBudgetError as error:
        lowest = format_bytes(error.minimum_feasible_peak_bytes)
        return ComparisonRow(name=name, reason=f"no plan of this kind keeps the budget; one for {lowest} is known")
    except SolverUnavailableError as error:
        return ComparisonRow(name=name, reason=str(error))
    return _baseline(problem, name, found.schedule, found.solve_seconds)
