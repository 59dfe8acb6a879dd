"""Limit equal blocks to a few sets of decisions, since each one is compiled by itself.

Of equal blocks a plan asks different things, to use a budget to its last byte. Each kind takes seconds to compile, and
costs hardly anything to do without: a block that recomputes a little more holds a little less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add, methodcaller

from planner.errors import ScheduleError
from planner.ir.graph import TrainingGraph, named_by
from planner.ir.layers import is_within
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.plans.offload import OffloadedValue, Offloading, offloading_of, with_offloads

MOST_KINDS = 3
"""Of equal blocks: those that keep, those that recompute or offload, and those in between."""

Family = tuple[str, ...]
"""The keys of a block's operations without its own path: the same in equal blocks."""

Kind = frozenset[tuple[int, tuple[int, ...]] | OffloadedValue]
"""What runs again before what, each as a number within its block, and what is offloaded, without the block's path."""


def with_few_kinds(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule with few different kinds of equal blocks, as far as the budgets of device and host allow.

    The kind that fewest blocks have gives way first: all of these take another of the kinds at hand, that with which
    the step takes least time. A kind that none can take the place of stays. Takes as many simulations as there are
    pairs of kinds. A schedule in an order of its own is returned as it is.
    """
    try:
        blocks = _Blocks.of(problem, schedule)
    except ScheduleError:
        return schedule
    kept: set[tuple[Family, Kind]] = set()
    while found := blocks.superfluous(kept):
        family, kind = found
        fitting = []
        for number, other in enumerate(blocks.kinds_of(family)):
            evaluation = problem.evaluate(blocks.instead(family, kind, other).schedule())
            goes_to_host = problem.host is None or evaluation.host_bytes <= problem.host.budget_bytes
            if other != kind and evaluation.peak_bytes <= problem.budget_bytes and goes_to_host:
                fitting.append((evaluation.seconds, number, other))
        if fitting:
            blocks = blocks.instead(family, kind, min(fitting, key=lambda one: one[:2])[2])
        else:
            kept.add(found)
    return blocks.schedule()


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a step: of each its operations, its family and its kind, and the recompute set outside of them."""

    graph: TrainingGraph
    offloading: Offloading | None
    paths: Sequence[str]
    operations: Sequence[Sequence[int]]
    families: Sequence[Family]
    kinds: Sequence[Kind]
    others: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule) -> _Blocks:
        """Read off a schedule what is asked of each block."""
        graph = problem.graph
        inside: defaultdict[str, list[int]] = defaultdict(list)
        for index, operation in enumerate(graph.operations):
            if operation.region:
                inside[operation.region].append(index)
        number = {index: at for operations in inside.values() for at, index in enumerate(operations)}
        asked: dict[str, set[tuple[int, tuple[int, ...]] | OffloadedValue]] = {path: set() for path in inside}
        others: dict[int, tuple[int, ...]] = {}
        for index, again in schedule.recomputations().items():
            region = graph.operations[index].region
            if region and all(graph.operations[each].region == region for each in again):
                asked[region].add((number[index], tuple(number[each] for each in again)))
            else:
                others[index] = again
        offloading = offloading_of(problem, schedule, problem.evaluate(schedule))
        for value in offloading.values if offloading is not None else ():
            path = next(path for path in inside if is_within(named_by(value.operation)[0], path))
            asked[path].add(value.named(methodcaller("removeprefix", path)))
        families = [tuple(graph.operations[i].key.removeprefix(path) for i in own) for path, own in inside.items()]
        kinds = [frozenset(one) for one in asked.values()]
        return cls(graph, offloading, list(inside), list(inside.values()), families, kinds, others)

    def kinds_of(self, family: Family) -> list[Kind]:
        """Return the different kinds of equal blocks, the most frequent first."""
        counted = Counter(kind for own, kind in zip(self.families, self.kinds, strict=True) if own == family)
        return [kind for kind, _ in counted.most_common()]

    def superfluous(self, kept: set[tuple[Family, Kind]]) -> tuple[Family, Kind] | None:
        """Return the rarest kind of blocks that have more than :data:`MOST_KINDS`, of those that are not kept."""
        for family in dict.fromkeys(self.families):
            kinds = self.kinds_of(family)
            free = [kind for kind in kinds if (family, kind) not in kept]
            if len(kinds) > MOST_KINDS and free:
                return family, free[-1]
        return None

    def instead(self, family: Family, kind: Kind, other: Kind) -> _Blocks:
        """Return the blocks with another kind in place of one."""
        pairs = zip(self.families, self.kinds, strict=True)
        return replace(self, kinds=[other if pair == (family, kind) else pair[1] for pair in pairs])

    def schedule(self) -> Schedule:
        """Return the schedule of these kinds."""
        before, values = dict(self.others), list[OffloadedValue]()
        for path, operations, kind in zip(self.paths, self.operations, self.kinds, strict=True):
            for one in kind:
                if isinstance(one, OffloadedValue):
                    values.append(one.named(partial(add, path)))
                else:
                    before[operations[one[0]]] = tuple(operations[each] for each in one[1])
        schedule = Schedule.with_recomputations(self.graph, before)
        if self.offloading is None:
            return schedule
        return with_offloads(self.graph, schedule, replace(self.offloading, values=tuple(values)))
