"""Mixed-integer programmes and their relaxations: HiGHS or, where highspy is missing, CBC through PuLP.

The only module that knows either library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

from planner.errors import SolverUnavailableError
from planner.solving.step_cut import Model, Row

_TOLERANCE = 1e-6
"""By so much, relatively, the objective of a relaxation and the bound of a search may be wrong."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The solution of a programme, if one was found, and a proven bound on the objective."""

    columns: list[float] | None
    bound: float
    infeasible: bool = False
    turns: int = 0


def minimise(
    model: Model,
    *,
    seconds: float | None = None,
    turns: int | None = None,
    gap: float = 0.0,
    relax: bool = False,
    is_over: Callable[[float], bool] = lambda bound: False,
) -> Answer:
    """Solve a model, or its LP relaxation, whose columns need not be whole.

    A search stops after so many seconds, or, the same every time, after HiGHS has asked so often whether to, or where
    objective and bound are no further apart than the gap, or when it is over: that is asked as often, with the bound
    that is proven by then. None of that but seconds limits a relaxation.
    """
    if not model.rows:
        return Answer([0.0] * len(model.cost), 0.0)
    if relax or not any(model.integer):
        return relaxed(model).solve(seconds)
    highspy, asked = _highspy(), 0
    if highspy is None:
        return _cbc(model, seconds, turns)[0]

    def ask(kind: Any, message: str, output: Any, answer: Any, user: Any) -> None:
        nonlocal asked
        asked += 1
        if is_over(_lowered(output.mip_dual_bound)) or (turns is not None and asked > turns):
            answer.user_interrupt = True

    highs = _silent(highspy)
    options = {"mip_rel_gap": 0.0, "mip_abs_gap": max(gap, 1e-9), "threads": 1, "time_limit": seconds}
    for name, value in options.items():
        if value is not None:
            highs.setOptionValue(name, value)
    highs.setCallback(ask, None)
    highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    highs.passModel(_matrix(highspy, model, relax=False))
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if _is_infeasible(highspy, status):
        return Answer(None, 0.0, infeasible=True, turns=asked)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    columns, bound = _columns(highs) if found else None, _lowered(info.mip_dual_bound)
    if status == highspy.HighsModelStatus.kOptimal and columns is not None:
        bound = _exact_optimum(model, columns, bound)
    return Answer(columns, bound, turns=asked)


def relaxed(model: Model) -> Relaxation:
    """Return the LP relaxation of a model."""
    return Relaxation(model) if _highspy() is not None else _CbcRelaxation(model)


class Relaxation:
    """The LP relaxation of a model, to whose rows others may be added; each solve goes on from the last optimum."""

    def __init__(self, model: Model) -> None:
        self.highspy, self.model = _highspy(), model
        self.highs = _silent(self.highspy)
        self.highs.setOptionValue("threads", 1)
        self.highs.passModel(_matrix(self.highspy, model, relax=True))
        self.num_rows = len(model.rows)

    def solve(self, seconds: float | None = None, turns: int | None = None) -> Answer:
        """Solve it; after so many seconds or simplex steps without an optimum there are no columns, and no bound."""
        highs = self.highs
        self._add_new_rows()
        highs.setOptionValue("simplex_iteration_limit", self.highspy.kHighsIInf if turns is None else turns)
        if seconds is not None:  # its clock goes on from one run to the next
            highs.setOptionValue("time_limit", highs.getRunTime() + seconds)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        steps = max(int(info.simplex_iteration_count), 0)
        if _is_infeasible(self.highspy, status):
            return Answer(None, 0.0, infeasible=True, turns=steps)
        if status != self.highspy.HighsModelStatus.kOptimal:
            return Answer(None, info.objective_function_value, turns=steps)
        return Answer(_columns(highs), _lowered(info.objective_function_value), turns=steps)

    def prices(self) -> list[float]:
        """Return, for each row at the last optimum, by how much the objective rises with what the row is at least."""
        return list(self.highs.getSolution().row_dual)

    def _add_new_rows(self) -> None:
        rows = self.model.rows[self.num_rows :]
        self.num_rows += len(rows)
        if not rows:
            return
        starts, columns, weights, least = _compressed(rows)
        highest = import_module("numpy").full(len(rows), self.highspy.kHighsInf)
        self.highs.addRows(len(rows), least, highest, len(columns), starts[:-1], columns, weights)


class _CbcRelaxation(Relaxation):
    """The LP relaxation of a model, solved by CBC from the start each time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.last_prices: list[float] = []

    def solve(self, seconds: float | None = None, turns: int | None = None) -> Answer:
        answer, self.last_prices = _cbc(self.model, seconds, turns, relax=True)
        return answer

    def prices(self) -> list[float]:
        return self.last_prices


def _cbc(model: Model, seconds: float | None, turns: int | None, *, relax: bool = False) -> tuple[Answer, list[float]]:
    """Solve a model, or its relaxation, by CBC; after so many nodes it stops. Also return the prices of its rows."""
    pulp = _pulp()
    programme = pulp.LpProblem("model", pulp.LpMinimize)
    kinds = [pulp.LpInteger if whole and not relax else pulp.LpContinuous for whole in model.integer]
    columns = [pulp.LpVariable(f"x{number}", 0, 1, kind) for number, kind in enumerate(kinds)]
    programme += pulp.LpAffineExpression(zip(columns, model.cost, strict=True))
    for terms, least in model.rows:
        programme += pulp.LpAffineExpression([(columns[number], weight) for number, weight in terms]) >= least
    programme.solve(pulp.PULP_CBC_CMD(mip=not relax, msg=False, timeLimit=seconds, maxNodes=None if relax else turns))
    prices = [row.pi or 0.0 for row in programme.constraints.values()]
    if programme.status == pulp.LpStatusInfeasible:
        return Answer(None, 0.0, infeasible=True), prices
    # With a limit CBC reports Optimal for what is only an incumbent; sol_status alone tells them apart.
    is_optimal = programme.sol_status == pulp.LpSolutionOptimal
    if not is_optimal and (relax or programme.sol_status != pulp.LpSolutionIntegerFeasible):
        return Answer(None, 0.0), prices
    found = [column.varValue or 0.0 for column in columns]
    if not is_optimal:  # CBC keeps its dual bound to itself
        return Answer(found, _cbc(model, seconds, None, relax=True)[0].bound), prices
    bound = _lowered(pulp.value(programme.objective) or 0.0)
    return Answer(found, bound if relax else _exact_optimum(model, found, bound)), prices


def _exact_optimum(model: Model, columns: Sequence[float], bound: float) -> float:
    """Return what an optimum costs in whole columns, if that is its bound but for rounding."""
    exact = sum(cost for cost, value in zip(model.cost, columns, strict=True) if value > 0.5)
    return exact if abs(exact - bound) <= 2 * _TOLERANCE * max(1.0, exact) else bound


def _lowered(bound: float) -> float:
    """Return what is proven where HiGHS gives a bound: its tolerance may have raised that."""
    return max(bound * (1 - _TOLERANCE), 0.0)


def _highspy() -> Any:
    """Return HiGHS; None if it is not installed."""
    try:
        return import_module("highspy")  # it has no types, and takes a while
    except ImportError:
        return None


def _pulp() -> Any:
    """Import PuLP in a thread of its own, or raise SolverUnavailableError.

    PuLP keeps the exceptions of solvers that are not installed, and with them every frame below the import: a model,
    its inputs. A new thread has no such frames.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        pulp = thread.submit(import_module, "pulp").result()
    if not pulp.PULP_CBC_CMD().available():
        raise SolverUnavailableError("solver 'ilp' needs HiGHS or CBC: pip install highspy")
    return pulp


def _is_infeasible(highspy: Any, status: Any) -> bool:
    # No column goes beyond 0..1, so nothing is unbounded.
    return status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


def _columns(highs: Any) -> list[float]:
    return list(highs.getSolution().col_value)


def _silent(highspy: Any) -> Any:
    """Return a HiGHS that prints nothing: from 1.16 on it prints its name on stdout as soon as it is made."""

    class Silent(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:  # called by its constructor; this prints
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    highs = Silent()
    highs.setOptionValue("output_flag", False)
    return highs


def _matrix(highspy: Any, model: Model, *, relax: bool) -> Any:
    """Lay a model out row by row, as HiGHS takes it."""
    np: Any = import_module("numpy")  # comes with highspy
    starts, columns, weights, least = _compressed(model.rows)
    programme = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = len(model.cost), len(model.rows)
    programme.col_cost_ = np.array(model.cost, np.double)
    programme.col_lower_, programme.col_upper_ = np.zeros(len(model.cost)), np.ones(len(model.cost))
    programme.row_lower_ = least
    programme.row_upper_ = np.full(len(model.rows), highspy.kHighsInf)
    matrix = programme.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = starts, columns, weights
    if not relax:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        programme.integrality_ = [kinds[whole] for whole in model.integer]
    return programme


def _compressed(rows: Sequence[Row]) -> tuple[Any, Any, Any, Any]:
    """Return where each row starts, the columns and weights of all, and what each is at least."""
    np: Any = import_module("numpy")
    terms = [term for row, _ in rows for term in row]
    return (
        np.array([0, *accumulate(len(row) for row, _ in rows)], np.int32),
        np.array([column for column, _ in terms], np.int32),
        np.array([weight for _, weight in terms], np.double),
        np.array([least for _, least in rows], np.double),
    )
