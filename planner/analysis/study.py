"""A step captured and costed once, of which any number of plans can be asked."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from cost_models.devices import DeviceSpec
from planner import solvers, strategies
from planner.analysis.compatibility import check_strategy
from planner.common.limits import SolveLimits
from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, UsageError
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import LEAST_BYTES, Host, host_of
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.plan import Plan, PlanOrigin
from planner.plans.planning import GAP, Size, make_plan, make_problem, plan_from_solution
from planner.solvers.auto import AutoSolver
from planner.solvers.mixed import first_within, lowest_offloading, ranked
from planner.solving.incumbent import Incumbent
from planner.solving.peak_bounds import lowest_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A captured step as plain data; :func:`planner.study` makes it.

    Parameters
    ----------
    graph : TrainingGraph
        With what is resident around it.
    costs : tuple of OperationCost
        One for each operation.
    origin : PlanOrigin
        Where both come from.
    static_memory : StaticMemory
        The optimizer's own step, and how the device hands out memory.
    device : DeviceSpec, optional
        Figures of the device: its link to the host's memory is what offload needs.
    """

    graph: TrainingGraph
    costs: tuple[OperationCost, ...]
    origin: PlanOrigin
    static_memory: StaticMemory
    device: DeviceSpec | None = None

    def problem(self, budget: Size = "100%") -> Problem:
        """Give the problem that a budget for the whole device poses.

        Raises
        ------
        UsageError
            If the budget cannot be read.
        """
        return make_problem(self.graph, self.costs, budget=budget)

    def host(self, budget: Size | None = None, at_least: Size = LEAST_BYTES, *, lossy: bool = False) -> Host:
        """Give the host memory that values may be offloaded to; see :func:`planner.ir.host.host_of`."""
        if self.device is None:
            raise UsageError("nothing is known of the device of this step, so nothing can be offloaded")
        return host_of(self.device, budget, at_least=at_least, lossy=lossy)

    def unlimited_host(self) -> Host | None:
        """Give the host's memory as if there were any amount of it; None if nothing is known of the link to it."""
        try:
            return self.host(2**62, at_least=1)
        except UsageError:
            return None

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
        """Plan the step; see :func:`planner.plan` for what is not told to :func:`planner.plans.planning.make_plan`."""
        check_strategy(strategy, self.origin.runtime, offload=offload)
        if offload_lossy and not offload:
            raise UsageError("offload_lossy rounds what is offloaded: give offload too")
        effort = SolveLimits(time_limit_seconds=time_limit_seconds, deterministic=deterministic, seed=seed)
        if strategy is not None:
            return self.as_plan(
                self.strategy(strategy),
                strategy,
                budget=budget,
                activation_budget=activation_budget,
                bound_by=effort if compare else None,
                compare=compare,
                progress=progress,
            )
        return make_plan(
            self.graph,
            self.costs,
            budget=budget,
            activation_budget=activation_budget,
            at_least_bytes=at_least_bytes,
            solver=solver,
            time_limit_seconds=time_limit_seconds,
            deterministic=deterministic,
            seed=seed,
            origin=self.origin,
            static_memory=self.static_memory,
            host=self.host(host_budget, offload_at_least, lossy=offload_lossy) if offload else None,
            compare=compare,
            progress=progress,
        )

    def as_plan(
        self,
        schedule: Schedule,
        name: str,
        *,
        budget: Size | None = None,
        activation_budget: Size | None = None,
        lower_bound_seconds: float = 0.0,
        bound_by: SolveLimits | None = None,
        compare: bool = False,
        progress: Progress | None = None,
    ) -> Plan:
        """Write out a schedule of this step, wherever it comes from, as a plan for a budget, or for its own peak.

        Parameters
        ----------
        schedule : Schedule
        name : str
            What stands for the solver's name.
        budget, activation_budget : int, float or str, optional
        lower_bound_seconds : float
            Proven for the budget.
        bound_by : SolveLimits, optional
            How hard to look for a better bound.
        compare, progress
            See :func:`planner.plans.planning.make_plan`.

        Raises
        ------
        InfeasibleBudgetError
            If it does not keep the budget.
        """
        found = simulate(self.graph, self.costs, schedule, self.unlimited_host())
        static_bytes = self.graph.total_static_bytes
        needed_bytes = max(found.peak_bytes + static_bytes, optimizer_peak_bytes(self.graph, self.static_memory))
        if budget is None and activation_budget is None:
            budget = needed_bytes
        problem = make_problem(self.graph, self.costs, budget=budget, activation_budget=activation_budget)
        budget_bytes = problem.budget_bytes + static_bytes
        if needed_bytes > budget_bytes:
            raise InfeasibleBudgetError(
                f"{name!r} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes), and the budget is "
                f"{format_bytes(budget_bytes)}: give that much, or leave the strategy out for a plan that fits",
                minimum_feasible_peak_bytes=needed_bytes,
                operation=self.graph.operations[schedule.order[found.peak_position]].name,
            )
        rounds = any(offload.lossy for offload in schedule.offloads)
        host = self.host(found.host_bytes, self.least_offloaded(schedule), lossy=rounds) if found.host_bytes else None
        problem = replace(problem, host=host)
        if bound_by is not None:
            incumbent = Incumbent(problem)
            incumbent.update(schedule, name)
            with suppress(InfeasibleBudgetError):  # nothing better was found in time
                self.improve(incumbent, solver=AutoSolver.name, effort=bound_by, progress=progress)
            lower_bound_seconds = max(lower_bound_seconds, incumbent.lower_bound_seconds)
        solution = Solution(
            solver=name,
            schedule=schedule,
            peak_bytes=found.peak_bytes,
            recompute_seconds=found.added_seconds,
            lower_bound_seconds=min(lower_bound_seconds, found.added_seconds),
        )
        made = plan_from_solution(
            problem, solution, origin=self.origin, static_memory=self.static_memory, compare=compare
        )
        # That it pays more than it must is what was to be seen, and no solver's time changes it.
        return replace(made, warnings=tuple(one for one in made.warnings if one.rule != GAP))

    def least_offloaded(self, schedule: Schedule) -> int:
        """Give the size from which on values may be offloaded, so that a schedule's own may be."""
        sizes = (self.graph.values[offload.value].size_bytes for offload in schedule.offloads)
        return min(LEAST_BYTES, min(sizes, default=LEAST_BYTES))

    # What a trade-off asks.

    def for_host(self, host: Host | None) -> Study:
        """Give the step as it is where values may wait in a host's memory, or may not."""
        return self

    def improve(
        self, incumbent: Incumbent, *, solver: str, effort: SolveLimits, progress: Progress | None = None
    ) -> None:
        """Better an incumbent of this step.

        Raises
        ------
        InfeasibleBudgetError
            If there is no plan, or none was found.
        """
        if solver == AutoSolver.name:
            AutoSolver().improve(incumbent, effort=effort, progress=progress)
            return
        if effort.told is not None:
            effort.told(effort.time_limit_seconds)  # what it really takes nobody says
        solution = solvers.solve(
            incumbent.problem,
            solver,
            time_limit_seconds=effort.time_limit_seconds,
            deterministic=effort.deterministic,
            seed=effort.seed,
            progress=progress,
        )
        incumbent.update(solution.schedule, solution.solver)
        incumbent.raise_bound(solution.lower_bound_seconds)

    def lowest(self, problem: Problem, *, effort: SolveLimits) -> Schedule:
        """Give the plan of the lowest peak that quick methods find, down to the problem's budget."""
        schedules = [lowest_schedule(problem.graph, problem.costs, target_bytes=problem.budget_bytes)]
        if problem.host is not None:
            schedules.append(lowest_offloading(problem, first_within(problem, ranked(problem))))
        return min(schedules, key=lambda one: problem.evaluate(one).peak_bytes)

    def strategy(self, name: str) -> Schedule:
        """Give what an established system does with the step.

        Raises
        ------
        UsageError
            If the step lacks what the strategy is about, or there is none of that name.
        """
        return strategies.schedule(name, self.graph, self.costs, self.unlimited_host())
