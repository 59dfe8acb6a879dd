"""A step captured and costed once, of which any number of plans can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cost_models.devices import DeviceSpec
from planner.checkpoints import Region
from planner.effort import Effort
from planner.errors import UsageError
from planner.graph import OperationCost, TrainingGraph
from planner.host import LEAST_BYTES, Host, host_of
from planner.plan_parts import PlanOrigin
from planner.plan_types import Plan
from planner.planning import Size, make_plan, make_problem
from planner.problem import Problem, Progress
from planner.selective import cheapest, with_kept
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStudy(Study):
    """A recorded eager step; :func:`planner.study` makes it for the runtime ``"modules"``.

    Parameters
    ----------
    regions : tuple of Region
        The modules that ``torch.utils.checkpoint`` could run again.
    """

    regions: tuple[Region, ...]

    def plan(
        self,
        *,
        budget: Size | None = None,
        activation_budget: Size | None = None,
        time_limit_seconds: float = 10.0,
        deterministic: bool = False,
        offload: bool = False,
        progress: Progress | None = None,
        **_: Any,
    ) -> Plan:
        """Plan which modules are checkpointed, by an integer programme; there is no choice of solvers, and no offload.

        Raises
        ------
        UsageError
            If values are to be offloaded.
        """
        if offload:
            raise UsageError(
                "a study of a step for the runtime 'modules' does not offload: make the plan with planner.plan(..., "
                "runtime='modules', offload=True), or study the step for runtime 'graph'"
            )
        clock = Effort(time_limit_seconds=time_limit_seconds, deterministic=deterministic).clock()
        made = make_plan(
            self.graph,
            self.costs,
            budget=budget,
            activation_budget=activation_budget,
            origin=self.origin,
            surroundings=self.surroundings,
            compare=False,
            propose=lambda problem: cheapest(problem, self.regions, clock, progress),
        )
        return with_kept(made, self.graph, self.regions)
