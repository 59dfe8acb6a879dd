"""Variants to run a region again: all of it, or all but some operations whose outputs its checkpoint keeps.

What may be kept are the operations that do much for the bytes that they make: products, convolutions, attention.
Each region is offered in a few variants, of which one at most is chosen: the best by seconds saved for each byte held
first, in steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.common.limits import Clock
from planner.errors import InfeasibleBudgetError
from planner.ir.checkpoints import Keepable, Region
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.problem import Problem, Progress, Solution
from planner.solving.modules.ilp import Chooser

_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the seconds that keeping can save: each variant saves as much, or is the next that saves more."""


def cheapest(
    problem: Problem,
    regions: Sequence[Region],
    clock: Clock,
    progress: Progress | None = None,
    *,
    near_seconds: float = 0.0,
) -> Solution:
    """Return the choice of variants to run regions again that keeps the budget with the least recompute.

    Whole regions are chosen first, which is quick: that choice stands where the other does not end in time. What is
    so near to the best is not bettered. If none was found, an InfeasibleBudgetError has the lowest peak that was.
    """
    found: list[Solution] = []
    refused: list[InfeasibleBudgetError] = []
    bound = 0.0
    for variants in (regions, variants_of(regions, problem.graph, problem.costs)):
        try:
            found.append(Chooser(problem, variants, clock, progress, near_seconds=near_seconds).cheapest())
            bound = found[-1].lower_bound_seconds
        except InfeasibleBudgetError as error:
            refused.append(error)
            bound = error.lower_bound_seconds
    if not found:
        raise min(refused, key=lambda error: error.minimum_feasible_peak_bytes)
    best = min(found, key=lambda solution: solution.added_seconds)
    return replace(best, lower_bound_seconds=min(best.added_seconds, bound))  # of the second: it chooses among more


def variants_of(regions: Sequence[Region], graph: TrainingGraph, costs: Sequence[OperationCost]) -> tuple[Region, ...]:
    """Return each region, and after it the variants to keep outputs of some of its operations."""
    return tuple(variant for region in regions for variant in (region, *_selective_variants(region, graph, costs)))


def _selective_variants(region: Region, graph: TrainingGraph, costs: Sequence[OperationCost]) -> Iterator[Region]:
    random = tuple(one for one in region.keepable if one.is_random)
    units = [(one,) for one in region.keepable if not one.is_random] + [random] * bool(random)
    seconds = {unit: sum(costs[one.index].seconds for one in unit) for unit in units}
    held_bytes = {
        unit: sum(graph.values[value].size_bytes for one in unit for value in graph.operations[one.index].outputs)
        for unit in units
    }
    worth = sorted(units, key=lambda unit: -seconds[unit] / max(held_bytes[unit], 1))
    whole_seconds = sum(seconds.values())
    kept: list[Keepable] = []
    saved_seconds, reached = 0.0, 0
    for unit in worth:
        kept += unit
        saved_seconds += seconds[unit]
        shares = sum(saved_seconds >= share * whole_seconds * (1 - 1e-9) for share in _SHARES)
        if shares > reached and whole_seconds > 0:
            reached = shares
            yield keeping(region, kept)


def keeping(region: Region, kept: Sequence[Keepable]) -> Region:
    """Return the variant to run a region again in which its checkpoint keeps the outputs of some operations."""
    stand_ins = {one.index: one.stand_in for one in kept}
    again = tuple(stand_ins.get(index, index) for index in region.recompute)
    return replace(region, recompute=again, kept=tuple(sorted(kept, key=lambda one: one.index)))


def variant_named(region: Region, operators: Mapping[str, Sequence[int]]) -> Region | None:
    """Return the variant that keeps these occurrences of these operators, None if the region has not all of them."""
    named = {(operator, occurrence) for operator, numbers in operators.items() for occurrence in numbers}
    kept = [one for one in region.keepable if (one.operator, one.occurrence) in named]
    return keeping(region, kept) if len(kept) == len(named) else None
