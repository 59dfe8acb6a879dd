"""Bytes live at each moment of a step, for any choice of modules that are checkpointed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.ir.checkpoints import Region
from planner.ir.graph import OperationCost, TrainingGraph

Group = tuple[frozenset[int] | None, frozenset[int]]
"""Values that share a fate: gone once one of the first regions is chosen (None: without that), kept if one of the
second is."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes at one moment of the step, for any choice of regions."""

    fixed_bytes: int
    """There whatever is chosen."""
    group_bytes: Mapping[Group, int]
    """There depending on what is chosen."""
    when: int | None = None
    """The moment exists only if this region is chosen."""


Moment = tuple[int, int]
"""An operation of the base order, and what happens before its first run, or that itself."""

_RELEASED, _RERUN, _FIRST_RUN = range(3)
"""Inputs of checkpoints are let go, and then regions are run again, and then the operation is run."""


class Needs:
    """Expresses the live bytes at a moment of the step as a function of the choice of regions."""

    def __init__(self, graph: TrainingGraph, costs: Sequence[OperationCost], regions: Sequence[Region]) -> None:
        self.graph = graph
        self.costs = costs
        self.regions = regions
        self._makers: list[list[int]] = [[] for _ in graph.values]
        """For each value, the regions that make it again."""
        self._holders: list[list[tuple[int, Moment]]] = [[] for _ in graph.values]
        """For each value, the regions that need it from outside, and until when."""
        self._own: list[set[int]] = []
        """For each region, the values that it makes again."""
        self._passing: list[set[int]] = []
        """For each region, the values from outside that nothing needs any more once it has run again."""
        for number, region in enumerate(regions):
            made = {value for index in region.recompute for value in graph.operations[index].outputs}
            self._own.append(made)
            for value in made:
                self._makers[value].append(number)
            outside = {v for index in region.recompute for v in graph.operations[index].inputs} - made
            for value in outside:
                self._holders[value].append((number, (region.recompute_before, _RERUN)))
            held = set(graph.operations[region.hold].inputs) if region.hold is not None else set[int]()
            for value in held:
                self._holders[value].append((number, (region.release_at, _RELEASED)))
            self._passing.append(
                {
                    value
                    for value in outside - held
                    if not graph.values[value].retained and max(graph.readers[value]) < region.recompute_before
                }
            )

    def at(self, step: int) -> Need:
        """Return the bytes live during the first run of an operation."""
        return self._need((step, _FIRST_RUN), self.costs[step].workspace_bytes, None)

    def within(self, number: int) -> Need:
        """Return the peak bytes while a region is recomputed.

        What it is the last to need goes meanwhile, even if another region holds it: the need is then a lower bound.
        """
        graph, region = self.graph, self.regions[number]
        end = len(region.recompute)
        last: dict[int, int] = {}
        for position, index in enumerate(region.recompute):
            last.update(dict.fromkeys((*graph.operations[index].outputs, *graph.operations[index].inputs), position))
        freed = [0] * (end + 1)
        for value in self._passing[number]:
            freed[last[value]] += graph.values[value].size_bytes
        live = peak = sum(freed)
        for position, index in enumerate(region.recompute):
            for value in set(graph.operations[index].outputs):
                live += graph.values[value].size_bytes
                read_later = any(reader >= region.recompute_before for reader in graph.readers[value])
                at = position if graph.values[value].retained else end if read_later else last[value]
                freed[at] += graph.values[value].size_bytes
            peak = max(peak, live + self.costs[index].workspace_bytes)
            live -= freed[position]
        return self._need((region.recompute_before, _RERUN), peak, number)

    def _need(self, moment: Moment, fixed_bytes: int, when: int | None) -> Need:
        graph, regions = self.graph, self.regions
        own = self._own[when] | self._passing[when] if when is not None else set[int]()
        groups: dict[Group, int] = {}
        for value, maker in enumerate(graph.producer):
            size_bytes = graph.values[value].size_bytes
            if (maker, _FIRST_RUN) > moment or not size_bytes:
                continue
            if graph.values[value].retained or (maker, _FIRST_RUN) == moment:
                fixed_bytes += size_bytes
                continue
            if value in own:
                continue
            reader = next((r for r in graph.readers[value] if (r, _FIRST_RUN) >= moment), None)
            freed_by = held_by = frozenset[int]()
            if reader is not None:
                again = ((r, (regions[r].recompute_before, _RERUN)) for r in self._makers[value])
                freed_by = frozenset(r for r, at in again if moment < at <= (reader, _FIRST_RUN))
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
            if state_bytes and (region.hold, _FIRST_RUN) <= moment <= (region.release_at, _RELEASED):
                group = (None, frozenset([number]))
                groups[group] = groups.get(group, 0) + state_bytes
        return Need(fixed_bytes, groups, when)
