"""Mixed-integer programmes through PuLP, with HiGHS or, where that is missing, CBC.

The only module that knows PuLP.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from planner.errors import SolverUnavailableError
from planner.ir.problem import Progress
from planner.solving.step_cut import Model

_TOLERANCE = 1e-6
"""By so much, relatively, the objective of a relaxation may be wrong."""

_FEASIBLE = 2
"""``kSolutionStatusFeasible`` of HiGHS: PuLP also calls a search that was stopped empty-handed feasible."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from a library: the columns, if any, and a proven bound on the objective."""

    columns: list[float] | None
    bound: float
    infeasible: bool = False
    turns: int = 0


def _load() -> Any:
    """Import PuLP in a thread of its own.

    It keeps what importing an absent solver raised, and that keeps every frame that waits for the
    import, with all that is in them: a model, its inputs. A new thread has no such frames.
    """

    def load() -> Any:
        import pulp

        return pulp

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(load).result()


class Library:
    """PuLP with HiGHS or CBC."""

    def __init__(self, tell: Progress) -> None:
        try:
            pulp = _load()
        except ImportError as error:
            raise SolverUnavailableError("solver 'ilp' needs PuLP: pip install pulp highspy") from error
        self.pulp: Any = pulp
        self.has_highs = bool(pulp.HiGHS().available())
        if not self.has_highs:
            if not pulp.PULP_CBC_CMD().available():
                raise SolverUnavailableError("solver 'ilp' needs HiGHS or CBC: pip install highspy")
            tell("ilp: highspy is not installed, falling back on CBC, which is slower")

    def minimise(
        self,
        model: Model,
        *,
        seconds: float | None = None,
        turns: int | None = None,
        gap: float = 0.0,
        relax: bool = False,
    ) -> Answer:
        """Solve a model, or its LP relaxation, whose columns need not be whole.

        A search stops after so many seconds, or, the same every time, after HiGHS has asked so often whether to (CBC:
        after so many nodes), or where objective and bound are no further apart than the gap. Turns limit no relaxation.
        """
        pulp = self.pulp
        if not model.rows:
            return Answer([0.0] * len(model.cost), 0.0)
        programme = pulp.LpProblem("stepcut", pulp.LpMinimize)
        columns = [
            pulp.LpVariable(f"x{c}", 0, 1, pulp.LpInteger if whole else pulp.LpContinuous)
            for c, whole in enumerate(model.integer)
        ]
        programme += pulp.LpAffineExpression([(columns[c], cost) for c, cost in enumerate(model.cost) if cost])
        for terms, least in model.rows:
            programme += pulp.LpAffineExpression([(columns[c], weight) for c, weight in terms]) >= least
        counter = _Counter(turns)
        if self.has_highs:
            solver = pulp.HiGHS(mip=not relax)
            asked = None if turns is None or relax else counter.asked
            solver.createAndConfigureSolver = partial(_configure, gap=max(gap, 1e-9), seconds=seconds, asked=asked)
        else:
            solver = pulp.PULP_CBC_CMD(mip=not relax, msg=False, timeLimit=seconds, maxNodes=turns)
        programme.solve(solver)
        if programme.status == pulp.LpStatusInfeasible:
            return Answer(None, 0.0, infeasible=True)
        optimal = programme.sol_status == pulp.LpSolutionOptimal
        found = optimal or (programme.sol_status == pulp.LpSolutionIntegerFeasible and not relax)
        found = found and bool(programme.variables())
        values = [column.varValue or 0.0 for column in columns]
        exact = sum(cost for cost, value in zip(model.cost, values, strict=True) if value > 0.5)
        bound = 0.0
        if relax:  # what a relaxation that was stopped has come to bounds nothing
            bound = (pulp.value(programme.objective) or 0.0) * (1 - _TOLERANCE) if optimal else 0.0
        elif self.has_highs:
            info = programme.solverModel.getInfo()
            bound = info.mip_dual_bound
            found = found and info.primal_solution_status == _FEASIBLE
        elif optimal:
            bound = exact
        else:  # CBC keeps its dual bound to itself
            bound = self.minimise(model, seconds=seconds, relax=True).bound
        if optimal and not relax and abs(exact - bound) <= 1e-6 * max(1.0, exact):
            bound = exact
        return Answer(values if found else None, max(bound, 0.0), turns=counter.turns)


class _Counter:
    """Counts how often HiGHS asks whether to stop, and stops it after so many times."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.turns = 0

    def asked(self, kind: Any, message: str, output: Any, answer: Any, user: Any) -> None:
        """Be called back by HiGHS."""
        self.turns += 1
        if self.most is not None and self.turns > self.most:
            answer.user_interrupt = True


def _configure(programme: Any, *, gap: float, seconds: float | None, asked: Callable[..., None] | None) -> None:
    """Give a programme of PuLP's a HiGHS that says nothing.

    From 1.16 on, PuLP's own prints its name on stdout as soon as it is made, before PuLP can tell it not to.
    """
    highspy: Any = import_module("highspy")

    class Silent(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:  # called by its constructor; this prints
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    highs = programme.solverModel = Silent()
    options = {"output_flag": False, "mip_rel_gap": 0.0, "mip_abs_gap": gap, "threads": 1, "time_limit": seconds}
    for name, value in options.items():
        if value is not None:
            highs.setOptionValue(name, value)
    if asked is not None:
        highs.setCallback(asked, None)
        highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
