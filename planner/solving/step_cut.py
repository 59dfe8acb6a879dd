"""The step-cut integer programme: which values are held at a few cuts, which operations are recomputed between them.

A *cut* is a moment of the step: the first run of an operation or, between two operations that
follow each other in the base order, the first time that one of a few is run again. Whatever a
plan does, the values live at a cut fit in the budget, and whatever is needed after it was live at
it or is made again. Writing that down for any choice of cuts relaxes the whole planning problem,
hence gives a lower bound; writing it down at the moments where carried-out solutions break the
budget makes it exact.

Everything here is plain data: no solver library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.solving.presolve import DominatedValue, dominated_values


@dataclass(frozen=True, slots=True)
class Cut:
    """A moment of the step at which the programme decides what is held."""

    step: int
    """The operation of the base order whose first run it is, or comes right before."""
    again: frozenset[int] = frozenset()
    """If given, the moment is the first at which one of these operations is run again since the cut before; that of
    ``step`` itself if none is."""
    twin: int = 0
    """Tells it from others of the same operations: each of them is a moment of its own."""

    @property
    def latest(self) -> int:
        """The last operation of the base order that has begun."""
        return self.step - 1 if self.again else self.step


Row = tuple[list[tuple[int, float]], float]
"""Columns with their weights, and what their weighted sum is at least."""

_NO_PRICE = 1e-9


def is_binding(price: float) -> bool:
    """Whether a row is binding at an optimum, by its dual price."""
    return abs(price) > _NO_PRICE


@dataclass(frozen=True, slots=True)
class Room:
    """The budget row of a cut."""

    cut: Cut
    sizes: dict[int, int]
    """By column, the bytes of what it is about; in the same order in every model that has the cut."""
    free_bytes: int
    """Beside all that is there anyway."""


@dataclass(slots=True)
class Model:
    """A mixed-integer programme: minimise ``cost . x`` with every ``x`` in 0..1 and every row at least its limit.

    ``run_again[k]`` and ``held[k]`` give, for the cut ``k``, the column of each operation that may
    run again between it and the next cut, and of each value that may be held at it or not;
    ``begins[k]`` that of each operation whose being run again may be the moment.
    """

    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    run_again: list[dict[int, int]] = field(default_factory=list)
    held: list[dict[int, int]] = field(default_factory=list)
    begins: list[dict[int, int]] = field(default_factory=list)
    ever_after: list[dict[int, int]] = field(default_factory=list)
    """Whether what has a random state runs again at any time after a cut."""
    rooms: list[Room] = field(default_factory=list)
    """Of the cuts at which not everything fits."""
    dominated: list[DominatedValue] = field(default_factory=list)
    """Values that are never held at a cut after their reader's first run: their column is that of ``nothing``."""
    nothing: int = -1

    def column(self, cost: float = 0.0, *, integer: bool = False) -> int:
        """Add a variable between 0 and 1."""
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def at_least(self, least: float, *terms: tuple[int, float]) -> None:
        """Add a row: a weighted sum is at least a limit."""
        self.rows.append((list(terms), least))


def needed_after(problem: Problem, latest: int) -> tuple[list[int], list[int]]:
    """Return the operations that may be recomputed after a cut and the values that may be held at it.

    Values of no size and retained ones are held without asking, so they are left out.
    """
    graph = problem.graph
    operations, values, readers = graph.operations, graph.values, graph.readers
    worth = [False] * len(operations)
    holdable: list[int] = []
    for index in range(latest, -1, -1):
        for value in operations[index].outputs:
            if not readers[value] or values[value].retained or not values[value].size_bytes:
                continue
            if readers[value][-1] > latest or any(worth[reader] for reader in readers[value]):
                holdable.append(value)
                worth[index] = worth[index] or operations[index].recomputable
    return [index for index in range(latest + 1) if worth[index]], holdable


def build(problem: Problem, cuts: Sequence[Cut]) -> Model | None:
    """Build the integer programme of some cuts; None if a cut exceeds the budget whatever is dropped.

    Cuts are in order of time. One with ``again`` set follows, perhaps after others like it, the cut of
    the operation before its ``step``, and so precedes that of ``step``. The optimum is a proven bound.

    O(cuts x (operations + their inputs)) columns and rows. Where ``run_again`` is whole, ``held``
    need not be declared so: each of its columns is bounded from below by differences of whole ones.
    Rows between neighbouring cuts are those of Jain et al., "Checkmate: Breaking the Memory Wall
    with Optimal Tensor Rematerialization", MLSys 2020, for a chosen few of its stages. The relaxation of several cuts
    is weak without those that :mod:`planner.solving.cutting_planes` adds.
    """
    builder = _Builder(problem, cuts)
    if min(builder.room_bytes) < 0:
        return None
    for number in range(len(cuts)):
        builder.require_inputs(number)
        if number + 1 < len(cuts):
            builder.link_to_next(number)
            builder.keep_states(number)
        builder.keep_budget(number)
    return builder.model


class _Builder:
    def __init__(self, problem: Problem, cuts: Sequence[Cut]) -> None:
        self.problem = problem
        self.graph = graph = problem.graph
        self.cuts = cuts
        self.model = model = Model()
        self.room_bytes: list[int] = []
        model.nothing = model.column()
        model.at_least(0.0, (model.nothing, -1.0))
        scale = max((cost.seconds for cost in problem.costs), default=0.0) or 1.0
        model.dominated = dominated_values(graph, frozenset().union(*(cut.again for cut in cuts)))
        operations, values, producer, readers = graph.operations, graph.values, graph.producer, graph.readers
        for cut in cuts:
            again, holdable = needed_after(problem, cut.latest)
            room = problem.budget_bytes
            room -= sum(v.size_bytes for u, v in enumerate(values) if v.retained and producer[u] <= cut.latest)
            fixed = {u for u in holdable if not operations[producer[u]].recomputable and readers[u][-1] > cut.latest}
            if not cut.again:
                step = operations[cut.step]
                fixed |= {u for u in (*step.inputs, *step.outputs) if not values[u].retained}
                room -= problem.costs[cut.step].workspace_bytes
            self.room_bytes.append(room - sum(values[u].size_bytes for u in fixed))
            dominated = {each.value for each in model.dominated if each.reader <= cut.latest}
            held = (u for u in holdable if u not in fixed)
            model.held.append({u: model.nothing if u in dominated else model.column() for u in held})
            seconds = ((o, problem.costs[o].seconds) for o in again)
            model.run_again.append({o: model.column(cost / scale, integer=True) for o, cost in seconds})
            model.begins.append({o: model.column(integer=True) for o in again if o in cut.again})
        random = [{o: column for o, column in again.items() if operations[o].state_bytes} for again in model.run_again]
        model.ever_after = [*({o: model.column() for o in again} for again in random[:-1]), random[-1]]

    def sources(self, number: int, value: int) -> list[tuple[int, float]]:
        """Return the columns of which one must be 1 for a value to be available after a cut; none if it always is."""
        if value not in self.model.held[number]:
            return []
        held = self.model.held[number][value]
        terms = [(held, 1.0)] if held != self.model.nothing else []
        maker = self.model.run_again[number].get(self.graph.producer[value])
        return terms if maker is None else [*terms, (maker, 1.0)]

    def require_inputs(self, number: int) -> None:
        """Require the inputs of all operations that run between two cuts to be available."""
        model, cut = self.model, self.cuts[number]
        held, run_again = model.held[number], model.run_again[number]
        is_last = number + 1 == len(self.cuts)
        until = len(self.graph.operations) if is_last else self.cuts[number + 1].latest
        for value in held:
            if any(cut.latest < reader <= until for reader in self.graph.readers[value]):
                model.at_least(1.0, *self.sources(number, value))
        for operation, column in run_again.items():
            for value in self.graph.operations[operation].inputs:
                if value in held:
                    model.at_least(0.0, *self.sources(number, value), (column, -1.0))
        if cut.again:
            self.require_beginning(number)

    def require_beginning(self, number: int) -> None:
        """Fix what a cut inside a step means."""
        model, held = self.model, self.model.held[number]
        begins, run_again = model.begins[number], model.run_again[number]
        any_begins = [(column, 1.0) for column in begins.values()]
        model.at_least(-1.0, *((column, -1.0) for column in begins.values()))
        for operation, column in begins.items():
            model.at_least(0.0, (run_again[operation], 1.0), (column, -1.0))
            itself = model.begins[number - 1].get(operation)
            since = [] if itself is None else [(itself, 1.0)]
            model.at_least(0.0, (model.run_again[number - 1][operation], -1.0), *since)
            runner = self.graph.operations[operation]
            for value in (*runner.inputs, *runner.outputs):
                if value in held:
                    model.at_least(0.0, (held[value], 1.0), (column, -1.0))
        # Where none is run again, the moment is that of the step, and nothing comes between.
        for column in run_again.values():
            model.at_least(0.0, *any_begins, (column, -1.0))
        before = model.begins[number - 1].values()
        if before:
            for column in begins.values():
                model.at_least(0.0, *((earlier, 1.0) for earlier in before), (column, -1.0))

    def link_to_next(self, number: int) -> None:
        """Require values held at the next cut to be held at this one or recomputed in between."""
        model, following = self.model, self.cuts[number + 1]
        for value, column in model.held[number + 1].items():
            maker = self.graph.producer[value]
            sources = self.sources(number, value)
            if column == model.nothing or maker > self.cuts[number].latest or not sources:
                continue
            if maker in following.again:
                sources.append((model.begins[number + 1][maker], 1.0))
            model.at_least(0.0, *sources, (column, -1.0))

    def keep_states(self, number: int) -> None:
        """Hold a random state at a cut if its operation is recomputed after it."""
        model, ever = self.model, self.model.ever_after[number]
        for operation, column in ever.items():
            model.at_least(0.0, (column, 1.0), (model.run_again[number][operation], -1.0))
            if operation in self.model.ever_after[number + 1]:
                model.at_least(0.0, (column, 1.0), (self.model.ever_after[number + 1][operation], -1.0))

    def keep_budget(self, number: int) -> None:
        """Require the values at a cut, and the random states for reruns after it, to fit."""
        model, graph = self.model, self.graph
        held = model.held[number].items()
        sizes = {column: graph.values[u].size_bytes for u, column in held if column != model.nothing}
        for operation, column in self.model.ever_after[number].items():
            sizes[column] = graph.operations[operation].state_bytes
        for operation, column in model.begins[number].items():
            extra = (u for u in graph.operations[operation].outputs if u not in model.held[number])
            sizes[column] = self.problem.costs[operation].workspace_bytes
            sizes[column] += sum(graph.values[u].size_bytes for u in extra)
        if sum(sizes.values()) > self.room_bytes[number]:
            model.rooms.append(Room(self.cuts[number], sizes, self.room_bytes[number]))
            unit = max(self.problem.budget_bytes, 1)
            row = [(column, -size / unit) for column, size in sizes.items() if size]
            model.at_least(-self.room_bytes[number] / unit, *row)


def carry_out(
    problem: Problem, cuts: Sequence[Cut], model: Model, columns: Sequence[float]
) -> tuple[Schedule, list[int]]:
    """Turn a solution of a model into a schedule that recomputes everything as late as possible.

    Beside it comes, for each of its positions, the last cut that has come; -1 before the first.
    """
    operations, producer = problem.graph.operations, problem.graph.producer
    run_again = [{o for o, column in cut.items() if columns[column] > 0.5} for cut in model.run_again]
    begins = [[o for o, column in cut.items() if columns[column] > 0.5] for cut in model.begins]
    dropped = _dropped(problem, cuts, model, run_again, begins)
    order: list[int] = []
    segment: list[int] = []
    number = -1
    pending: set[int] = set()
    absent: set[int] = set()

    def run(indices: Sequence[int]) -> None:
        order.extend(indices)
        segment.extend([number] * len(indices))
        pending.difference_update(indices)
        for index in indices:
            absent.difference_update(operations[index].outputs)

    def missing(index: int) -> list[int]:
        """Return the operations to recompute before an operation can run, in base order."""
        found: set[int] = set()
        stack = [index] if pending else []
        while stack:
            for value in operations[stack.pop()].inputs:
                if value in absent and producer[value] in pending and producer[value] not in found:
                    found.add(producer[value])
                    stack.append(producer[value])
        return sorted(found)

    for index in range(len(operations)):
        while number + 1 < len(cuts) and cuts[number + 1].step == index:
            run(sorted(pending))
            number += 1
            pending = set(run_again[number])
            absent = set(dropped[number])
            run(begins[number])
        run([*missing(index), index])
    return Schedule(tuple(order)), segment


def _dropped(
    problem: Problem, cuts: Sequence[Cut], model: Model, run_again: list[set[int]], begins: list[list[int]]
) -> list[set[int]]:
    """Return, for each cut, the values that need not be held, given the recomputations.

    The ``held`` columns of a solution are no guide: where there is room they may be anything.
    """
    operations, producer, readers = problem.graph.operations, problem.graph.producer, problem.graph.readers
    dropped: list[set[int]] = []
    needed: set[int] = set()
    until = len(operations)
    for number in reversed(range(len(cuts))):
        latest, runs, held = cuts[number].latest, run_again[number], model.held[number].keys()
        own = {u for operation in begins[number] for u in operations[operation].inputs}
        needed = {
            u
            for u in held
            if u in own
            or (
                producer[u] not in runs
                and (u in needed or any(latest < reader <= until or reader in runs for reader in readers[u]))
            )
        }
        until = latest
        dropped.append(held - needed)
    dropped.reverse()
    return dropped
