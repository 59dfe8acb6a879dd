"""The step that a plan is exported for: what each way to checkpoint it would cost, and which is the best."""

from __future__ import annotations

from collections.abc import Sequence

from planner.analysis.study import Study
from planner.common.limits import SolveLimits
from planner.errors import PlannerError
from planner.exporters._export import Figures, Placement
from planner.ir.checkpoints import schedule_of
from planner.ir.layers import find_layers, is_within
from planner.ir.problem import Problem
from planner.plans.comparison import evaluate
from planner.plans.plan import Plan
from planner.solving.modules.ilp import Chooser

_SECONDS = 10.0
"""For the choice of modules; counted as work, so that an export is the same every time."""


class CannotExpressError(PlannerError):
    """The framework has no words for a plan that keeps the budget; the message says what would work."""


class ExportStep:
    """A step and a plan for it, whose budget is to be kept, asked for ways to checkpoint whole modules.

    The regions of the recorded eager step say what each recomputed module runs.
    """

    def __init__(self, plan: Plan, study: Study) -> None:
        self.plan = plan
        self.graph = study.graph
        self.problem: Problem = study.problem(plan.budget_bytes)
        self._layers = find_layers(study.graph)
        self._regions = {region.module: region for region in study.regions or ()}
        batch_norms = {o.module for o in study.graph.operations if "batch_norm" in o.target}
        self._sound = {m for m in self._regions if not any(is_within(norm, m) for norm in batch_norms)}
        """Modules that can run again as they are: in training a BatchNorm would update its statistics twice."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The repeated blocks, in the order of the forward; raises CannotExpressError if there are none."""
        if self._layers.blocks:
            return self._layers.blocks
        raise CannotExpressError(
            "the model has no repeated blocks that could be named; planner.auto_wrap(model, budget=plan) runs the plan"
        )

    def figures(self, placement: Placement) -> Figures:
        """Simulate a placement."""
        schedule = schedule_of(self.graph, [self._regions[module] for module in placement.modules])
        found = evaluate(self.problem, schedule, "export")
        return Figures(peak_bytes=found.peak_bytes, overhead=found.overhead)

    def best_modules(self, candidates: Sequence[str] = ()) -> Placement:
        """Return the cheapest set of these modules, or of all, that keeps the budget, or raise CannotExpressError."""
        sound = [module for module in candidates or self._regions if module in self._sound]
        clock = SolveLimits(time_limit_seconds=_SECONDS, deterministic=True).clock()
        chosen, _ = Chooser(self.problem, [self._regions[module] for module in sound], clock).choose()
        found = Placement(modules=tuple(module for number, module in enumerate(sound) if number in chosen))
        simulated = [(self.figures(placement), placement) for placement in (found, Placement())]
        fitting = [pair for pair in simulated if pair[0].peak_bytes <= self.plan.budget_bytes]
        if fitting:
            return min(fitting, key=lambda pair: (pair[0].overhead, pair[0].peak_bytes))[1]
        if not self._sound.intersection(self._layers.blocks or self._regions or self.blocks):
            raise CannotExpressError(
                "its layers cannot be recomputed as they are: a BatchNorm would update its running statistics twice, "
                "or they are called more than once, or make what the model returns (a cache: use_cache=False); "
                "planner.auto_wrap(model, budget=plan) runs the plan"
            )
        lowest_bytes = min(figures.peak_bytes for figures, _ in simulated)
        raise CannotExpressError(
            f"no choice of whole modules keeps the budget of {self.plan.budget_bytes:,} bytes: the lowest peak is "
            f"{lowest_bytes:,}; plan for --budget {lowest_bytes}, or run this plan with planner.auto_wrap(model, "
            "budget=plan)"
        )
