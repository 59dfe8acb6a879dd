"""What established systems do, as schedules of a captured step: found by their files.

Every public module of this package defines ``STRATEGIES``; dropping a file in is all it takes to add a family.
A strategy knows no budget: it is simulated, and stands at the peak that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from planner.common.registry import defined, unknown
from planner.errors import UsageError
from planner.ir.checkpoints import Region, Saved, region_of, schedule_of
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.host import Host
from planner.ir.layers import Layers, find_layers, forward_of_blocks
from planner.ir.schedule import Schedule

ALIASES = {"every-layer": "pytorch-checkpoint"}
"""Other names of strategies."""

_LARGEST_DIGITS = 4


@dataclass(frozen=True)
class StrategyStep:
    """A step, as strategies see it."""

    graph: TrainingGraph
    costs: Sequence[OperationCost]
    """One for each operation."""
    host: Host | None = None
    """Where values may be offloaded to; what offloads does not apply without it."""

    @cached_property
    def layers(self) -> Layers:
        """The layers of the graph."""
        return find_layers(self.graph)

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The operations that each repeated block has in the forward, block by block; a UsageError without any."""
        if not self.layers.blocks:
            raise self.cannot("has no repeated blocks")
        return tuple(forward_of_blocks(self.graph, self.layers).values())

    def cannot(self, why: str) -> UsageError:
        """Return the error that says why a strategy does not apply to this step."""
        return UsageError(f"{self.graph.name or 'the model'} {why}")

    def checkpointed(
        self, regions: Iterable[Collection[int]], *, saved: Saved | None = None, whole: bool = False
    ) -> Schedule:
        """Return the schedule in which regions of the forward run again, each at the first need of its backward.

        No two regions share an operation; ``saved`` says what is kept inside of them. A ``whole`` one runs again
        whatever of it is needed, to its end, as where autograd is entered anew for it; else only what is needed does.
        """
        return schedule_of(self.graph, self.regions(regions, saved=saved, whole=whole))

    def regions(
        self, insides: Iterable[Collection[int]], *, saved: Saved | None = None, whole: bool = False
    ) -> list[Region]:
        """Return the regions of :meth:`checkpointed`, without those of which nothing would run again."""
        found = (self._whole(inside) if whole else region_of(self.graph, "", inside, saved=saved) for inside in insides)
        return [region for region in found if region is not None]

    def entering(self, regions: Sequence[Region]) -> list[list[int]]:
        """Return the values of the forward that each region is made again from, and no other region is."""
        reads = [sorted(filter(self.is_saved_freely, self.read_by(region))) for region in regions]
        count = Counter(value for read in reads for value in read)
        return [[value for value in read if count[value] == 1] for read in reads]

    def read_by(self, region: Region) -> set[int]:
        """Return the values that a region is made again from."""
        again = [self.graph.operations[index] for index in region.recompute]
        made = {value for operation in again for value in operation.outputs}
        return {value for operation in again for value in operation.inputs} - made

    def is_saved_freely(self, value: int) -> bool:
        """Whether a value is of the forward, takes memory, and nobody outside of the step holds it."""
        made_by = self.graph.operations[self.graph.producer[value]]
        found = self.graph.values[value]
        return made_by.phase is Phase.FORWARD and found.size_bytes > 0 and not found.retained

    def _whole(self, inside: Collection[int]) -> Region | None:
        """Return a region that runs again before its own backward first reads what it made, or else begins."""
        operations = self.graph.operations
        modules = {operations[index].module for index in inside}
        made = {value for index in inside for value in operations[index].outputs}
        own = [i for i, op in enumerate(operations) if op.phase is Phase.BACKWARD and op.module in modules]
        if not own:
            return None
        before = next((index for index in own if not made.isdisjoint(operations[index].inputs)), own[0])
        needed = region_of(self.graph, "", inside)
        if needed is not None:
            before = min(before, needed.recompute_before)
        again = tuple(index for index in sorted(inside) if operations[index].recomputable)
        return Region(module="", hold=None, recompute=again, recompute_before=before, release_at=before)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A rule by which an established system chooses what it recomputes."""

    name: str
    """What people type; with a number behind it, ``NAME-4``, if it takes one."""
    summary: str
    """One line on what it does."""
    schedule: Callable[[StrategyStep, int], Schedule]
    """Carries it out on a step, with the number (0 if it takes none). Raises UsageError where it does not apply."""
    number: Callable[[int], int] | None = None
    """The number to take for a model of so many blocks, where none is named."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A strategy with the number that was named, if any was."""

    strategy: Strategy
    number: int | None = None

    def schedule(self, step: StrategyStep) -> Schedule:
        """Carry it out on a step; raises UsageError if that lacks what the strategy is about."""
        return self.strategy.schedule(step, self.number_among(len(step.layers.blocks)))

    def number_among(self, blocks: int) -> int:
        """Return the number that is taken among so many blocks; 0 where the strategy takes none."""
        if self.number is not None:
            return self.number
        return self.strategy.number(blocks) if self.strategy.number else 0


@cache
def known() -> dict[str, Strategy]:
    """Return all strategies by their names, in the order of these."""
    return defined(__name__, __path__, "STRATEGIES", Strategy)


def names() -> tuple[str, ...]:
    """Return what can be typed: ``NAME-N`` where a strategy takes a number, which may be left out."""
    return tuple(f"{name}-N" if strategy.number else name for name, strategy in known().items())


def find(name: str) -> Chosen | None:
    """Return a strategy by its name, with or without a number; None if there is none of that name."""
    strategies = known()
    name = ALIASES.get(name, name)
    if name in strategies:
        return Chosen(strategies[name])
    stem, _, digits = name.rpartition("-")
    strategy = strategies.get(stem)
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _LARGEST_DIGITS and digits[0] != "0"
    if strategy is None or strategy.number is None or not is_number:
        return None
    return Chosen(strategy, int(digits))


def get(name: str) -> Chosen:
    """Return a strategy by its name, or raise UsageError."""
    if chosen := find(name):
        return chosen
    raise unknown("strategy", name, names(), near=ALIASES)


def schedule(name: str, graph: TrainingGraph, costs: Sequence[OperationCost], host: Host | None = None) -> Schedule:
    """Return what a strategy does with a step, by one of the :func:`names`; ``host`` is where it may offload to.

    A UsageError says that there is none of that name, or that the step lacks what it is about.
    """
    return get(name).schedule(StrategyStep(graph, costs, host))
