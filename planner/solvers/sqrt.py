"""Square-root segmentation: save the boundaries between segments of the forward, recompute the rest.

The answer that fits on a blackboard, as a quick plan and as a baseline.
"""

from __future__ import annotations

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem, Progress, Solution
from planner.solving.incumbent import Incumbent
from planner.solving.segmentations import segmentations

_SECONDS_PER_RUN = 5e-6
"""About what one schedule takes, for each of its runs, where work is counted and not time."""


class SqrtSolver:
    """Chen's segmentation, with the cheapest number of segments within the budget."""

    name = "sqrt"
    summary = "segments of the forward with kept boundaries (Chen et al. 2016); instant"
    offloads = False

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Try several numbers of segments and return the cheapest schedule within the budget.

        O(numbers tried x runs); a few milliseconds each for 1,500 operations. The method is that of
        Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.
        """
        incumbent = Incumbent(problem)
        clock = effort.clock()
        for schedule in segmentations(problem.graph):
            incumbent.update(schedule, self.name)
            clock.work(_SECONDS_PER_RUN * len(schedule.order))
            if incumbent.added_seconds == 0.0 or clock.left() < 0:
                break
        return incumbent.solution(what="no segmentation keeps")


SOLVER = SqrtSolver()
