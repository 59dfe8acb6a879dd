"""A training step seen as a chain of stages: what the dynamic programme over chains works on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.ir.cut_points import last_forward_readers, turning_point
from planner.ir.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """What one stage takes; two stages that are equal here are interchangeable."""

    boundary_bytes: int
    """What it hands to the next stage."""
    saved_bytes: int
    """What its backward needs of what it makes, and the boundary."""
    pass_bytes: int
    pass_seconds: float
    """Peak and time of running it again for its boundary alone, its input not counted."""
    save_bytes: int
    save_seconds: float
    """The same for everything saved."""
    own_bytes: int
    own_seconds: float
    """The same for what its own backward needs, without the boundary."""
    first_pass_bytes: int
    first_save_bytes: int
    """Peaks of its first run, with all other memory of the forward."""
    backward_bytes: int
    """Peak of its backward, saved values included, above what stands when it begins."""


class Chain:
    """The stages of a problem: each ends after one of some places of its forward, the last one with it.

    Values made in the forward are *managed* if a plan may drop them: recomputable, not retained,
    and crossing at most one place. All others stay as long as in the step without recompute.
    The backward of each stage ``starts`` somewhere in the base order, where so much is ``standing_bytes``,
    managed values not counted. O(values + inputs).
    """

    def __init__(self, problem: Problem, places: Sequence[int]) -> None:
        self.problem = problem
        graph = problem.graph
        self.turn = turning_point(graph)
        self.ends = [*(place + 1 for place in places), self.turn]
        self.count = len(self.ends)
        self._assign_values()
        self._assign_backward()
        self._measure_load()
        self.workspaces = [cost.workspace_bytes for cost in problem.costs]
        self.passed: list[list[int]] = []
        self.saved: list[list[int]] = []
        self.own: list[list[int]] = []
        self.stages = [self._stage(k) for k in range(self.count)]

    def first_run(self, k: int) -> range:
        """Return the operations of a stage in base order."""
        return range(self.ends[k - 1] if k else 0, self.ends[k])

    def backward(self, k: int) -> range:
        """Return the operations of a stage's backward, the loss with the last stage's."""
        return range(self.starts[k], self.starts[k - 1] if k else len(self.problem.graph.operations))

    def _assign_values(self) -> None:
        graph = self.problem.graph
        stage_of = [k for k in range(self.count) for _ in self.first_run(k)]
        self.stage: list[int] = [-1] * len(graph.values)
        self.leaves = [False] * len(graph.values)
        for u, last in enumerate(last_forward_readers(graph, self.turn)):
            maker = graph.producer[u]
            if maker >= self.turn or graph.values[u].retained or not graph.operations[maker].recomputable:
                continue
            k = stage_of[maker]
            crossed = stage_of[last] - k if last > maker else 0
            if crossed <= 1:
                self.stage[u] = k
                self.leaves[u] = crossed == 1

    def _assign_backward(self) -> None:
        """Let each backward begin where, for the first time, something of its stage or below is needed."""
        graph = self.problem.graph
        count = len(graph.operations)
        self.starts = [self.turn if k == self.count - 1 else count for k in range(self.count)]
        reached: dict[int, int] = {}
        lowest = self.count - 1
        for index in range(self.turn, count):
            operation = graph.operations[index]
            needed = [reached[u] for u in operation.inputs if u in reached]
            needed += [self.stage[u] + self.leaves[u] for u in operation.inputs if self.stage[u] >= 0]
            at = min(needed, default=lowest)
            for u in operation.outputs:
                reached[u] = at
            while lowest > at:
                lowest -= 1
                self.starts[lowest] = index

    def _measure_load(self) -> None:
        """Sum up what is not managed: at each operation, and between operations where backwards begin."""
        graph, costs = self.problem.graph, self.problem.costs
        count = len(graph.operations)
        change, between = [0] * (count + 1), [0] * (count + 1)
        for u, maker in enumerate(graph.producer):
            if self.stage[u] < 0:
                last = graph.readers[u][-1] if graph.readers[u] else maker
                last = count - 1 if graph.values[u].retained else last
                change[maker] += graph.values[u].size_bytes
                change[last + 1] -= graph.values[u].size_bytes
                between[maker + 1] += graph.values[u].size_bytes
                between[last + 1] -= graph.values[u].size_bytes
        self.load_bytes = [
            total_bytes + cost.workspace_bytes for total_bytes, cost in zip(accumulate(change), costs, strict=False)
        ]
        crossing = list(accumulate(between))
        self.standing_bytes = [crossing[start] for start in self.starts]
        self.standing_bytes[-1] = 0  # the last stage's forward is never repeated before its backward begins

    def _stage(self, k: int) -> ChainStage:
        graph, costs = self.problem.graph, self.problem.costs
        runs = self.first_run(k)
        managed = [u for index in runs for u in graph.operations[index].outputs if self.stage[u] == k]
        boundary = {u for u in managed if self.leaves[u]}
        own = {u for u in managed if graph.readers[u] and graph.readers[u][-1] >= self.starts[k]}
        saved = own | boundary
        self.passed.append(self._closure(k, boundary))
        self.saved.append(self._closure(k, saved))
        self.own.append(self._closure(k, own))

        def total_bytes(values: Collection[int]) -> int:
            return sum(graph.values[u].size_bytes for u in values)

        def total_seconds(runs: Sequence[int]) -> float:
            return sum(costs[index].seconds for index in runs)

        return ChainStage(
            boundary_bytes=total_bytes(boundary),
            saved_bytes=total_bytes(saved),
            pass_bytes=self._peak(self.passed[k], boundary, self.workspaces),
            pass_seconds=total_seconds(self.passed[k]),
            save_bytes=self._peak(self.saved[k], saved, self.workspaces),
            save_seconds=total_seconds(self.saved[k]),
            own_bytes=self._peak(self.own[k], own, self.workspaces),
            own_seconds=total_seconds(self.own[k]),
            first_pass_bytes=self._peak(runs, boundary, self.load_bytes, k),
            first_save_bytes=self._peak(runs, saved, self.load_bytes, k),
            backward_bytes=self._backward_peak(k, own) - self.standing_bytes[k],
        )

    def _closure(self, k: int, targets: Collection[int]) -> list[int]:
        """Return what must run again in a stage to make some of its values from its input."""
        graph = self.problem.graph
        needed = set(targets)
        runs = []
        for index in reversed(self.first_run(k)):
            if not needed.isdisjoint(graph.operations[index].outputs):
                runs.append(index)
                needed.update(u for u in graph.operations[index].inputs if self.stage[u] == k)
        return runs[::-1]

    def _peak(self, runs: Sequence[int], kept: Collection[int], load_bytes: Sequence[int], k: int | None = None) -> int:
        """Return the most bytes of values made by some runs, on top of a load; of stage ``k`` only if given."""
        graph = self.problem.graph
        last: dict[int, int] = {}
        for index in runs:
            for u in (*graph.operations[index].inputs, *graph.operations[index].outputs):
                last[u] = index
        live = peak = 0
        made: set[int] = set()
        for index in runs:
            operation = graph.operations[index]
            new = [u for u in operation.outputs if k is None or self.stage[u] == k]
            made.update(new)
            live += sum(graph.values[u].size_bytes for u in new)
            peak = max(peak, live + load_bytes[index])
            gone = {u for u in (*operation.inputs, *new) if u in made and last[u] == index and u not in kept}
            live -= sum(graph.values[u].size_bytes for u in gone)
        return peak

    def _backward_peak(self, k: int, own: Collection[int]) -> int:
        graph = self.problem.graph
        runs = self.backward(k)
        live = sum(graph.values[u].size_bytes for u in own)
        leaving = [0] * (len(runs) + 1)
        for u in own:
            leaving[min(graph.readers[u][-1] - runs.start + 1, len(runs))] += graph.values[u].size_bytes
        peak = self.standing_bytes[k]
        for place, index in enumerate(runs):
            live -= leaving[place]
            peak = max(peak, live + self.load_bytes[index])
        return peak
