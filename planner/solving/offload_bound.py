"""A lower bound on the time that any plan with offload adds to the step, from one cut.

Take the first run of one operation, the *cut*. Whatever a plan does, of each value that is read after
the cut one of these is true: it is *held* on the device at the cut; or it is made *again* after it; or
it is neither, so it is *away*: on the host, and fetched after the cut. Write ``x`` for what the plan adds
to the step before the cut begins, its recompute and its waiting there, and ``y`` for what it adds after. Then

- what is held fits in the budget together with what the cut's operation needs, and what is away fits
  in the host's budget;
- a value that is away has been sent before the cut begins. All those made by the operations from ``p`` on
  have been sent, one after the other, between the end of ``p`` and the cut. The step without the plan takes
  ``t`` seconds from the one to the other, this plan at most ``t + x``: so their transfers take no longer;
- its fetching begins after the cut's operation has ended, since its copy would be held at the cut otherwise,
  and as it is not made again, it has ended before the next operation of the base order that reads it begins.
  All those read by operations up to ``d`` have been fetched, one after the other, between the end of the
  cut's operation and the begin of ``d``: at most ``t + y``;
- ``y`` is at least the time of what is made again after the cut.

Every plan in the base order gives a solution of these rows, so their smallest ``x + y`` is a bound, and that
of their relaxation too. Only some ``p`` and ``d`` are taken: fewer rows prove less, and nothing wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from planner.ir.problem import Problem
from planner.solving.step_cut import Model, needed_after

_MOMENTS = 24
"""How many operations ``p``, and how many ``d``, are taken."""


def build(problem: Problem, step: int) -> OffloadCut | None:
    """Build the programme of one operation's first run; None if the values that must be held exceed the budget."""
    cut = OffloadCut(problem, step)
    if cut.room_bytes < 0:
        return None
    cut.require_values()
    cut.keep_budgets()
    cut.allow_transfers()
    return cut


class OffloadCut:
    """One cut's programme, in ``scale`` seconds: values ``held`` or ``away``, operations recomputed (``again``)."""

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
        # What computing waits for. It stays below one half of its column's range: what reads off a solution which
        # columns are set takes it for none.
        self.most_seconds = 4 * sum(self._seconds(u) for u in self.away) + self.scale
        self.waits_before, self.waits_after = (self.model.column(self.most_seconds / self.scale) for _ in range(2))

    def require_values(self) -> None:
        """Require every value that is read after the cut to be held, recomputed or offloaded."""
        for u, column in self.held.items():
            others = (self.again.get(self.graph.producer[u]), self.away.get(u))
            sources = [(source, 1.0) for source in (column, *others) if source is not None]
            if self.graph.readers[u][-1] > self.step:
                self.model.at_least(1.0, *sources)
            for reader in self.graph.readers[u]:
                if reader in self.again:
                    self.model.at_least(0.0, *sources, (self.again[reader], -1.0))

    def keep_budgets(self) -> None:
        """Require the held values, with random states for recomputation, and the offloaded ones to fit."""
        values, operations = self.graph.values, self.graph.operations
        held = [(column, values[u].size_bytes) for u, column in self.held.items()]
        held += [(column, operations[o].state_bytes) for o, column in self.again.items()]
        self._at_most(self.room_bytes, held, unit=max(self.problem.budget_bytes, 1))
        away = [(column, values[u].size_bytes) for u, column in self.away.items()]
        self._at_most(self.host.budget_bytes, away, unit=max(self.host.budget_bytes, 1))

    def allow_transfers(self) -> None:
        """Limit transfers to the time there is, before and after the cut."""
        graph, costs, step = self.graph, self.problem.costs, self.step
        begin = list(accumulate((cost.first_seconds for cost in costs), initial=0.0))
        makers = _grouped(self.away, lambda u: graph.producer[u])
        readers = _grouped(self.away, lambda u: next((r for r in graph.readers[u] if r > step), len(costs)))
        sent = [(begin[step] - begin[p + 1], makers[p]) for p in sorted(makers, reverse=True)]
        fetched = [(begin[d] - begin[step + 1], readers[d]) for d in sorted(readers)]
        self.transfers_within(sent, self.waits_before, self.most_seconds)
        self.transfers_within(fetched, *self.added_after())

    def added_after(self) -> tuple[int, float]:
        """Return a column for a share of some seconds, at most the time added after the cut."""
        costs = self.problem.costs
        most = self.most_seconds + sum(costs[o].seconds for o in self.again)
        column = self.model.column()
        again = [(column, -costs[o].seconds) for o, column in self.again.items()]
        self._at_most(0.0, [(column, most), *again, (self.waits_after, -self.most_seconds)], unit=self.scale)
        return column, most

    def transfers_within(self, moments: list[tuple[float, list[int]]], added: int, most_seconds: float) -> None:
        """Bound the transfers on one side of the cut.

        ``moments`` come from the nearest to the cut: the time from it to the cut, and the values on whose transfers
        it bears beside those before. Each sum is made from the one before, so that rows stay short.
        """
        total = sum(self._seconds(u) for u in self.away)
        before: list[tuple[int, float]] = []
        for seconds, values in _some(moments):
            column = self.model.column()
            terms = [(self.away[u], self._seconds(u)) for u in values]
            self._at_most(0.0, [*terms, *before, (column, -total)], unit=self.scale)
            self._at_most(seconds, [(column, total), (added, -most_seconds)], unit=self.scale)
            before = [(column, total)]

    def _seconds(self, u: int) -> float:
        return self.host.seconds(self.graph.values[u].size_bytes)

    def _at_most(self, most: float, terms: Sequence[tuple[int, float]], *, unit: float) -> None:
        self.model.at_least(-most / unit, *((column, -weight / unit) for column, weight in terms if weight))


def _grouped(values: Iterable[int], moment: Callable[[int], int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for u in values:
        groups.setdefault(moment(u), []).append(u)
    return groups


def _some(moments: list[tuple[float, list[int]]]) -> list[tuple[float, list[int]]]:
    """Pick evenly spaced moments, the last included; the values of skipped ones count with the next."""
    size = max(1, len(moments) // _MOMENTS)
    first = len(moments) % size
    chunks = [moments[:first], *(moments[at : at + size] for at in range(first, len(moments), size))]
    return [(chunk[-1][0], [u for _, values in chunk for u in values]) for chunk in chunks if chunk]
