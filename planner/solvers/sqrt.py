"""Square-root segmentation: keep the boundaries between segments of the forward, recompute the rest.

The answer that fits on a blackboard, as a quick plan and as a baseline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from planner.cut_points import crossing_bytes, narrow_places, turning_point
from planner.errors import InfeasibleBudgetError
from planner.graph import TrainingGraph
from planner.problem import Problem, Progress, Solution
from planner.schedule import Schedule, recompute_lazily
from planner.simulate import simulate


class SqrtSolver:
    """Chen's segmentation, with the number of segments that costs least within the budget."""

    name = "sqrt"
    summary = "segments of the forward with kept boundaries (Chen et al. 2016); instant"
    proves_bound = False

    def solve(self, problem: Problem, *, time_limit_seconds: float, progress: Progress | None = None) -> Solution:
        """Try several numbers of segments and give the cheapest schedule within the budget.

        Notes
        -----
        O(numbers tried x runs); a few milliseconds each for 1,500 operations.

        References
        ----------
        Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.
        """
        started = time.perf_counter()
        best: tuple[float, int, Schedule] | None = None
        lowest: tuple[int, Schedule, int] | None = None
        for schedule in segmentations(problem.graph):
            evaluation = simulate(problem.graph, problem.costs, schedule)
            claim = (evaluation.recompute_seconds, evaluation.peak_bytes)
            if lowest is None or evaluation.peak_bytes < lowest[0]:
                lowest = (evaluation.peak_bytes, schedule, evaluation.peak_position)
            if evaluation.peak_bytes <= problem.budget_bytes and (best is None or claim < best[:2]):
                best = (*claim, schedule)
                if not evaluation.recompute_seconds:
                    break
            if time.perf_counter() - started > time_limit_seconds:
                break
        if best is None:
            assert lowest is not None
            static_bytes = problem.graph.total_static_bytes
            operation = problem.graph.operations[lowest[1].order[lowest[2]]].name
            raise InfeasibleBudgetError(
                f"no segmentation keeps {problem.budget_bytes + static_bytes} bytes; a plan is known for "
                f"{lowest[0] + static_bytes}, at {operation}",
                minimum_feasible_peak_bytes=lowest[0] + static_bytes,
                operation=operation,
            )
        return Solution(
            solver=self.name,
            schedule=best[2],
            peak_bytes=best[1],
            recompute_seconds=best[0],
            solve_seconds=time.perf_counter() - started,
        )


def segmentations(graph: TrainingGraph) -> Iterator[Schedule]:
    """Give the schedule without recompute, then segmented ones, those near the square root first.

    Parameters
    ----------
    graph : TrainingGraph
        Any; one whose forward has no narrow places just gets expensive boundaries.
    """
    yield Schedule.keep_all(graph)
    if not graph.operations:
        return
    turn = turning_point(graph)
    crossing = crossing_bytes(graph, turn)
    seen: set[tuple[int, ...]] = set()
    # Where sizes shrink along the forward, as in a CNN, the narrow places leave its start uncut.
    for candidates in (narrow_places(crossing), list(range(1, turn - 1))):
        for count in _counts(len(candidates)):
            places = _boundaries(graph, crossing, candidates, count, turn)
            if not places or places in seen:
                continue
            seen.add(places)
            for keeps_last in (True, False):
                yield _segmented(graph, turn, places, keeps_last=keeps_last)


def _counts(places: int) -> list[int]:
    """Give numbers of segments to try, those near the square root first."""
    root = max(2.0, math.sqrt(places + 1))
    counts = {2, 3, *(round(root * factor) for factor in (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8))}
    return sorted(
        (count for count in counts if 2 <= count <= places + 1), key=lambda count: abs(math.log(count / root))
    )


def _boundaries(graph: TrainingGraph, crossing: list[int], narrow: list[int], count: int, turn: int) -> tuple[int, ...]:
    """Choose the narrow places that cut what is saved for the backward into about equal segments."""
    saved = [0] * turn
    for u, maker in enumerate(graph.producer):
        if maker < turn and graph.readers[u] and graph.readers[u][-1] >= turn:
            saved[maker] += graph.values[u].size_bytes
    total = sum(saved)
    before = []
    running = 0
    for size in saved:
        running += size
        before.append(running)
    window = total / count / 2
    chosen: set[int] = set()
    for number in range(1, count):
        target = total * number / count
        near = [place for place in narrow if abs(before[place] - target) <= window]
        if near:
            chosen.add(min(near, key=lambda place: (crossing[place], abs(before[place] - target))))
    return tuple(sorted(chosen))


def _segmented(graph: TrainingGraph, turn: int, places: tuple[int, ...], *, keeps_last: bool) -> Schedule:
    """Drop, when the forward has ended, all that crosses no boundary."""
    dropped = []
    for u, maker in enumerate(graph.producer):
        if maker >= turn or not graph.operations[maker].recomputable or (keeps_last and maker > places[-1]):
            continue
        last = max((reader for reader in graph.readers[u] if reader < turn), default=-1)
        if not any(maker <= place < last for place in places):
            dropped.append(u)
    return recompute_lazily(graph, {turn: dropped})


SOLVER = SqrtSolver()
