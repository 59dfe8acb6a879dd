"""What a schedule comes to on the whole device: the one evaluation behind every table of ways to train a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A schedule, who it is from, its peak on the whole device, and the recompute and waiting that it adds."""

    name: str
    schedule: Schedule
    peak_bytes: int
    added_seconds: float
    step_seconds: float
    host_bytes: int = 0

    @property
    def overhead(self) -> float:
        """What it adds, over the step."""
        return self.added_seconds / (self.step_seconds or 1.0)


def evaluate(
    problem: Problem,
    schedule: Schedule,
    name: str,
    *,
    evaluation: Evaluation | None = None,
    optimizer_peak_bytes: int = 0,
) -> Evaluated:
    """Say what a schedule comes to, by its simulation if that is at hand; the problem's budget decides nothing.

    What the device holds during the optimizer's own step may count too.
    """
    found = evaluation or problem.evaluate(schedule)
    return Evaluated(
        name=name,
        schedule=schedule,
        peak_bytes=max(found.peak_bytes + problem.graph.total_static_bytes, optimizer_peak_bytes),
        added_seconds=found.added_seconds,
        step_seconds=problem.baseline.seconds,
        host_bytes=found.host_bytes,
    )


def cheapest_within(budget_bytes: int, found: Iterable[Evaluated]) -> Evaluated | None:
    """Return the cheapest that keeps a budget for the whole device: each does so from its own peak on."""
    fitting = (one for one in found if one.peak_bytes <= budget_bytes)
    return min(fitting, key=lambda one: (one.added_seconds, one.peak_bytes), default=None)
