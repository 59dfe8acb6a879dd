"""Which modules to checkpoint, by an integer programme: least recompute within a budget, or the lowest peak.

An integer programme over the regions, with one row for each moment of the step that matters. Rows are
added where a choice, simulated, breaks the budget; since any set of them relaxes the whole question,
each optimum bounds from below what *choices of these regions* can do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.common.limits import Clock
from planner.ir.checkpoints import Region, schedule_of
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.layers import path_prefixes
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation
from planner.solving.incumbent import Incumbent
from planner.solving.milp import Answer, minimise
from planner.solving.modules.peaks import Group, Need, Needs
from planner.solving.step_cut import Model

NAME = "checkpoints"

_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the seconds that keeping can save: each variant saves as much, or is the next that saves more."""

_TURNS_PER_SECOND = 1000
"""About how often HiGHS asks in a second whether to stop; counted where the same answer must come each time."""


class Chooser:
    """Chooses regions to checkpoint."""

    def __init__(
        self, problem: Problem, regions: Sequence[Region], clock: Clock, progress: Progress | None = None
    ) -> None:
        self.problem = problem
        self.regions = regions
        self.clock = clock
        self._needs = Needs(problem.graph, problem.costs, regions)
        self._seconds = [sum(problem.costs[index].seconds for index in region.recompute) for region in regions]
        self._moments: dict[int, Need] = {}
        """By operation of the base order; that of a region's recompute by minus its number, less one."""
        self._refused: list[frozenset[int]] = []
        self._tell = progress or (lambda _: None)

    def choose(self) -> tuple[frozenset[int], float]:
        """Return the cheapest choice within the budget, else the lowest found, and a bound in seconds."""
        chosen: frozenset[int] = frozenset()
        bound = 0.0
        while (evaluation := self._simulate(chosen)).peak_bytes > self.problem.budget_bytes:
            self._add_moments(evaluation, chosen, self.problem.budget_bytes)
            self._tell(
                f"{NAME}: budget required at {len(self._moments)} of the step; recompute adds at least {bound:.3g} s"
            )
            answer = self._minimise(self._model(self.problem.budget_bytes))
            bound = max(bound, answer.bound * self._unit_seconds)
            if answer.columns is None:
                return self.lowest(), bound
            chosen = self._chosen(answer)
        return chosen, bound

    def lowest(self) -> frozenset[int]:
        """Return the choice with the lowest peak that is found."""
        best, chosen = frozenset[int](), frozenset[int]()
        best_bytes = self.problem.baseline.peak_bytes
        known = -1
        while True:
            evaluation = self._simulate(chosen)
            if evaluation.peak_bytes < best_bytes:
                best, best_bytes = chosen, evaluation.peak_bytes
            self._add_moments(evaluation, chosen, evaluation.peak_bytes - 1)
            if len(self._moments) == known:
                return best  # the programme knew of every moment at which this peak stands
            known = len(self._moments)
            answer = self._minimise(self._model(None))
            if answer.columns is None:
                return best
            chosen = self._chosen(answer)

    def schedule(self, chosen: frozenset[int]) -> Schedule:
        """Return the schedule of a choice."""
        return schedule_of(self.problem.graph, [self.regions[r] for r in sorted(chosen)])

    def _simulate(self, chosen: frozenset[int]) -> Evaluation:
        return self.problem.evaluate(self.schedule(chosen))

    def _chosen(self, answer: Answer) -> frozenset[int]:
        assert answer.columns is not None
        return frozenset(r for r in range(len(self.regions)) if answer.columns[r] > 0.5)

    def _minimise(self, model: Model) -> Answer:
        left = self.clock.left()
        if left <= 0:
            return Answer(None, 0.0)
        if not self.clock.counts_work:
            return minimise(model, seconds=left)
        answer = minimise(model, turns=max(1, int(left * _TURNS_PER_SECOND)))
        self.clock.work((1 + answer.turns) / _TURNS_PER_SECOND)
        return answer

    # Moments.

    def _add_moments(self, evaluation: Evaluation, chosen: frozenset[int], above_bytes: int) -> None:
        """Add the worst moment of the base order and of each recompute that exceeds so many bytes."""
        worst: tuple[int, int] | None = None
        new: dict[int, Need] = {}
        again = {index: r for r in chosen for index in self.regions[r].recompute}
        ran: set[int] = set()
        for index, size_bytes in zip(self.schedule(chosen).order, evaluation.timeline_bytes, strict=True):
            if size_bytes > above_bytes:
                if index not in ran:
                    if index not in self._moments:
                        worst = max(worst or (0, 0), (size_bytes, index))
                elif index in again and -1 - again[index] not in self._moments:
                    new[-1 - again[index]] = self._needs.within(again[index])
            ran.add(index)
        if worst is not None:
            new[worst[1]] = self._needs.at(worst[1])
        if not new:  # it slipped through a tolerance
            self._refused.append(chosen)
        self._moments.update(new)

    # The programme.

    @property
    def _unit_seconds(self) -> float:
        return max(sum(self._seconds), 1e-12)

    def _model(self, budget_bytes: int | None) -> Model:
        """Build the programme, columns of regions first; without a budget it minimises the peak."""
        model = Model()
        unit = self.problem.baseline.peak_bytes
        for seconds in self._seconds:
            model.column(seconds / self._unit_seconds if budget_bytes is not None else 0.0, integer=True)
        peak = model.column(1.0) if budget_bytes is None else -1
        for together in exclusive_sets(self.regions):
            if len(together) > 1:
                model.at_least(-1.0, *((number, -1.0) for number in together))
        columns: dict[Group, int] = {}
        for need in self._moments.values():
            terms: dict[int, float] = {}
            for group, size_bytes in need.group_bytes.items():
                column = self._group_column(model, group, columns)
                terms[column] = terms.get(column, 0.0) - size_bytes / unit
            room = (budget_bytes or 0) - need.fixed_bytes
            if budget_bytes is None:
                terms[peak] = 1.0
            if need.when is not None:  # without that region, the moment asks for nothing
                most = max(0, sum(need.group_bytes.values()) - room)
                terms[need.when] = terms.get(need.when, 0.0) - most / unit
                room += most
            model.at_least(-room / unit, *terms.items())
        if budget_bytes is not None:
            for refused in self._refused:
                terms = {r: -1.0 if r in refused else 1.0 for r in range(len(self.regions))}
                model.at_least(1.0 - len(refused), *terms.items())
        return model

    @staticmethod
    def _group_column(model: Model, group: Group, columns: dict[Group, int]) -> int:
        freed_by, held_by = group
        if freed_by is None and len(held_by) == 1:
            return next(iter(held_by))
        if group not in columns:
            columns[group] = column = model.column()
            for holder in held_by:
                model.at_least(0.0, (column, 1.0), (holder, -1.0))
            if freed_by is not None:
                model.at_least(1.0, (column, 1.0), *((maker, 1.0) for maker in freed_by))
        return columns[group]


def exclusive_sets(regions: Sequence[Region]) -> list[tuple[int, ...]]:
    """Return sets of mutually exclusive regions: the variants of a module and the modules that contain it."""
    of_module: dict[str, list[int]] = {}
    for number, region in enumerate(regions):
        of_module.setdefault(region.module, []).append(number)
    around = {module: [path for path in ("", *path_prefixes(module)[:-1]) if path in of_module] for module in of_module}
    holding = {path for paths in around.values() for path in paths}
    return [
        tuple(number for path in (module, *around[module]) for number in of_module[path])
        for module in of_module
        if module not in holding
    ]


def cheapest(problem: Problem, regions: Sequence[Region], clock: Clock, progress: Progress | None = None) -> Solution:
    """Return the variants to checkpoint that keep the budget with the least recompute.

    Whole regions are chosen first, which is quick: that choice stands where the other does not end in time. If none was
    found, an InfeasibleBudgetError has the lowest peak that was.
    """
    incumbent, bound_seconds = Incumbent(problem), 0.0
    for variants in (regions, variants_of(regions, problem.graph, problem.costs)):
        chooser = Chooser(problem, variants, clock, progress)
        chosen, bound_seconds = chooser.choose()
        incumbent.update(chooser.schedule(chosen), NAME)
    incumbent.raise_bound(bound_seconds)  # of the second: it chooses among more
    return incumbent.solution(what="no choice of checkpointed modules keeps")


def lowest_choice(problem: Problem, clock: Clock) -> Schedule:
    """Return the choice of a problem's regions with the lowest peak found."""
    assert problem.regions is not None
    chooser = Chooser(problem, variants_of(problem.regions, problem.graph, problem.costs), clock)
    return chooser.schedule(chooser.lowest())


def variants_of(regions: Sequence[Region], graph: TrainingGraph, costs: Sequence[OperationCost]) -> tuple[Region, ...]:
    """Return each region followed by its variants, which keep the outputs of some operations."""
    return tuple(variant for region in regions for variant in (region, *_selective_variants(region, graph, costs)))


def _selective_variants(region: Region, graph: TrainingGraph, costs: Sequence[OperationCost]) -> Iterator[Region]:
    random = tuple(one for one in region.keepable if one.is_random)
    units = [(o,) for o in region.keepable if not (o.is_random or o.is_choice)] + [random] * bool(random)
    seconds = {unit: sum(costs[one.index].seconds for one in unit) for unit in units}
    held_bytes = {
        unit: sum(graph.values[value].size_bytes for one in unit for value in graph.operations[one.index].outputs)
        for unit in units
    }
    worth = sorted(units, key=lambda unit: -seconds[unit] / max(held_bytes[unit], 1))
    whole_seconds = sum(seconds.values())
    kept = list(region.kept)
    saved_seconds, reached = 0.0, 0
    for unit in worth:
        kept += unit
        saved_seconds += seconds[unit]
        shares = sum(saved_seconds >= share * whole_seconds * (1 - 1e-9) for share in _SHARES)
        if shares > reached and whole_seconds > 0:
            reached = shares
            yield region.keeping(kept)


def variant_named(region: Region, operators: Mapping[str, Sequence[int]]) -> Region | None:
    """Return the variant that keeps these occurrences of these operators, None if the region has not all of them."""
    named = {(operator, occurrence) for operator, numbers in operators.items() for occurrence in numbers}
    kept = [one for one in region.keepable if (one.operator, one.occurrence) in named]
    return region.keeping(kept) if len(kept) == len(named) else None
