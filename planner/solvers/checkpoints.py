"""Choose which modules to checkpoint, where single operations cannot be recomputed."""

from __future__ import annotations

from planner.common.limits import Clock, SolveLimits
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.solving.modules.ilp import NAME, Chooser, cheapest, variants_of


def lowest_choice(problem: Problem, clock: Clock) -> Schedule:
    """Return the choice of regions with the lowest peak found."""
    assert problem.regions is not None
    chooser = Chooser(problem, variants_of(problem.regions, problem.graph, problem.costs), clock)
    return chooser.schedule(chooser.lowest())


class CheckpointSolver:
    """An integer programme over the regions of a problem."""

    name = NAME
    summary = "checkpoints of whole modules, chosen by an integer programme"
    proves_bound = True
    offloads = False
    chooses_regions = True

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Return the variants of checkpointed regions that add the least time to the step."""
        assert problem.regions is not None
        return cheapest(problem, problem.regions, effort.clock(), progress)


SOLVER = CheckpointSolver()
