"""Which input sizes each plan of a wrapped model covers, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.common.units import format_bytes
from planner.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Covered:
    """Input sizes that one plan serves: the same decisions, whether solved for them or taken over."""

    plans: tuple[Plan, ...]
    """One of each size, by how much its step holds without recompute."""

    @property
    def peak_bytes(self) -> int:
        """The highest peak of them."""
        return max(plan.peak_bytes for plan in self.plans)

    @property
    def overhead(self) -> float:
        """The largest of them, over the model's own step."""
        return max(plan.over_eager(plan.overhead) for plan in self.plans)

    @property
    def inputs(self) -> str:
        """The smallest and the largest of the inputs."""
        ends = dict.fromkeys(str(plan.fingerprint["inputs"]) for plan in (self.plans[0], self.plans[-1]))
        return " to ".join(ends)


def covered(plans: Iterable[Plan]) -> tuple[Covered, ...]:
    """Put the sizes together that have the same decisions, the smallest first."""
    by_decisions: dict[frozenset[tuple[str, tuple[str, ...]]], list[Plan]] = {}
    for plan in sorted(plans, key=lambda plan: plan.baseline_peak_bytes):
        by_decisions.setdefault(frozenset(plan.recomputations.items()), []).append(plan)
    return tuple(Covered(plans=tuple(alike)) for alike in by_decisions.values())


def lines(sizes: Iterable[Covered]) -> Iterator[str]:
    """Write them as a table."""
    head = ("inputs", "sizes", "peak", "overhead")
    rows = [(one.inputs, str(len(one.plans)), format_bytes(one.peak_bytes), f"{one.overhead:+.1%}") for one in sizes]
    width = max(len(row[0]) for row in (head, *rows))
    for first, *others in (head, *rows):
        yield f"{first:<{width}}" + "".join(f"  {other:>10}" for other in others)
