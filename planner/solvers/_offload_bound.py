"""A lower bound on what any plan with offload adds to the step, from one moment of it.

Take the first run of one operation, the *cut*. Whatever a plan does, of each value that is read after
the cut one of these is true: it is *held* on the device at the cut; or it is made *again* after it; or
it is neither, so it is *away*: on the host, and fetched after the cut. Write ``z`` for what the plan adds
to the step in all: its recompute and its waiting. Then

- what is held fits in the budget together with what the cut's operation needs, and what is away fits
  in the host's budget;
- a value that is away has been sent before the cut begins. All those made by the operations from ``p`` on
  have been sent, one after the other, between the end of ``p`` and the cut. The step without the plan takes
  ``t`` seconds from the one to the other, this plan at most ``t + z``: so their transfers take no longer;
- its fetching begins after the cut's operation has ended, since its copy would be held at the cut otherwise,
  and as it is not made again, it has ended before the next operation of the base order that reads it begins.
  All those read by operations up to ``d`` have been fetched, one after the other, between the end of the
  cut's operation and the begin of ``d``: again at most ``t + z``;
- ``z`` is at least the time of what is made again after the cut.

Every plan in the base order gives a solution of these rows, so their smallest ``z`` is a bound, and that
of their relaxation too. Only some ``p`` and ``d`` are taken: fewer rows prove less, and nothing wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.problem import Problem
from planner.solvers._stepcut import Model, needed_after

_MOMENTS = 24
"""How many operations ``p``, and how many ``d``, are taken."""


@dataclass(frozen=True, slots=True)
class OffloadCut:
    """The programme of one cut; ``scale`` seconds are a unit of its cost.

    ``again`` and ``away`` give the columns of operations and of values.
    """

    model: Model
    scale: float
    again: dict[int, int]
    away: dict[int, int]


def build(problem: Problem, step: int) -> OffloadCut | None:
    """Write down what one cut demands.

    Parameters
    ----------
    problem : Problem
        With a host.
    step : int
        The operation whose first run is the cut.

    Returns
    -------
    OffloadCut or None
        None if what must be held breaks the budget.
    """
    return _Builder(problem, step).built()


class _Builder:
    def __init__(self, problem: Problem, step: int) -> None:
        assert problem.host is not None
        self.problem, self.graph, self.host, self.step = problem, problem.graph, problem.host, step
        self.model = Model()
        graph = problem.graph
        operations, values, producer, readers = graph.operations, graph.values, graph.producer, graph.readers
        movable = set(self.host.movable(self.graph))
        again, holdable = needed_after(problem, step)
        touched = {u for u in (*operations[step].inputs, *operations[step].outputs) if not values[u].retained}
        fixed = touched | {
            u
            for u in holdable
            if not operations[producer[u]].recomputable and readers[u][-1] > step and u not in movable
        }
        room = problem.budget_bytes - problem.costs[step].workspace_bytes
        room -= sum(v.size_bytes for u, v in enumerate(values) if v.retained and producer[u] <= step)
        self.room_bytes = room - sum(values[u].size_bytes for u in fixed)
        self.scale = max((cost.seconds for cost in problem.costs), default=0.0) or 1.0
        self.held = {u: self.model.column() for u in holdable if u not in fixed}
        self.again = {o: self.model.column(problem.costs[o].seconds / self.scale, integer=True) for o in again}
        self.away = {u: self.model.column(integer=True) for u in self.held if u in movable}
        # The rest of z. It stays below one half of its column's range: what reads off a solution which columns
        # are set takes it for none.
        self.most_seconds = 4 * sum(self.host.seconds(values[u].size_bytes) for u in self.away) + self.scale
        self.rest = self.model.column(self.most_seconds / self.scale)

    def built(self) -> OffloadCut | None:
        if self.room_bytes < 0:
            return None
        self.require_values()
        self.keep_budgets()
        self.allow_transfers()
        return OffloadCut(self.model, self.scale, self.again, self.away)

    def require_values(self) -> None:
        """Require every value that is read after the cut to be held, made again or away."""
        for u, column in self.held.items():
            others = (self.again.get(self.graph.producer[u]), self.away.get(u))
            sources = [(source, 1.0) for source in (column, *others) if source is not None]
            if self.graph.readers[u][-1] > self.step:
                self.model.at_least(1.0, *sources)
            for reader in self.graph.readers[u]:
                if reader in self.again:
                    self.model.at_least(0.0, *sources, (self.again[reader], -1.0))

    def keep_budgets(self) -> None:
        """Require what is held, with random states for reruns, and what is away to fit."""
        values, operations = self.graph.values, self.graph.operations
        held = [(column, values[u].size_bytes) for u, column in self.held.items()]
        held += [(column, operations[o].state_bytes) for o, column in self.again.items()]
        self.at_most(self.room_bytes, held, unit=max(self.problem.budget_bytes, 1))
        away = [(column, values[u].size_bytes) for u, column in self.away.items()]
        self.at_most(self.host.budget_bytes, away, unit=max(self.host.budget_bytes, 1))

    def allow_transfers(self) -> None:
        """Allow no more transfers than there is time for, before the cut and after it."""
        graph, costs, step = self.graph, self.problem.costs, self.step
        begin = list(accumulate((cost.seconds for cost in costs), initial=0.0))
        next_reader = {u: next((r for r in graph.readers[u] if r > step), len(costs)) for u in self.away}
        for maker in _some({graph.producer[u] for u in self.away}):
            late = [u for u in self.away if graph.producer[u] >= maker]
            self.transfers_within(begin[step] - begin[maker + 1], late)
        for reader in _some(set(next_reader.values())):
            early = [u for u in self.away if next_reader[u] <= reader]
            self.transfers_within(begin[reader] - begin[step + 1], early)

    def transfers_within(self, seconds: float, away: Iterable[int]) -> None:
        taken = [(self.away[u], self.host.seconds(self.graph.values[u].size_bytes)) for u in away]
        added = [(column, -self.problem.costs[o].seconds) for o, column in self.again.items()]
        self.at_most(seconds, [*taken, *added, (self.rest, -self.most_seconds)], unit=self.scale)

    def at_most(self, most: float, terms: Sequence[tuple[int, float]], *, unit: float) -> None:
        self.model.at_least(-most / unit, *((column, -weight / unit) for column, weight in terms if weight))


def _some(steps: set[int]) -> list[int]:
    """Take some of many, evenly, the last among them."""
    every = sorted(steps)
    return every[:: -max(1, len(every) // _MOMENTS)]
