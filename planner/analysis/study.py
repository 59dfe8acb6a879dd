"""A step, captured and costed once, for which any number of plans can be made."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Any

from cost_models.devices import DeviceSpec
from planner import solvers, strategies
from planner.analysis.compatibility import OFFLOAD, check_offload, check_solver, check_strategy
from planner.common.limits import Clock, SolveLimits
from planner.common.options import AUTO, LEAST_BYTES, Budget, Offload, Search, group
from planner.common.units import Size, format_bytes
from planner.errors import InfeasibleBudgetError, RuntimeUnsupportedError, UsageError
from planner.ir.checkpoints import Region, schedule_of
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host, host_of
from planner.ir.in_place import InPlace
from planner.ir.order import in_own_order
from planner.ir.policy import Policy
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import optimizer_peak_bytes, whole_peak_bytes
from planner.plans.comparison import NO_BLOCKS, regions_of_blocks
from planner.plans.from_solution import GAP, PRICE, plan_from_solution
from planner.plans.plan import Plan, PlanOrigin
from planner.plans.planning import make_plan, make_problem
from planner.solvers.auto import AutoSolver
from planner.solvers.offload_search import first_within, lowest_offloading, ranked
from planner.solving import lowest_known, solution_cache
from planner.solving.incumbent import Incumbent
from planner.solving.modules.ilp import lowest_choice
from planner.solving.peak_bounds import lowest_schedule

_log = logging.getLogger(__name__)

_BETTER = 1e-3
"""A plan replaces the one in force only if it is cheaper by this share of the step: its graphs must be written."""

WORTH_OFFLOADING = 0.005
"""What offload must save if it was not asked for, as a share of the step: other copies may use the link too."""

# Its imports are of low priority too: they take seconds, in which the first step of training runs.
_PROGRAM = "import os; getattr(os, 'nice', int)(19); from planner.analysis.study import main; main()"

_OF_MODULES = ("pytorch-checkpoint", "every")
"""Strategies that are choices of modules."""

_LOWEST_SECONDS = 2.0
"""For the lowest peak of all plans, or of all choices of modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A captured step as plain data; :func:`planner.study` makes it."""

    graph: TrainingGraph
    """With what is resident around it."""
    costs: tuple[OperationCost, ...]
    """One for each operation."""
    origin: PlanOrigin
    """Where both come from."""
    static_memory: StaticMemory
    """The optimizer's own step, and how the device hands out memory."""
    in_place: InPlace | None = None
    """The way from operations that write over an input, and are one with what made it, to those that run."""
    device: DeviceSpec | None = None
    """Figures of the device: its link to the host's memory is what offload needs."""
    regions: tuple[Region, ...] | None = None
    """Of an eager step, the modules that ``torch.utils.checkpoint`` could recompute; nothing else can be recomputed."""
    varies: bool = False
    """Whether what the step runs depends on its data, so that it need not be the same twice."""
    draws: bool = False
    """Whether it depends on single numbers that the step draws from torch's random state."""

    @property
    def ways(self) -> InPlace:
        """The way from the study's operations to those that run, of a captured step."""
        assert self.in_place is not None
        return self.in_place

    @property
    def whole_bytes(self) -> int:
        """The peak that percentages refer to: that of the eager step, or of this one if eager's is unknown."""
        eager = self.origin.eager
        return eager.peak_bytes if eager is not None else self._unplanned_bytes

    @property
    def _unplanned_bytes(self) -> int:
        """Peak bytes of the whole device without recompute, as its allocator counts them."""
        problem = Problem(graph=self.graph, costs=self.costs, budget_bytes=0)
        return whole_peak_bytes(problem, Schedule.keep_all(self.graph), self.static_memory)

    def problem(self, budget: Size | None = None) -> Problem:
        """Return the problem that a budget for the whole device poses: by default what the step takes unplanned."""
        if budget is None:
            budget = self._unplanned_bytes
        return self.posed(Budget(budget))

    def posed(self, budget: Budget, host: Host | None = None, policy: Policy | None = None) -> Problem:
        """Return the problem that any budget poses, with a host's memory or without, and with what a policy decides."""
        whole = self.whole_bytes if budget.is_share else None
        return make_problem(
            self.graph, self.costs, budget, host=host, regions=self.regions, whole_bytes=whole, policy=policy
        )

    def host(self, budget: Size | None = None, at_least: Size = LEAST_BYTES, **more: Any) -> Host:
        """Return the host memory that values may be offloaded to; see :func:`planner.ir.host.host_of`."""
        if self.device is None:
            raise UsageError("the device of this step is unknown, so nothing can be offloaded")
        host = host_of(self.device, budget, at_least=at_least, **more)
        # The loop sends the next batch over the same link.
        batch_bytes, step_seconds = self.graph.static_bytes.get("inputs", 0), sum(cost.seconds for cost in self.costs)
        left = host.bytes_per_second - (batch_bytes / step_seconds if step_seconds else 0.0)
        return replace(host, bytes_per_second=max(left, host.bytes_per_second / 10))

    def host_for(self, asked: Offload, search: Search = Search()) -> Host | None:
        """Return the host memory that is asked for, None if nothing may be offloaded, or ``"auto"`` sees no way to."""
        least_gain = 0.0 if asked.enabled is True else WORTH_OFFLOADING
        if least_gain:
            is_possible = asked.enabled and self.origin.runtime in OFFLOAD and solvers.get(search.solver).offloads
            device = self.device if is_possible else None
            if device is None or device.kind == "cpu" or not (asked.link or device.host_link_bytes_per_second > 0):
                return None
        return replace(self.host(asked.host_budget, asked.at_least, link=asked.link), least_gain=least_gain)

    def unlimited_host(self) -> Host | None:
        """Return the host memory without a limit; None if the link to it is unknown."""
        try:
            return self.host(2**62, at_least=1)
        except UsageError:
            return None

    def plan(
        self,
        budget: Budget | Size | None = None,
        *,
        search: Search | str = "auto",
        offload: Offload | bool | str = AUTO,
        policy: Policy | None = None,
    ) -> Plan:
        """Plan the step, or write out what an established system does with it.

        Parameters
        ----------
        budget : int, float, str or Budget
            What the device may hold, what the step may allocate, or the strategy of an established system.
        search : str or Search
            How the plan is looked for.
        offload : bool, str or Offload
            Whether values may wait in the host's memory too; see :func:`planner.plan`.
        policy : callable, optional
            What decides single operations; see :func:`planner.plan`.

        Returns
        -------
        Plan
        """
        budget, search, offload = Budget.of(budget), group(Search, search), group(Offload, offload)
        check_solver(self.origin.runtime, search.solver)
        if policy is not None and (self.regions is not None or budget.strategy is not None):
            told = "a strategy" if budget.strategy is not None else "the runtime 'modules', which recomputes modules,"
            raise RuntimeUnsupportedError(f"{told} follows no policy: a policy decides single operations of a graph")
        check_strategy(budget.strategy, self.origin.runtime, offload=offload.enabled is True)
        if self.regions is not None:
            check_offload("modules", offload)
        if budget.strategy is not None:
            return self.as_plan(
                self.strategy(budget.strategy),
                budget.strategy,
                budget=budget,
                bound_by=search if search.compare else None,
                compare=search.compare,
                progress=search.progress,
            )
        problem = self.posed(budget, self.host_for(offload, search), policy)
        if policy is not None and offload.enabled is not True and not problem.decisions.offload:
            problem = replace(problem, host=None)  # the rest of it is not asked to
        return make_plan(problem, search, origin=self.origin, static_memory=self.static_memory)

    def as_plan(
        self,
        schedule: Schedule,
        name: str,
        *,
        budget: Budget | Size | None = None,
        lower_bound_seconds: float = 0.0,
        bound_by: SolveLimits | None = None,
        compare: bool = False,
        progress: Progress | None = None,
    ) -> Plan:
        """Convert any schedule of this step to a plan for a budget, by default its own peak.

        The name stands for the solver's. A bound that is proven for the budget may be given, and how hard to look for a
        better one. An InfeasibleBudgetError says that the schedule does not keep the budget.
        """
        found = simulate(self.graph, self.costs, schedule, self.unlimited_host())
        static_bytes = self.graph.total_static_bytes
        alone = Problem(graph=self.graph, costs=self.costs, budget_bytes=0, host=self.unlimited_host())
        needed_bytes = max(
            whole_peak_bytes(alone, schedule, self.static_memory), optimizer_peak_bytes(self.graph, self.static_memory)
        )
        asked = Budget.of(budget)
        problem = self.posed(asked if asked.is_given else Budget(needed_bytes))
        budget_bytes = problem.budget_bytes + static_bytes
        if needed_bytes > budget_bytes:
            raise InfeasibleBudgetError(
                f"{name!r} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes), and the budget is "
                f"{format_bytes(budget_bytes)}: give that much, or leave the strategy out for a plan that fits",
                minimum_feasible_peak_bytes=needed_bytes,
                operation=self.graph.operations[schedule.order[found.peak_position]].name,
            )
        host = self.host(found.host_bytes, self.least_offloaded(schedule)) if found.host_bytes else None
        problem = replace(problem, host=host)
        if bound_by is not None:
            bounded, in_its_order = in_own_order(problem, schedule)
            incumbent = Incumbent(bounded)
            incumbent.update(in_its_order, name)
            with suppress(InfeasibleBudgetError):  # nothing better was found in time
                self.improve(incumbent, solver=AutoSolver.name, effort=bound_by, progress=progress)
            lower_bound_seconds = max(lower_bound_seconds, incumbent.lower_bound_seconds)
        solution = Solution.simulated(found, schedule, name, lower_bound_seconds=lower_bound_seconds)
        made = plan_from_solution(
            problem, solution, origin=self.origin, static_memory=self.static_memory, compare=compare, limits=bound_by
        )
        # That it pays more than it must is what was to be seen, and no solver's time changes it.
        return replace(made, warnings=tuple(one for one in made.warnings if one.rule not in (GAP, PRICE)))

    def least_offloaded(self, schedule: Schedule) -> int:
        """Return the size from which on values may be offloaded, so that a schedule's own may be."""
        sizes = (self.graph.values[offload.value].size_bytes for offload in schedule.offloads)
        return min(LEAST_BYTES, min(sizes, default=LEAST_BYTES))

    def improve(
        self, incumbent: Incumbent, *, solver: str, effort: SolveLimits, progress: Progress | None = None
    ) -> None:
        """Improve an incumbent of this step; raise InfeasibleBudgetError if there is no plan, or none was found."""
        if self.regions is None:
            if solver == AutoSolver.name:
                AutoSolver().improve(incumbent, effort=effort, progress=progress)
                return
            if effort.told is not None:
                effort.told(effort.time_limit_seconds)  # what it really takes nobody says
        solution = solvers.solved(incumbent.problem, solver, effort=effort, progress=progress)
        incumbent.update(solution.schedule, solution.solver)
        incumbent.raise_bound(solution.lower_bound_seconds)

    def lowest(self, problem: Problem, *, effort: SolveLimits) -> Schedule:
        """Return the plan of the lowest peak that is found in a little time, down to the problem's budget."""
        if problem.regions is not None:
            return lowest_choice(problem, Clock(_LOWEST_SECONDS, counts_work=effort.deterministic))
        if problem.host is None:
            limit_seconds = min(_LOWEST_SECONDS, effort.time_limit_seconds)
            found = AutoSolver().lowest(problem, effort=replace(effort, time_limit_seconds=limit_seconds))
            return found if effort.deterministic else lowest_known.lower(problem, found)
        schedules = [lowest_schedule(problem), lowest_offloading(problem, first_within(problem, ranked(problem)))]
        return min(schedules, key=lambda one: problem.evaluate(one).peak_bytes)

    def strategy(self, name: str) -> Schedule:
        """Return the schedule of an established strategy; raise UsageError if it does not apply to the step."""
        if self.regions is None:
            return strategies.schedule(name, self.graph, self.costs, self.unlimited_host())
        chosen = strategies.get(name)
        if chosen.strategy.name not in _OF_MODULES:
            raise UsageError(f"the runtime 'modules' has only the strategies 'every-layer' and 'every-N', not {name!r}")
        blocks = regions_of_blocks(self.problem())
        if not blocks:
            raise UsageError(NO_BLOCKS)
        return schedule_of(self.graph, blocks[:: chosen.number_among(len(blocks)) or 1])


# A search beside training, which goes on under the plan that was found at once.


class SearchBeside:
    """A search in another process; what it finds is in :mod:`planner.solving.solution_cache` once it is taken.

    ``asked`` are the keywords of :meth:`planner.analysis.study.Study.plan`. The process is of low priority, imports no
    torch, and ends with this object.
    """

    def __init__(self, study: Study, plan: Plan, asked: Mapping[str, Any]) -> None:
        self._plan, self._found = plan, tempfile.TemporaryFile()  # noqa: SIM115, the process writes it
        search = replace(asked["search"], progress=None, told=None, compare=False)
        with tempfile.TemporaryFile() as given:
            pickle.dump((study, {**asked, "search": search}), given)
            given.seek(0)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=given, stdout=self._found, stderr=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        weakref.finalize(self, _end, self._process, self._found)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def take(self) -> bool:
        """Take what a process that is over has found, and return whether it is better than the plan in force."""
        if self._process.returncode:
            _log.info("the search beside training failed; the plan stays as it is")
            return False
        self._found.seek(0)
        found = json.load(self._found)
        solution_cache.remember(found["solutions"])
        return bool(found["added_seconds"] < self._plan.added_seconds - _BETTER * self._plan.step_seconds)


def _end(process: subprocess.Popen[bytes], found: IO[bytes]) -> None:
    process.kill()
    process.wait()
    found.close()


def main() -> None:
    """Make the plan that standard input asks for, and write its solutions to standard output."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what libraries print
    study, asked = pickle.load(sys.stdin.buffer)
    solutions = solution_cache.collect()
    plan = study.plan(**asked)
    with os.fdopen(answer, "w") as out:
        json.dump({"added_seconds": plan.added_seconds, "solutions": solutions}, out)


def is_worth_it(plan: Plan, search: Search, host: Host | None = None) -> bool:
    """Whether a longer search, in which values may be offloaded, may find a better plan than a quick one did."""
    bound_seconds = plan.lower_bound_seconds if host is None else 0.0
    return plan.added_seconds - bound_seconds > max(search.enough, _BETTER) * plan.step_seconds
