"""Mixed-integer programmes and their relaxations: HiGHS or, where highspy is missing, CBC through PuLP.

The only module that knows either library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

from planner.errors import SolverUnavailableError
from planner.solving.step_cut import Model, Row

_TOLERANCE = 1e-6
"""By so much, relatively, the objective of a relaxation may be wrong."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The solution of a programme, if any, and a proven bound on the objective."""

    columns: list[float] | None
    bound: float
    infeasible: bool = False
    turns: int = 0


def minimise(model: Model, *, seconds: float | None = None, turns: int | None = None, relax: bool = False) -> Answer:
    """Solve a model, or its LP relaxation.

    A search stops after so many seconds, or, the same every time, after HiGHS has asked so often whether to (CBC: after
    so many nodes). Turns limit no relaxation.
    """
    if not model.rows:
        return Answer([0.0] * len(model.cost), 0.0)
    if relax or not any(model.integer):
        return relaxed(model).solve(seconds)
    highspy, asked = _highspy(), 0
    if highspy is None:
        return _PulpProgramme(model, relax=False).solve(seconds, turns)

    def count(kind: Any, message: str, output: Any, answer: Any, user: Any) -> None:
        nonlocal asked
        asked += 1
        if turns is not None and asked > turns:
            answer.user_interrupt = True

    highs = _silent(highspy)
    options = {"mip_rel_gap": 0.0, "mip_abs_gap": 1e-9, "threads": 1, "time_limit": seconds}
    for name, value in options.items():
        if value is not None:
            highs.setOptionValue(name, value)
    if turns is not None:
        highs.setCallback(count, None)
        highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    highs.passModel(_matrix(highspy, model, relax=False))
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if _is_infeasible(highspy, status):
        return Answer(None, 0.0, infeasible=True, turns=asked)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    columns, bound = _columns(highs) if found else None, info.mip_dual_bound
    if status == highspy.HighsModelStatus.kOptimal and columns is not None:
        bound = exact_optimum(model, columns, bound)
    return Answer(columns, max(bound, 0.0), turns=asked)


def relaxed(model: Model) -> Relaxation:
    """Return the LP relaxation of a model."""
    return Relaxation(model) if _highspy() is not None else _PulpProgramme(model, relax=True)


class Relaxation:
    """The LP relaxation of a model; rows may be added, and each solve starts from the last basis."""

    def __init__(self, model: Model) -> None:
        self.highspy, self.model = _highspy(), model
        self.highs = _silent(self.highspy)
        self.highs.setOptionValue("threads", 1)
        self.highs.passModel(_matrix(self.highspy, model, relax=True))
        self.num_rows = len(model.rows)

    def solve(self, seconds: float | None = None, turns: int | None = None) -> Answer:
        """Solve the relaxation; past the limit of seconds or simplex iterations there are no columns and no bound."""
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
        bound = max(info.objective_function_value * (1 - _TOLERANCE), 0.0)
        return Answer(_columns(highs), bound, turns=steps)

    def basis(self) -> Any:
        """Return the current simplex basis."""
        return self.highs.getBasis()

    def restart_from(self, basis: Any) -> None:
        """Restart from an earlier basis; the model must have no more rows than then."""
        self.highs.setBasis(basis)

    def prices(self) -> list[float]:
        """Return the dual price of each row at the last optimum."""
        return list(self.highs.getSolution().row_dual)

    def limit_column(self, column: int, low: float, high: float) -> None:
        """Set the bounds of a column."""
        self.highs.changeColBounds(column, low, high)

    def limit_row(self, row: int, low: float, high: float) -> None:
        """Set the bounds of a row."""
        self._add_new_rows()
        self.highs.changeRowBounds(row, low, high)

    def _add_new_rows(self) -> None:
        rows = self.model.rows[self.num_rows :]
        self.num_rows += len(rows)
        if not rows:
            return
        starts, columns, weights, least = _compressed(rows)
        highest = import_module("numpy").full(len(rows), self.highspy.kHighsInf)
        self.highs.addRows(len(rows), least, highest, len(columns), starts[:-1], columns, weights)


def exact_optimum(model: Model, columns: Sequence[float], bound: float) -> float:
    """Return the cost of the rounded columns if it equals the bound up to rounding, else the bound."""
    exact = sum(cost for cost, value in zip(model.cost, columns, strict=True) if value > 0.5)
    return exact if abs(exact - bound) <= 2 * _TOLERANCE * max(1.0, exact) else bound


def may_beat(bound: float, cutoff: float) -> bool:
    """Whether a bound leaves room for a solution below the cutoff, by more than rounding."""
    return bound + 2 * _TOLERANCE * max(1.0, bound) < cutoff


class _PulpProgramme(Relaxation):
    """A model or its relaxation for CBC, which solves from scratch each time."""

    def __init__(self, model: Model, *, relax: bool) -> None:
        self.pulp, self.model, self.relax = _pulp(), model, relax
        self.columns: dict[int, tuple[float, float]] = {}
        self.rows: dict[int, tuple[float, float]] = {}
        self.last_prices: list[float] = []

    def solve(self, seconds: float | None = None, turns: int | None = None) -> Answer:
        pulp, model = self.pulp, self.model
        programme = pulp.LpProblem("model", pulp.LpMinimize)
        kinds = [pulp.LpInteger if whole and not self.relax else pulp.LpContinuous for whole in model.integer]
        found = [pulp.LpVariable(f"x{c}", *self.columns.get(c, (0, 1)), kind) for c, kind in enumerate(kinds)]
        programme += pulp.LpAffineExpression([(found[c], cost) for c, cost in enumerate(model.cost) if cost])
        sums = [pulp.LpAffineExpression([(found[c], weight) for c, weight in terms]) for terms, _ in model.rows]
        for row, (_, least) in enumerate(model.rows):
            programme += sums[row] >= self.rows.get(row, (least, None))[0]
        for row, (_, high) in self.rows.items():
            if math.isfinite(high):
                programme += sums[row] <= high
        nodes = None if self.relax else turns
        programme.solve(pulp.PULP_CBC_CMD(mip=not self.relax, msg=False, timeLimit=seconds, maxNodes=nodes))
        self.last_prices = [row.pi or 0.0 for row in programme.constraints.values()][: len(model.rows)]
        if programme.status == pulp.LpStatusInfeasible:
            return Answer(None, 0.0, infeasible=True)
        # With a limit CBC reports Optimal for what is only an incumbent; sol_status alone tells them apart.
        is_optimal = programme.sol_status == pulp.LpSolutionOptimal
        if not (is_optimal or (programme.sol_status == pulp.LpSolutionIntegerFeasible and not self.relax)):
            return Answer(None, 0.0)
        values = [column.varValue or 0.0 for column in found]
        if self.relax:
            return Answer(values, max((pulp.value(programme.objective) or 0.0) * (1 - _TOLERANCE), 0.0))
        if is_optimal:
            return Answer(values, sum(cost for cost, value in zip(model.cost, values, strict=True) if value > 0.5))
        return Answer(values, _PulpProgramme(model, relax=True).solve(seconds).bound)  # CBC keeps its dual bound

    def basis(self) -> Any:
        return None

    def restart_from(self, basis: Any) -> None:
        pass

    def prices(self) -> list[float]:
        return self.last_prices

    def limit_column(self, column: int, low: float, high: float) -> None:
        self.columns[column] = low, high

    def limit_row(self, row: int, low: float, high: float) -> None:
        self.rows[row] = low, high


def _highspy() -> Any:
    """Return HiGHS; None if it is not installed."""
    try:
        return import_module("highspy")  # it has no types
    except ImportError:
        return None


def _pulp() -> Any:
    """Import PuLP in a thread of its own, or raise SolverUnavailableError.

    PuLP keeps the exceptions of solvers that are not installed, and with them every frame below the import: a model,
    its inputs. A new thread has no such frames.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            pulp = thread.submit(import_module, "pulp").result()
        except ImportError:
            pulp = None
    if pulp is None or not pulp.PULP_CBC_CMD().available():
        raise SolverUnavailableError("solver 'ilp' needs HiGHS or CBC: pip install highspy")
    return pulp


def _is_infeasible(highspy: Any, status: Any) -> bool:
    # No column goes beyond 0..1, so nothing is unbounded.
    return status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


def _columns(highs: Any) -> list[float]:
    return list(highs.getSolution().col_value)


def _silent(highspy: Any) -> Any:
    """Return a silent HiGHS: from 1.16 on it prints a banner on stdout when it is created."""

    class Silent(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:  # called by its constructor; this prints
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    highs = Silent()
    highs.setOptionValue("output_flag", False)
    return highs


def _matrix(highspy: Any, model: Model, *, relax: bool) -> Any:
    """Convert a model to HiGHS's row-wise matrix."""
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
    """Return row starts, columns, weights and lower limits in compressed sparse rows."""
    np: Any = import_module("numpy")
    terms = [term for row, _ in rows for term in row]
    return (
        np.array([0, *accumulate(len(row) for row, _ in rows)], np.int32),
        np.array([column for column, _ in terms], np.int32),
        np.array([weight for _, weight in terms], np.double),
        np.array([least for _, least in rows], np.double),
    )
