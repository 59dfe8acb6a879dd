"""Limit equal blocks to a few recompute sets, since each one is compiled by itself.

Of equal blocks a plan asks different things, to use a budget to its last byte. Each kind takes seconds to compile, and
costs hardly anything to do without: a block that recomputes a little more holds a little less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.errors import ScheduleError
from planner.ir.graph import TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule

MOST_KINDS = 3
"""Of equal blocks: those that keep, those that recompute, and those in between."""

Kind = frozenset[tuple[int, tuple[int, ...]]]
"""What runs again before what, each as a number within its block."""


def with_few_kinds(problem: Problem, schedule: Schedule, most: int = MOST_KINDS) -> Schedule:
    """Return a schedule with few different recompute sets among equal blocks, as far as the budget allows.

    The kind that fewest blocks have gives way first: all of these take another of the kinds at hand, that with which
    the step takes least time. A kind that none can take the place of stays. Takes as many simulations as there are
    pairs of kinds. A schedule in an order of its own is returned as it is.
    """
    try:
        blocks = _Blocks.of(problem.graph, schedule)
    except ScheduleError:
        return schedule
    kept: set[tuple[Sequence[str], Kind]] = set()
    while found := blocks.superfluous(most, kept):
        family, kind = found
        tried = [blocks.instead(family, kind, other) for other in blocks.kinds(family) if other != kind]
        fitting = []
        for number, other in enumerate(tried):
            evaluation = problem.evaluate(other.schedule())
            if evaluation.peak_bytes <= problem.budget_bytes:
                fitting.append((evaluation.seconds, number))
        if fitting:
            blocks = tried[min(fitting)[1]]
        else:
            kept.add(found)
    return blocks.schedule()


@dataclass(frozen=True)
class _Block:
    """A block's operations, and its recompute set."""

    operations: list[int]
    family: tuple[str, ...]
    """Its operations' keys without its own path: the same in equal blocks."""
    kind: Kind


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a step, and the recompute set outside of them."""

    graph: TrainingGraph
    blocks: Sequence[_Block]
    others: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, graph: TrainingGraph, schedule: Schedule) -> _Blocks:
        """Read the recompute set of each block off a schedule."""
        inside: dict[str, list[int]] = {}
        for index, operation in enumerate(graph.operations):
            if operation.region:
                inside.setdefault(operation.region, []).append(index)
        number = {index: at for operations in inside.values() for at, index in enumerate(operations)}
        asked: dict[str, set[tuple[int, tuple[int, ...]]]] = {path: set() for path in inside}
        others: dict[int, tuple[int, ...]] = {}
        for index, again in schedule.recomputations().items():
            region = graph.operations[index].region
            if region and all(graph.operations[each].region == region for each in again):
                asked[region].add((number[index], tuple(number[each] for each in again)))
            else:
                others[index] = again
        blocks = [
            _Block(
                operations,
                tuple(graph.operations[i].key.removeprefix(path) for i in operations),
                frozenset(asked[path]),
            )
            for path, operations in inside.items()
        ]
        return cls(graph, blocks, others)

    def kinds(self, family: Sequence[str]) -> list[Kind]:
        """Return the different recompute sets of equal blocks, the most frequent first."""
        counted = Counter(block.kind for block in self.blocks if block.family == family)
        return [kind for kind, _ in counted.most_common()]

    def superfluous(self, most: int, kept: set[tuple[Sequence[str], Kind]]) -> tuple[Sequence[str], Kind] | None:
        """Return the rarest kind of blocks that have more than the ``most``, of those that are not to be kept."""
        for family in dict.fromkeys(block.family for block in self.blocks):
            kinds = self.kinds(family)
            free = [kind for kind in kinds if (family, kind) not in kept]
            if len(kinds) > most and free:
                return family, free[-1]
        return None

    def instead(self, family: Sequence[str], kind: Kind, other: Kind) -> _Blocks:
        """Return the blocks with another kind in place of one."""
        changed = [
            replace(block, kind=other) if (block.family, block.kind) == (family, kind) else block
            for block in self.blocks
        ]
        return replace(self, blocks=changed)

    def schedule(self) -> Schedule:
        """Return the schedule of these recompute sets."""
        before = dict(self.others)
        for block in self.blocks:
            for index, again in block.kind:
                before[block.operations[index]] = tuple(block.operations[each] for each in again)
        return Schedule.with_recomputations(self.graph, before)
