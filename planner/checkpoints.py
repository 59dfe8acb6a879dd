"""Regions that ``torch.utils.checkpoint`` can run again, as decisions on a training graph.

In the graph of an eager step each region brings three operations of no cost along: ``hold``,
run again when the checkpoint lets go of its inputs and of the random state; ``scratch``, run again
before the region is, for the random state that is put back afterwards; ``stop``, run again after
its last operation, which reads what is alive there. An operation whose outputs a checkpoint can keep
has a fourth beside it, ``kept``, run again in its place, which reads what it reads and makes. With
them the lifetimes of a checkpointed step are those of a schedule, and ``simulate`` judges it like any
other. In a captured step a region is what runs again and no more; ``planner.module_regions`` gives
those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.graph import OperationCost, TrainingGraph
from planner.plan_types import Plan
from planner.schedule import Schedule

HOLD, SCRATCH, STOP, KEPT = "checkpoint.hold", "checkpoint.scratch", "checkpoint.stop", "checkpoint.kept"
END = "end of the step"
BOOKKEEPING = (HOLD, SCRATCH, STOP, KEPT)
"""Operations that run nothing: they say how long something lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepable:
    """An operation of a region whose outputs its checkpoint can keep, so that it does not run again.

    Parameters
    ----------
    index : int
        The operation.
    stand_in : int
        What runs again in its place.
    operator : str
        Its target.
    occurrence : int
        How often the region has called that operator before.
    is_random : bool
        Whether it draws random numbers: of such operations a checkpoint keeps all or none.
    """

    index: int
    stand_in: int
    operator: str
    occurrence: int
    is_random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A module's call that can be checkpointed.

    Parameters
    ----------
    module : str
        Path of the module.
    hold : int, optional
        Its operation of that name; None if it holds nothing but what its second run reads.
    again : tuple of int
        What is run again: ``scratch``, the operations of the region up to the last one that saves
        anything, and ``stop``.
    before : int
        Operation of the backward right before which that happens.
    until : int
        Operation of the backward before which its inputs are let go.
    keepable : tuple of Keepable
        Operations of it that need not run again.
    kept : tuple of Keepable
        Those that do not: their stand-ins are in ``again``.
    """

    module: str
    hold: int | None
    again: tuple[int, ...]
    before: int
    until: int
    keepable: tuple[Keepable, ...] = ()
    kept: tuple[Keepable, ...] = ()


def schedule_of(graph: TrainingGraph, regions: Iterable[Region]) -> Schedule:
    """Give the schedule of a step in which these regions are checkpointed."""
    before: dict[int, list[int]] = {}
    chosen = list(regions)
    for region in chosen:
        if region.hold is not None:
            before.setdefault(region.until, []).append(region.hold)
    for region in chosen:  # what is let go is gone before anything is run again
        before.setdefault(region.before, []).extend(region.again)
    return Schedule.with_recomputations(graph, before)


def modules_of(plan: Plan) -> tuple[str, ...]:
    """Give the paths of the modules that a plan checkpoints, in the order of their backward."""
    again = dict.fromkeys(key for keys in plan.recomputations.values() for key in keys)
    return tuple(key.partition("|")[0] for key in again if key.split("|")[1] == HOLD)


def seconds_of(region: Region, costs: Sequence[OperationCost]) -> float:
    """Give what one recompute of a region takes."""
    return sum(costs[index].seconds for index in region.again)


def rivals(regions: Sequence[Region]) -> list[tuple[int, ...]]:
    """Give the sets of regions of which one at most can be checkpointed: a module, in any way, and what holds it."""
    of_module: dict[str, list[int]] = {}
    for number, region in enumerate(regions):
        of_module.setdefault(region.module, []).append(number)
    around = {module: [path for path in _paths_around(module) if path in of_module] for module in of_module}
    holding = {path for paths in around.values() for path in paths}
    return [
        tuple(number for path in (module, *around[module]) for number in of_module[path])
        for module in of_module
        if module not in holding
    ]


def _paths_around(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


Group = tuple[frozenset[int] | None, frozenset[int]]
"""Values that share a fate: gone once one of the first regions is chosen (None: without that), kept if one of the
second is."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes at one moment of the step, for any choice of regions.

    Parameters
    ----------
    fixed_bytes : int
        There whatever is chosen.
    group_bytes : mapping of Group to int
        There depending on what is chosen.
    when : int, optional
        The moment exists only if this region is chosen.
    """

    fixed_bytes: int
    group_bytes: Mapping[Group, int]
    when: int | None = None

    def bytes_with(self, chosen: Collection[int]) -> int:
        """Give the bytes for one choice."""
        held = 0
        for (freed_by, held_by), size in self.group_bytes.items():
            if not held_by.isdisjoint(chosen) or (freed_by is not None and freed_by.isdisjoint(chosen)):
                held += size
        return self.fixed_bytes + held


def _released(step: int) -> int:
    return 3 * step


def _rerun(step: int) -> int:
    return 3 * step + 1


def _first_run(step: int) -> int:
    return 3 * step + 2


class Needs:
    """Writes down what a moment of the step needs, for any choice of regions of which none is in another.

    Parameters
    ----------
    graph : TrainingGraph
    costs : sequence of OperationCost
    regions : sequence of Region

    Notes
    -----
    Moments are numbered: before an operation of the base order has its first run, inputs of checkpoints
    are let go, and then regions are run again.
    """

    def __init__(self, graph: TrainingGraph, costs: Sequence[OperationCost], regions: Sequence[Region]) -> None:
        self.graph = graph
        self.costs = costs
        self.regions = regions
        self._makers: list[list[int]] = [[] for _ in graph.values]
        """For each value, the regions that make it again."""
        self._holders: list[list[tuple[int, int]]] = [[] for _ in graph.values]
        """For each value, the regions that need it from outside, and until when."""
        self._own: list[set[int]] = []
        """For each region, the values that it makes again."""
        self._passing: list[set[int]] = []
        """For each region, the values from outside that nothing needs any more once it has run again."""
        for number, region in enumerate(regions):
            made = {value for index in region.again for value in graph.operations[index].outputs}
            self._own.append(made)
            for value in made:
                self._makers[value].append(number)
            outside = {v for index in region.again for v in graph.operations[index].inputs} - made
            for value in outside:
                self._holders[value].append((number, _rerun(region.before)))
            held = set(graph.operations[region.hold].inputs) if region.hold is not None else set[int]()
            for value in held:
                self._holders[value].append((number, _released(region.until)))
            self._passing.append(
                {
                    value
                    for value in outside - held
                    if not graph.values[value].retained and max(graph.readers[value]) < region.before
                }
            )

    def at(self, step: int) -> Need:
        """Give what is there while an operation of the base order has its first run."""
        return self._need(_first_run(step), self.costs[step].workspace_bytes, None)

    def within(self, number: int) -> Need:
        """Give the most that is there while a region is run again.

        What it is the last to need goes meanwhile, even if another region holds it: the need is then a lower bound.
        """
        graph, region = self.graph, self.regions[number]
        end = len(region.again)
        last: dict[int, int] = {}
        for position, index in enumerate(region.again):
            last.update(dict.fromkeys((*graph.operations[index].outputs, *graph.operations[index].inputs), position))
        freed = [0] * (end + 1)
        for value in self._passing[number]:
            freed[last[value]] += graph.values[value].size_bytes
        live = peak = sum(freed)
        for position, index in enumerate(region.again):
            for value in graph.operations[index].outputs:
                live += graph.values[value].size_bytes
                read_later = any(reader >= region.before for reader in graph.readers[value])
                at = position if graph.values[value].retained else end if read_later else last[value]
                freed[at] += graph.values[value].size_bytes
            peak = max(peak, live + self.costs[index].workspace_bytes)
            live -= freed[position]
        return self._need(_rerun(region.before), peak, number)

    def _need(self, moment: int, fixed_bytes: int, when: int | None) -> Need:
        graph, regions = self.graph, self.regions
        own = self._own[when] | self._passing[when] if when is not None else set[int]()
        groups: dict[Group, int] = {}
        for value, maker in enumerate(graph.producer):
            size_bytes = graph.values[value].size_bytes
            if _first_run(maker) > moment or not size_bytes:
                continue
            if graph.values[value].retained or _first_run(maker) == moment:
                fixed_bytes += size_bytes
                continue
            if value in own:
                continue
            reader = next((r for r in graph.readers[value] if _first_run(r) >= moment), None)
            freed_by = held_by = frozenset[int]()
            if reader is not None:
                freed_by = frozenset(
                    r for r in self._makers[value] if moment < _rerun(regions[r].before) <= _first_run(reader)
                )
                if not freed_by:
                    fixed_bytes += size_bytes
                    continue
            held_by = frozenset(r for r, until in self._holders[value] if until >= moment)
            if reader is not None or held_by:
                group = (freed_by if reader is not None else None, held_by)
                groups[group] = groups.get(group, 0) + size_bytes
        for number, region in enumerate(regions):
            if region.hold is None:
                continue
            state_bytes = graph.operations[region.hold].state_bytes
            if state_bytes and _first_run(region.hold) <= moment <= _released(region.until):
                group = (None, frozenset([number]))
                groups[group] = groups.get(group, 0) + state_bytes
        return Need(fixed_bytes, groups, when)
