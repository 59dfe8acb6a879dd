"""The planning problem that a solver is given, and the solution that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from planner.common.limits import Progress as Progress
from planner.errors import ClaimMismatchError, UsageError
from planner.ir.checkpoints import Region
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host
from planner.ir.policy import Decisions, held_against
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation, simulate


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph, the cost of each operation, and the bytes that the step may allocate."""

    graph: TrainingGraph
    costs: tuple[OperationCost, ...]
    budget_bytes: int
    """Bound on the simulated peak, above what is resident before the step."""
    host: Host | None = None
    """Host memory for offloaded values; None if nothing may be offloaded."""
    regions: tuple[Region, ...] | None = None
    """Module calls that can be checkpointed, if nothing else can be recomputed or offloaded."""
    decisions: Decisions = field(default_factory=Decisions)
    """Decisions of a policy; see :mod:`planner.ir.policy`."""

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.graph.operations):
            raise UsageError(f"{len(self.costs)} costs for {len(self.graph.operations)} operations")

    @cached_property
    def baseline(self) -> Evaluation:
        """The step without any recompute."""
        return simulate(self.graph, self.costs, Schedule.keep_all(self.graph))

    def without_policy(self) -> Problem:
        """Return the problem without its policy; operations that the policy saves stay unrecomputable."""
        return replace(self, decisions=Decisions())

    def as_used_by(self, schedule: Schedule) -> Problem:
        """Return the problem without a host that was not asked for and that a schedule does not need."""
        is_idle = self.host is not None and self.host.least_gain > 0 and not schedule.offloads
        return replace(self, host=None) if is_idle else self

    def evaluate(self, schedule: Schedule) -> Evaluation:
        """Simulate a schedule; the last result is cached."""
        last: tuple[Schedule, Evaluation] | None = self.__dict__.get("_last")
        if last is None or last[0] != schedule:
            last = schedule, simulate(self.graph, self.costs, schedule, self.host)
            self.__dict__["_last"] = last
        return last[1]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The proposal of a solver, by its name, and its claim about it."""

    solver: str
    schedule: Schedule
    peak_bytes: int
    recompute_seconds: float
    """Time of all recomputations."""
    lower_bound_seconds: float = 0.0
    """Proven lower bound: no plan within the budget, in this base order, adds less time. 0 proves nothing."""
    solve_seconds: float = 0.0
    """Time spent solving."""
    stall_seconds: float = 0.0
    """Time of waiting for transfers. Only the sum of both is checked by the simulator; :func:`planner.solve` then
    splits it as simulated, so a solver need not."""
    captured_seconds: float | None = None
    """If first runs are in another order than the graph's: added time of the cheapest plan in the graph's order, if one
    was searched for and found."""
    alone_seconds: float | None = None
    """If values are offloaded: added time of the cheapest plan without, if one was searched for and found."""

    @classmethod
    def simulated(
        cls, evaluation: Evaluation, schedule: Schedule, solver: str, *, lower_bound_seconds: float = 0.0, **others: Any
    ) -> Solution:
        """Return a solution that claims what was simulated; a bound above that by rounding is clipped."""
        return cls(
            solver=solver,
            schedule=schedule,
            peak_bytes=evaluation.peak_bytes,
            recompute_seconds=evaluation.recompute_seconds,
            stall_seconds=evaluation.stall_seconds,
            lower_bound_seconds=min(lower_bound_seconds, evaluation.added_seconds),
            **others,
        )

    @property
    def added_seconds(self) -> float:
        """Time added to the step: recompute, and waiting for transfers."""
        return self.recompute_seconds + self.stall_seconds

    @property
    def is_optimal(self) -> bool:
        """Whether the claim equals the proven bound, to the simulator's resolution (1 part in 10**9)."""
        slack = self.added_seconds - self.lower_bound_seconds
        return slack <= 1e-9 * max(self.added_seconds, 1e-12)


def confirm(problem: Problem, solution: Solution) -> Evaluation:
    """Simulate a solution; ClaimMismatchError if peak, time or bound are not as claimed, or the budget is exceeded."""
    evaluation = problem.evaluate(solution.schedule)
    tolerance = 1e-9 * max(evaluation.seconds, 1e-12)
    wrong = None
    if evaluation.peak_bytes != solution.peak_bytes:
        wrong = f"a peak of {solution.peak_bytes} bytes, but simulation gives {evaluation.peak_bytes}"
    elif abs(evaluation.added_seconds - solution.added_seconds) > tolerance:
        wrong = f"{solution.added_seconds} s of recompute and waiting, but simulation gives {evaluation.added_seconds}"
    elif evaluation.peak_bytes > problem.budget_bytes:
        wrong = f"to keep {problem.budget_bytes} bytes, but simulation gives {evaluation.peak_bytes}"
    elif problem.host is not None and evaluation.host_bytes > problem.host.budget_bytes:
        wrong = f"to keep {problem.host.budget_bytes} bytes of the host, but simulation gives {evaluation.host_bytes}"
    elif solution.lower_bound_seconds > evaluation.added_seconds + tolerance:
        wrong = f"a lower bound of {solution.lower_bound_seconds} s above its own {evaluation.added_seconds}"
    elif against := held_against(problem.graph, problem.decisions, solution.schedule):
        wrong = f"to follow the policy, and {problem.graph.operations[min(against)].name} reads what may not be kept"
    if wrong:
        raise ClaimMismatchError(f"solver {solution.solver!r} claims {wrong}; please report this as a bug")
    return evaluation
