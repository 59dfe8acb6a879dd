"""What people would do without a planner, simulated, to set a plan beside it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, SolverUnavailableError
from planner.ir.checkpoints import Region, schedule_of
from planner.ir.graph import TrainingGraph
from planner.ir.layers import Layers, find_layers, forward_of_blocks
from planner.ir.module_regions import region_of
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.plans.evaluated import evaluate
from planner.plans.plan import BaselineRow

NO_BLOCKS = "the model has no repeated blocks that can be checkpointed"

_SECONDS_EACH = 2.0
"""For a simple solver; counted as work, so that the same report comes out every time."""


def every_nth_layer(graph: TrainingGraph, n: int, layers: Layers | None = None) -> Schedule | None:
    """Return the schedule of ``torch.utils.checkpoint`` around every n-th block.

    Parameters
    ----------
    n : int
        1 wraps every block, 2 the first, the third, and so on.
    layers : Layers, optional
        ``find_layers(graph)``, if it is at hand.

    Returns
    -------
    Schedule or None
        ``None`` if the model has no blocks.
    """
    layers = layers or find_layers(graph)
    return checkpointed_blocks(graph, layers.blocks[::n], layers) if layers.blocks else None


def checkpointed_blocks(graph: TrainingGraph, blocks: Iterable[str], layers: Layers | None = None) -> Schedule:
    """Return the schedule of ``torch.utils.checkpoint`` around each of these blocks.

    Parameters
    ----------
    blocks : iterable of str
        Paths of blocks, as :func:`planner.ir.layers.find_layers` names them.
    layers : Layers, optional
        ``find_layers(graph)``, if it is at hand.

    Notes
    -----
    O(operations + values).
    """
    layers = layers or find_layers(graph)
    inside = forward_of_blocks(graph, layers)
    regions = (region_of(graph, block, inside[block]) for block in blocks)
    return schedule_of(graph, [region for region in regions if region is not None])


def baseline_rows(problem: Problem, solution: Solution, layers: Layers | None = None) -> tuple[BaselineRow, ...]:
    """Set a solution beside the usual ways.

    Parameters
    ----------
    solution : Solution
        Shown in the last row, as ``"this plan"``.
    layers : Layers, optional
        ``find_layers(problem.graph)``, if it is at hand.

    Returns
    -------
    tuple of BaselineRow
        No recompute, every layer, every second layer, sqrt(L), the chain's dynamic programme, the solution; without
        those two solvers where modules are chosen.
        One that does not exist is there with the reason.
    """
    layers = layers or find_layers(problem.graph)
    if problem.regions is not None:
        return (*_module_rows(problem, layers), _row(problem, "this plan", solution.schedule, solution.solve_seconds))
    return (
        _row(problem, "none", Schedule.keep_all(problem.graph), 0.0),
        _layer_row(problem, "every layer", 1, layers),
        _layer_row(problem, "every second layer", 2, layers),
        _solver_row(problem, "sqrt(L)", "sqrt"),
        _solver_row(problem, "chain DP", "chain-dp"),
        _row(problem, "this plan", solution.schedule, solution.solve_seconds),
    )


def regions_of_blocks(problem: Problem, layers: Layers | None = None) -> tuple[Region, ...]:
    """Return those regions of a problem that are repeated blocks."""
    blocks = set((layers or find_layers(problem.graph)).blocks)
    return tuple(region for region in problem.regions or () if region.module in blocks)


def _module_rows(problem: Problem, layers: Layers) -> Iterator[BaselineRow]:
    blocks = regions_of_blocks(problem, layers)
    for name, regions in (("none", ()), ("every layer", blocks), ("every second layer", blocks[::2])):
        if regions or name == "none":
            yield _row(problem, name, schedule_of(problem.graph, regions), 0.0)
        else:
            yield BaselineRow(name=name, reason=NO_BLOCKS)


def _row(problem: Problem, name: str, schedule: Schedule, seconds: float) -> BaselineRow:
    found = evaluate(problem, schedule, name)
    return BaselineRow(
        name=name,
        peak_bytes=found.peak_bytes,
        overhead=found.overhead,
        seconds=seconds,
        fits=found.peak_bytes <= problem.budget_bytes + problem.graph.total_static_bytes,
    )


def _layer_row(problem: Problem, name: str, n: int, layers: Layers) -> BaselineRow:
    started = time.perf_counter()
    schedule = every_nth_layer(problem.graph, n, layers)
    if schedule is None:
        return BaselineRow(name=name, reason="the model has no repeated blocks")
    return _row(problem, name, schedule, time.perf_counter() - started)


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
