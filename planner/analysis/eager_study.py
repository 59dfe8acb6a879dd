"""A recorded eager step, of which plans of checkpointed modules can be asked: any number, with offload or without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planner import solvers, strategies
from planner.analysis.compatibility import check_solver, check_strategy, offloading_runtime
from planner.analysis.study import Study
from planner.common import timings
from planner.common.limits import Clock, SolveLimits
from planner.errors import UsageError
from planner.ir.checkpoints import Region, schedule_of
from planner.ir.host import LEAST_BYTES, Host
from planner.ir.layers import find_layers
from planner.ir.problem import Problem, Progress
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.plans.module_choices import with_kept, with_modules
from planner.plans.plan import BaselineRow, Plan
from planner.plans.planning import Size, make_plan, make_problem
from planner.plans.step_details import step_details
from planner.solving.incumbent import Incumbent
from planner.solving.modules.ilp import Chooser
from planner.solving.modules.offload import Found, cheapest_with_offload, offloading_ways
from planner.solving.modules.variants import cheapest, ways_of

_EVERY_LAYER, _EVERY_NTH = "pytorch-checkpoint", "every"
"""Strategies that are choices of modules."""

_NO_BLOCKS = "the model has no repeated blocks that can be checkpointed"

_LOWEST_SECONDS = 2.0
"""For the lowest peak of all choices, which is an integer programme too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStudy(Study):
    """A recorded eager step; :func:`planner.study` makes it for the runtime ``"modules"``.

    Parameters
    ----------
    regions : tuple of Region
        The modules that ``torch.utils.checkpoint`` could run again.
    least_bytes : int, optional
        Regions say what of so many bytes and more they could send to the host's memory; without it, they send nothing.
    seen_for : callable, optional
        Gives the same step with another ``least_bytes``.
    """

    regions: tuple[Region, ...]
    least_bytes: int | None = None
    seen_for: Callable[[int | None], EagerStudy] | None = None

    def for_host(self, host: Host | None) -> EagerStudy:
        """Give the step as it is where values may wait in a host's memory: what modules can send is written into it."""
        least_bytes = host.least_bytes if host is not None else None
        return self if self.seen_for is None or least_bytes == self.least_bytes else self.seen_for(least_bytes)

    def least_offloaded(self, schedule: Schedule) -> int:
        """Give the size from which on values may be offloaded in this step as it is seen."""
        return LEAST_BYTES if self.least_bytes is None else self.least_bytes

    def plan(
        self,
        *,
        budget: Size | None = None,
        activation_budget: Size | None = None,
        at_least_bytes: int = 0,
        strategy: str | None = None,
        solver: str = "auto",
        time_limit_seconds: float = 10.0,
        deterministic: bool = False,
        seed: int = 0,
        offload: bool = False,
        host_budget: Size | None = None,
        offload_at_least: Size = LEAST_BYTES,
        offload_lossy: bool = False,
        compare: bool = True,
        progress: Progress | None = None,
    ) -> Plan:
        """Plan which modules are checkpointed and which send what they save; there is no choice of solvers.

        Raises
        ------
        UsageError
            If a solver is named, copies are to be rounded, or a strategy is given together with offload.
        """
        solvers.get(solver)
        check_solver("modules", solver)
        check_strategy(strategy, "modules", offload=offload)
        offloading_runtime("modules", offload=offload, lossy=offload_lossy)
        host = self.host(host_budget, offload_at_least) if offload else None
        step = self.for_host(host)
        effort = SolveLimits(time_limit_seconds=time_limit_seconds, deterministic=deterministic, seed=seed)
        if strategy is not None:
            made = self.as_plan(
                self.strategy(strategy),
                strategy,
                budget=budget,
                activation_budget=activation_budget,
                bound_by=effort if compare else None,
                progress=progress,
            )
            return self.compared(made, None, effort.clock(), progress) if compare else made
        found: list[Found] = []

        def propose(problem: Problem) -> Any:
            with timings.stage("solving"):
                found.append(step.choose(problem, effort.clock(), progress))
            return found[-1].solution

        made = make_plan(
            step.graph,
            step.costs,
            budget=budget,
            activation_budget=activation_budget,
            at_least_bytes=at_least_bytes,
            origin=step.origin,
            static_memory=step.static_memory,
            host=host,
            progress=progress,
            compare=False,
            propose=propose,
        )
        ways = found[-1].ways if found else ()
        made = with_kept(with_modules(made, ways, host), step.graph, step.regions)
        return step.compared(made, host, effort.clock(), progress) if compare else made

    def choose(self, problem: Problem, clock: Clock, progress: Progress | None = None) -> Found:
        """Give the modules that keep a budget and add least to the step.

        Raises
        ------
        InfeasibleBudgetError, HostBudgetError
            If none were found.
        """
        if problem.host is None:
            return Found(cheapest(problem, self.regions, clock, progress), ())
        return cheapest_with_offload(problem, self.regions, clock, progress)

    def improve(
        self, incumbent: Incumbent, *, solver: str, effort: SolveLimits, progress: Progress | None = None
    ) -> None:
        """Better an incumbent; see :meth:`Study.improve`."""
        check_solver("modules", solver)
        solution = self.choose(incumbent.problem, effort.clock(), progress).solution
        incumbent.update(solution.schedule, solution.solver)
        incumbent.raise_bound(solution.lower_bound_seconds)

    def lowest(self, problem: Problem, *, effort: SolveLimits) -> Schedule:
        """Give the choice of modules with the lowest peak that is found."""
        chooser = self._chooser(problem, Clock(_LOWEST_SECONDS, counts_work=effort.deterministic))
        return chooser.schedule(chooser.lowest())

    def strategy(self, name: str) -> Schedule:
        """Give what an established system does with the step: all blocks, or every N-th, are checkpointed.

        Raises
        ------
        UsageError
            If it does anything else, or there are no such blocks.
        """
        chosen = strategies.get(name)
        if chosen.strategy.name not in (_EVERY_LAYER, _EVERY_NTH):
            raise UsageError(
                f"of the strategies the runtime 'modules' has 'every-layer' and 'every-N' alone, not {name!r}"
            )
        blocks = self._blocks()
        if not blocks:
            raise UsageError(_NO_BLOCKS)
        return schedule_of(self.graph, blocks[:: chosen.number_among(len(blocks)) or 1])

    def compared(self, plan: Plan, host: Host | None, clock: Clock, progress: Progress | None = None) -> Plan:
        """Set a plan beside other choices of modules."""
        problem = make_problem(self.graph, self.costs, budget=plan.budget_bytes, host=host)
        chooser = self._chooser(problem, clock, progress)
        lowest = problem.evaluate(chooser.schedule(chooser.lowest()))
        smallest_bytes = min(lowest.peak_bytes + self.graph.total_static_bytes, plan.peak_bytes)
        schedule = plan.schedule_for(self.graph)
        layers = self._blocks()
        return replace(
            plan,
            details=step_details(problem, schedule, problem.evaluate(schedule)),
            minimum_feasible_peak_bytes=max(smallest_bytes, plan.optimizer_peak_bytes),
            baselines=(
                self._row("none", [], plan),
                self._row("every layer", layers, plan),
                self._row("every second layer", layers[::2], plan),
                BaselineRow(
                    name="this plan",
                    peak_bytes=plan.peak_bytes,
                    overhead=plan.overhead,
                    seconds=plan.solve_seconds,
                    fits=True,
                ),
            ),
        )

    def _chooser(self, problem: Problem, clock: Clock, progress: Progress | None = None) -> Chooser:
        ways = ways_of if problem.host is None else offloading_ways
        return Chooser(problem, ways(self.regions, self.graph, self.costs), clock, progress)

    def _blocks(self) -> list[Region]:
        blocks = set(find_layers(self.graph).blocks)
        return [region for region in self.regions if region.module in blocks]

    def _row(self, name: str, regions: list[Region], plan: Plan) -> BaselineRow:
        if name != "none" and not regions:
            return BaselineRow(name=name, reason=_NO_BLOCKS)
        evaluation = simulate(self.graph, self.costs, schedule_of(self.graph, regions))
        peak_bytes = evaluation.peak_bytes + self.graph.total_static_bytes
        return BaselineRow(
            name=name,
            peak_bytes=peak_bytes,
            overhead=plan.relative(evaluation.recompute_seconds),
            seconds=0.0,
            fits=peak_bytes <= plan.budget_bytes,
        )
