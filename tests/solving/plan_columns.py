"""A plan as a solution of a step-cut programme: the way back from :func:`planner.solving.step_cut.carry_out`.

Whatever plan keeps the budget is a solution of the programme of any cuts, with every row that is ever added, and costs
no more there. So it is a start for whoever solves the programme, and what is dearer need not be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import lifetimes
from planner.solving.presolve import DominatedValue
from planner.solving.step_cut import Cut, Model


def columns_of(problem: Problem, cuts: Sequence[Cut], model: Model, schedule: Schedule) -> list[float]:
    """Return a solution that stands for a plan in the base order without offloads; O(cuts x values + runs)."""
    graph, order = problem.graph, schedule.order
    first = schedule.first_runs()
    moments = _moments(cuts, order, first)
    ends = [*moments[1:], len(order)]
    spans = zip(moments, ends, strict=True)
    runs = [{order[at] for at in range(*span) if first[order[at]] != at} for span in spans]
    begun = [{order[at]} if first[order[at]] != at else set[int]() for at in moments]
    copies = lifetimes(graph, schedule)
    held = [{copy.value for copy in copies if copy.born < at <= copy.died} for at in moments]
    for there, operations in zip(held, begun, strict=True):
        there.update(u for operation in operations for u in graph.operations[operation].outputs)
    for passing in model.dominated:
        _pass_on(cuts, passing, held, runs)
    columns = [0.0] * len(model.cost)
    ran_after: set[int] = set()
    for number in reversed(range(len(cuts))):
        ran_after |= runs[number]
        for columns_of_each, those in (
            (model.held[number], held[number]),
            (model.run_again[number], runs[number]),
            (model.begins[number], begun[number]),
            (model.ever_after[number], ran_after),
        ):
            for each in those & columns_of_each.keys():
                columns[columns_of_each[each]] = 1.0
    columns[model.nothing] = 0.0
    return columns


def _moments(cuts: Sequence[Cut], order: Sequence[int], first: dict[int, int]) -> list[int]:
    """Return where in an order the moment of each cut is."""
    found: list[int] = []
    for cut in cuts:
        at = first[cut.step]
        if cut.again:
            since = range(found[-1] + 1, at)
            at = next((place for place in since if order[place] in cut.again), at)
        found.append(at)
    return found


def _pass_on(cuts: Sequence[Cut], each: DominatedValue, held: list[set[int]], runs: list[set[int]]) -> None:
    """Hold a dominated value's results in its place; see :mod:`planner.solving.presolve`."""
    kept = [each.value in there for there in held] + [False]
    for number, cut in enumerate(cuts):
        if cut.latest < each.reader:
            continue
        ran, following = runs[number], kept[number + 1]
        if kept[number]:
            held[number].update(each.results)
            needed = False
        else:
            needed = each.reader in ran or (each.maker in ran and following)
        ran.discard(each.reader)
        if needed:
            ran.update((each.maker, each.reader))
