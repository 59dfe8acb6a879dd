"""What people would do without a planner, simulated, to set a plan beside it."""

from __future__ import annotations

import time
from collections.abc import Collection

from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.graph import Phase, TrainingGraph
from planner.layers import Layers, find_layers
from planner.plan_parts import BaselineRow
from planner.problem import Problem, Solution
from planner.schedule import Schedule
from planner.simulate import simulate
from planner.units import format_bytes

_SECONDS_EACH = 2.0
"""For a simple solver; counted as work, so that the same report comes out every time."""


def every_nth_layer(graph: TrainingGraph, n: int, layers: Layers | None = None) -> Schedule | None:
    """Give the schedule of ``torch.utils.checkpoint`` around every n-th block.

    Of a wrapped block only the boundary stays: what other modules read in the forward, and what
    cannot be recomputed. The rest is dropped after the block and is made again, all at once, when
    the backward first needs any of it.

    Parameters
    ----------
    graph : TrainingGraph
    n : int
        1 wraps every block, 2 the first, the third, and so on.
    layers : Layers, optional
        ``find_layers(graph)``, if it is at hand.

    Returns
    -------
    Schedule or None
        ``None`` if the model has no blocks.

    Notes
    -----
    O(operations + values).
    """
    layers = layers or find_layers(graph)
    if not layers.blocks:
        return None
    before: dict[int, list[int]] = {}
    for block in layers.blocks[::n]:
        region = {
            index
            for index, op in enumerate(graph.operations)
            if op.phase is Phase.FORWARD and layers.of[index] == block
        }
        again, first_need = _recompute_set(graph, region)
        if again:
            before.setdefault(first_need, []).extend(again)
    return Schedule.with_recomputations(graph, before)


def _recompute_set(graph: TrainingGraph, region: Collection[int]) -> tuple[list[int], int]:
    """Give what must run again for a region's backward, and before which operation.

    The region's own inputs are boundary and held; so is what it gives to others in the forward.
    """
    operations, values, readers = graph.operations, graph.values, graph.readers
    held = {
        value
        for index in region
        for value in operations[index].outputs
        if values[value].retained
        or not operations[index].recomputable
        or any(operations[r].phase is not Phase.BACKWARD and r not in region for r in readers[value])
    }
    needs: dict[int, int] = {}
    for index in region:
        for value in operations[index].outputs:
            late = next((r for r in readers[value] if operations[r].phase is Phase.BACKWARD), None)
            if value not in held and late is not None:
                needs[value] = late
    if not needs:
        return [], -1
    again: set[int] = set()
    pending = list(needs)
    while pending:
        producer = graph.producer[pending.pop()]
        if producer in again:
            continue
        again.add(producer)
        pending.extend(
            value for value in operations[producer].inputs if value not in held and graph.producer[value] in region
        )
    return sorted(again), min(needs.values())


def baseline_rows(problem: Problem, solution: Solution, layers: Layers | None = None) -> tuple[BaselineRow, ...]:
    """Set a solution beside the usual ways.

    Parameters
    ----------
    problem : Problem
    solution : Solution
        Shown in the last row, as ``"this plan"``.
    layers : Layers, optional
        ``find_layers(problem.graph)``, if it is at hand.

    Returns
    -------
    tuple of BaselineRow
        No recompute, every layer, every second layer, sqrt(L), the chain's dynamic programme, the solution.
        One that does not exist is there with the reason.
    """
    layers = layers or find_layers(problem.graph)
    return (
        _row(problem, "none", Schedule.keep_all(problem.graph), 0.0),
        _layer_row(problem, "every layer", 1, layers),
        _layer_row(problem, "every second layer", 2, layers),
        _solver_row(problem, "sqrt(L)", "sqrt"),
        _solver_row(problem, "chain DP", "chain-dp"),
        _row(problem, "this plan", solution.schedule, solution.solve_seconds),
    )


def _row(problem: Problem, name: str, schedule: Schedule, seconds: float) -> BaselineRow:
    evaluation = simulate(problem.graph, problem.costs, schedule)
    step_seconds = problem.baseline.seconds
    return BaselineRow(
        name=name,
        peak_bytes=evaluation.peak_bytes + problem.graph.total_static_bytes,
        overhead=evaluation.recompute_seconds / step_seconds if step_seconds > 0 else 0.0,
        seconds=seconds,
        fits=evaluation.peak_bytes <= problem.budget_bytes,
    )


def _layer_row(problem: Problem, name: str, n: int, layers: Layers) -> BaselineRow:
    started = time.perf_counter()
    schedule = every_nth_layer(problem.graph, n, layers)
    if schedule is None:
        return BaselineRow(name=name, reason="the model has no repeated blocks")
    return _row(problem, name, schedule, time.perf_counter() - started)


def _solver_row(problem: Problem, name: str, solver: str) -> BaselineRow:
    """Give what a simple solver does at the budget, or if it cannot keep that, the least that it can do."""
    from planner.solvers import solve

    try:
        found = solve(problem, solver, time_limit_seconds=_SECONDS_EACH, deterministic=True)
    except InfeasibleBudgetError as error:
        lowest = format_bytes(error.minimum_feasible_peak_bytes)
        return BaselineRow(name=name, reason=f"no plan of this kind keeps the budget; one for {lowest} is known")
    except SolverUnavailableError as error:
        return BaselineRow(name=name, reason=str(error))
    return _row(problem, name, found.schedule, found.solve_seconds)
