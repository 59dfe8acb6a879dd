"""What established systems do, as schedules of a captured step: found by their files.

Every public module of this package defines ``STRATEGIES``; dropping a file in is all it takes to add a family.
A strategy knows no budget: it is simulated, and stands at the peak that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from planner.common.registry import defined, unknown
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.schedule import Schedule
from planner.strategies._step import Strategy, StrategyStep

__all__ = ["ALIASES", "Chosen", "Strategy", "StrategyStep", "find", "get", "known", "names", "schedule"]

ALIASES = {"every-layer": "pytorch-checkpoint"}
"""Other names of strategies."""

_LARGEST_DIGITS = 4


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
