"""The recompute set of one problem, laid out as arrays for the annealing kernels."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from itertools import accumulate, chain
from operator import ge
from typing import Any

from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solving.presolve import merged

_MOVE_SECONDS, _MOVE_SECONDS_PER_OPERATION = 2e-6, 3e-9

_SECONDS_AT_ONCE = 0.1
"""About how long kernels run: after that they must wait for other threads, which then have the interpreter."""

_COPIES, _RUNS, _MORE_RUNS = 96, 8, 256
"""How often one operation may run, unless more is needed; and how many reruns there may be, for each and beside."""

_SPARE = 2
"""Where a schedule needs more than that, there is room for so many times what it needs."""

SLOTS = 4
"""Slots of each operation, unless more are needed: how often what runs again before it may go back in base order, and
one."""


def _room(schedule: Schedule | None) -> tuple[int, int]:
    """Return the limits of runs per operation and of reruns in all, for moves from a schedule. O(runs)."""
    runs = Counter(schedule.order if schedule is not None else ())
    return _SPARE * max(runs.values(), default=0), _SPARE * (runs.total() - len(runs))


def slots_needed(schedule: Schedule) -> int:
    """Return how many slots each operation needs to express a schedule's recomputations. O(runs)."""
    backwards = (sum(map(ge, runs, runs[1:])) for runs in schedule.recomputations().values())
    return 1 + max(backwards, default=0)


_OF_RUNS = ("keys", "live_bytes", "dying_bytes", "kept_keys", "kept_live_bytes", "kept_dying_bytes")
"""Fields of the state that have a place for each run."""


class RerunSet:
    """A recompute set that :mod:`planner.solving.annealing` changes at random, and the cheapest one within the budget.

    With ``room_for`` it can be what becomes of that schedule, and has room to move from there.
    """

    def __init__(self, problem: Problem, seed: int, *, slots: int = SLOTS, room_for: Schedule | None = None) -> None:
        from planner.solving import annealing as kernels

        np: Any = import_module("numpy")
        self.problem = problem = merged(problem)
        self.kernels, self.slots = kernels, max(slots, slots_needed(room_for) if room_for is not None else 0)
        self.random = random.Random(seed)
        graph, costs = problem.graph, problem.costs
        count = len(graph.operations)
        repeatable = [c.seconds for c, o in zip(costs, graph.operations, strict=True) if o.recomputable and c.seconds]
        self.unit_seconds = sum(repeatable) / len(repeatable) if repeatable else 1.0
        self.move_seconds = _MOVE_SECONDS + _MOVE_SECONDS_PER_OPERATION * count
        """About what a move takes, where work is counted and not time."""
        self.moves_at_once = int(_SECONDS_AT_ONCE / self.move_seconds)
        """Between two looks at the clock."""
        self.tables = _tables(problem, kernels, self.unit_seconds)
        copies, capacity = map(max, _room(room_for), (_COPIES, _RUNS * count + _MORE_RUNS))

        def zeros(size: int | tuple[int, int]) -> Any:
            return np.zeros(size, np.int64)

        self.state = kernels.State(
            **{name: zeros(count + capacity) for name in _OF_RUNS},
            slots=zeros((count, copies)),
            places=zeros((count, copies)),
            count=zeros(count),
            reruns=zeros(capacity),
            best=zeros(1 + capacity),
            changes=zeros(kernels.CHANGES_AT_MOST),
            queue=zeros(1024),
            pending=zeros(kernels.MADE_AGAIN_AT_MOST),
            extended=zeros(1 + max((len(operation.inputs) for operation in graph.operations), default=0)),
            whole=zeros(8),
            real=np.zeros(3),
        )
        self.state.whole[kernels.BUDGET] = problem.budget_bytes
        self.state.whole[kernels.SLOTS] = self.slots
        self.state.whole[kernels.RANDOM] = self.random.getrandbits(62) | 1
        self.state.real[kernels.WEIGHT] = 1.0
        self.state.real[kernels.BEST] = math.inf
        own = self.slots * np.arange(count) + self.slots - 1
        dying_bytes = zeros(count)
        for u, value in enumerate(graph.values):
            if not value.retained:
                dying_bytes[graph.readers[u][-1] if graph.readers[u] else graph.producer[u]] += value.size_bytes
        live_bytes = np.array(problem.baseline.timeline_bytes, np.int64)
        self.without = own * count + np.arange(count), live_bytes, dying_bytes, own
        """What a set without reruns has for the runs: keys, bytes, those that go after each, and slots."""
        self.excess_without = int(np.maximum(live_bytes - problem.budget_bytes, 0).sum())
        self.reset(())

    def reset(self, keys: Iterable[int]) -> None:
        """Replace the set."""
        state, kernels, count = self.state, self.kernels, len(self.problem.graph.operations)
        state.keys[:count], state.live_bytes[:count], state.dying_bytes[:count], state.slots[:, 0] = self.without
        state.count[:] = 1
        state.whole[kernels.RUNS] = count
        state.whole[kernels.RERUNS] = 0
        state.whole[kernels.EXCESS] = self.excess_without
        state.real[kernels.COST] = 0.0
        kernels.add_all(self.tables, state, import_module("numpy").array(sorted(set(keys)), dtype="int64"))

    def keys_of(self, schedule: Schedule) -> list[int]:
        """Return the recompute set of a schedule; reruns beyond the slots are dropped.

        What rises in base order shares a slot.
        """
        slots, count = self.slots, len(self.problem.graph.operations)
        keys: set[int] = set()
        for operation, runs in schedule.recomputations().items():
            slot, before = slots * operation + slots - 1, count
            for index in reversed(runs):
                if index >= before and slot % slots:
                    slot -= 1
                before = index
                keys.add(slot * count + index)
        return sorted(keys)

    def schedule(self, keys: Iterable[int]) -> Schedule:
        """Return the schedule of a recompute set."""
        count, slots = len(self.problem.graph.operations), self.slots
        before: dict[int, list[int]] = {}
        for key in sorted(keys):
            before.setdefault(int(key) // count // slots, []).append(int(key) % count)
        return Schedule.with_recomputations(self.problem.graph, before)

    def can_be(self, schedule: Schedule, most_bytes: float) -> bool:
        """Whether a schedule can be expressed here within some bytes, with room for further moves."""
        copies, runs = _room(schedule)
        if copies > self.state.slots.shape[1] or runs > len(self.state.reruns):
            return False
        return self.problem.evaluate(self.schedule(self.keys_of(schedule))).peak_bytes <= most_bytes

    def best(self) -> Any:
        """Return the keys of the cheapest set within the budget so far."""
        return self.state.best[1 : 1 + self.state.best[0]]


def _tables(problem: Problem, kernels: Any, unit_seconds: float) -> Any:
    np = import_module("numpy")
    graph, costs = problem.graph, problem.costs
    operations, values, producer, readers = graph.operations, graph.values, graph.producer, graph.readers

    def rows(lists: Iterable[Iterable[int]]) -> tuple[Any, Any]:
        each = list(map(tuple, lists))
        return np.array([0, *accumulate(map(len, each))], np.int64), np.array(list(chain(*each)), np.int64)

    def counts(some: bool, u: int) -> bool:
        return values[u].size_bytes > 0 and not (some and values[u].retained)

    input_start, inputs = rows([u for u in dict.fromkeys(o.inputs) if counts(True, u)] for o in operations)
    output_start, outputs = rows([u for u in o.outputs if counts(False, u)] for o in operations)
    reader_start, flat_readers = rows(readers)
    droppable = [u for u, p in enumerate(producer) if counts(True, u) and readers[u] and operations[p].recomputable]
    return kernels.Tables(
        input_start=input_start,
        inputs=inputs,
        output_start=output_start,
        outputs=outputs,
        reader_start=reader_start,
        readers=flat_readers,
        size_bytes=np.array([value.size_bytes for value in values], np.int64),
        is_retained=np.array([value.retained for value in values], np.bool_),
        producer=np.array(producer, np.int64),
        costs=np.array([cost.seconds / unit_seconds for cost in costs]),
        workspace_bytes=np.array([cost.workspace_bytes for cost in costs], np.int64),
        state_bytes=np.array([operation.state_bytes for operation in operations], np.int64),
        is_recomputable=np.array([operation.recomputable for operation in operations], np.bool_),
        droppable=np.array(droppable, np.int64),
    )
