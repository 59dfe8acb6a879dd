"""The step that a plan is exported for: what each way to checkpoint it would cost, and which is the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property

from planner.analysis.study import Study
from planner.common.limits import SolveLimits
from planner.errors import PlannerError
from planner.exporters._export import Figures, Placement
from planner.ir.checkpoints import BOOKKEEPING, Region, forward_of, schedule_of
from planner.ir.layers import find_layers
from planner.ir.problem import Problem
from planner.ir.simulator import simulate
from planner.plans.plan import Plan
from planner.solving.modules.ilp import Chooser

_SECONDS = 10.0
"""For the choice of modules; counted as work, so that an export is the same every time."""


class CannotExpressError(PlannerError):
    """The framework has no words for a plan that keeps the budget; the message says what would work."""


class ExportStep:
    """A step and a plan for it, whose budget is to be kept, asked for ways to checkpoint whole modules.

    The regions of the recorded eager step say what each recomputed module runs. For ``to_the_end`` see
    :class:`planner.exporters.Exporter`.
    """

    def __init__(self, plan: Plan, study: Study, regions: Iterable[Region], *, to_the_end: bool = False) -> None:
        self.plan = plan
        self.graph = study.graph
        self.problem: Problem = study.problem(plan.budget_bytes)
        self.to_the_end = to_the_end
        self._layers = find_layers(study.graph)
        self._regions = {region.module: region for region in regions}
        self._is_sound = cache(self._can_run_again)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The repeated blocks, in the order of the forward; raises CannotExpressError if there are none."""
        if self._layers.blocks:
            return self._layers.blocks
        raise CannotExpressError(
            "the model has no repeated blocks that could be named; planner.auto_wrap(model, budget=plan) runs the plan"
        )

    @cached_property
    def row(self) -> tuple[str, ...]:
        """The blocks, where they are one row that can be counted, or else CannotExpressError is raised."""
        rows = dict.fromkeys(block.rstrip("0123456789") for block in self.blocks)
        if len(rows) > 1:
            raise CannotExpressError(
                f"it counts layers in one row, and the model has {len(rows)}: "
                f"{', '.join(f'{row}*' for row in rows)}; an export that names modules would do: --to fsdp"
            )
        return self.blocks

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that can run again."""
        return tuple(self._regions)

    def figures(self, placement: Placement) -> Figures:
        """Simulate a placement."""
        rest = [self._rest_of(module) for module in placement.modules]
        more_seconds = sum(seconds for seconds, _ in rest)
        more_bytes = max((size_bytes for _, size_bytes in rest), default=0)
        schedule = schedule_of(self.graph, [self._regions[module] for module in placement.modules])
        evaluation = simulate(self.graph, self.problem.costs, schedule)
        seconds = self.problem.baseline.seconds
        return Figures(
            peak_bytes=evaluation.peak_bytes + self.graph.total_static_bytes + more_bytes,
            overhead=(evaluation.recompute_seconds + more_seconds) / seconds if seconds > 0 else 0.0,
        )

    def best_modules(self, candidates: Sequence[str]) -> Placement:
        """Return the cheapest set of modules to checkpoint that keeps the budget, or raise CannotExpressError."""
        sound = [module for module in candidates if self._is_sound(module)]
        clock = SolveLimits(time_limit_seconds=_SECONDS, deterministic=True).clock()
        more_bytes = max((self._rest_of(module)[1] for module in sound), default=0)
        problem = replace(self.problem, budget_bytes=self.problem.budget_bytes - more_bytes)
        chosen, _ = Chooser(problem, [self._regions[module] for module in sound], clock).choose()
        found = Placement(modules=tuple(module for number, module in enumerate(sound) if number in chosen))
        simulated = [(self.figures(placement), placement) for placement in (found, Placement())]
        fitting = [pair for pair in simulated if pair[0].peak_bytes <= self.plan.budget_bytes]
        if fitting:
            return min(fitting, key=lambda pair: (pair[0].overhead, pair[0].peak_bytes))[1]
        if not any(map(self._is_sound, self.blocks if self._layers.blocks else self._regions or self.blocks)):
            raise CannotExpressError(
                "its layers cannot run again as they are: a BatchNorm would update its running statistics twice, or "
                "they are called more than once, or make what the model returns (a cache: use_cache=False); "
                "planner.auto_wrap(model, budget=plan) runs the plan"
            )
        lowest_bytes = min(figures.peak_bytes for figures, _ in simulated)
        raise CannotExpressError(
            f"nothing that it can express keeps the budget of {self.plan.budget_bytes:,} bytes: the lowest peak is "
            f"{lowest_bytes:,}; plan for --budget {lowest_bytes}, or run this plan with planner.auto_wrap(model, "
            "budget=plan)"
        )

    def _can_run_again(self, module: str) -> bool:
        """Whether a module is called once, and holds no BatchNorm in training."""
        targets = (self.graph.operations[index].target for index in forward_of(self.graph, [module]))
        return module in self._regions and not any("batch_norm" in target for target in targets)

    def _rest_of(self, module: str) -> tuple[float, int]:
        """Return seconds, and bytes at most, of what a framework that runs a module to its end adds to its region."""
        if not self.to_the_end:
            return 0.0, 0
        operations, values = self.graph.operations, self.graph.values
        again = set(self._regions[module].recompute)
        if all(operations[index].target in BOOKKEEPING for index in again):
            return 0.0, 0  # the backward reads nothing of it
        rest = [
            index
            for index in forward_of(self.graph, [module])
            if index not in again and operations[index].target not in BOOKKEEPING
        ]
        return (
            sum(self.problem.costs[index].seconds for index in rest),
            sum(values[value].size_bytes for index in rest for value in operations[index].outputs),
        )
