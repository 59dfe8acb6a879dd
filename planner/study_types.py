"""A step captured and costed once, of which any number of plans can be asked."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.devices import DeviceSpec
from planner import solvers, strategies
from planner.effort import Effort
from planner.errors import UsageError
from planner.floor import lowest_schedule
from planner.graph import OperationCost, TrainingGraph
from planner.host import LEAST_BYTES, Host, host_of
from planner.plan_parts import PlanOrigin
from planner.plan_types import Plan
from planner.planning import Size, make_plan, make_problem
from planner.problem import Problem, Progress
from planner.schedule import Schedule
from planner.solvers._standing import Standing
from planner.solvers.auto import AutoSolver
from planner.solvers.mixed import first_within, lowest_offloading, ranked
from planner.surroundings import Surroundings


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
    surroundings : Surroundings
        The optimizer's own step, and how the device hands out memory.
    device : DeviceSpec, optional
        Figures of the device: its link to the host's memory is what offload needs.
    """

    graph: TrainingGraph
    costs: tuple[OperationCost, ...]
    origin: PlanOrigin
    surroundings: Surroundings
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
        """Give the host memory that values may be offloaded to; see :func:`planner.host.host_of`."""
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
        """Plan the step; see :func:`planner.plan` for ``offload``, :func:`planner.planning.make_plan` for the rest."""
        if offload_lossy and not offload:
            raise UsageError("offload_lossy rounds what is offloaded: give offload too")
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
            surroundings=self.surroundings,
            host=self.host(host_budget, offload_at_least, lossy=offload_lossy) if offload else None,
            compare=compare,
            progress=progress,
        )

    # What a trade-off asks.

    def for_host(self, host: Host | None) -> Study:
        """Give the step as it is where values may wait in a host's memory, or may not."""
        return self

    def improve(self, standing: Standing, *, solver: str, effort: Effort, progress: Progress | None = None) -> None:
        """Better a standing of this step.

        Raises
        ------
        InfeasibleBudgetError
            If there is no plan, or none was found.
        """
        if solver == AutoSolver.name:
            AutoSolver().improve(standing, effort=effort, progress=progress)
            return
        solution = solvers.solve(
            standing.problem,
            solver,
            time_limit_seconds=effort.time_limit_seconds,
            deterministic=effort.deterministic,
            seed=effort.seed,
            progress=progress,
        )
        standing.offer(solution.schedule, solution.solver)
        standing.prove(solution.lower_bound_seconds)

    def lowest(self, problem: Problem, *, effort: Effort) -> Schedule:
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
