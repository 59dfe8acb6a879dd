"""Mixed-integer programmes: HiGHS by its own interface or, where that is missing, CBC through PuLP.

The only module that knows either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol

from planner.errors import SolverUnavailableError
from planner.ir.problem import Progress
from planner.solving.step_cut import Model, Row

_TOLERANCE = 1e-6
"""By so much, relatively, the objective of a relaxation may be wrong."""


Ranges = dict[int, tuple[float, float]]
"""What columns, or sums of rows, are at least and at most."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from a library: the columns, if any, and a proven bound on the objective."""

    columns: list[float] | None
    bound: float
    infeasible: bool = False
    turns: int = 0


def _highs() -> Any:
    """Return HiGHS; None if it is not installed."""
    try:
        return import_module("highspy")  # it has no types
    except ImportError:
        return None


def _pulp() -> Any:
    """Import PuLP, in a thread of its own; None if it is not installed.

    It keeps what importing an absent solver raised, and that keeps every frame that waits for the
    import, with all that is in them: a model, its inputs. A new thread has no such frames.
    """

    def load() -> Any:
        import pulp

        return pulp

    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            return thread.submit(load).result()
        except ImportError:
            return None


class Library:
    """HiGHS or CBC."""

    def __init__(self, tell: Progress) -> None:
        self.highspy = _highs()
        self.pulp: Any = None
        if self.highspy is None:
            self.pulp = _pulp()
            if self.pulp is None or not self.pulp.PULP_CBC_CMD().available():
                raise SolverUnavailableError("solver 'ilp' needs HiGHS or CBC: pip install highspy")
            tell("ilp: highspy is not installed, falling back on CBC, which is slower")

    @property
    def has_highs(self) -> bool:
        """Whether it is HiGHS."""
        return self.highspy is not None

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
        if not model.rows:
            return Answer([0.0] * len(model.cost), 0.0)
        if relax or not any(model.integer):
            return self.relaxation(model).solve(seconds)
        if self.has_highs:
            return _by_highs(self.highspy, model, seconds=seconds, turns=turns, gap=gap)
        return _by_cbc(self.pulp, model, seconds=seconds, turns=turns, relax=False)

    def relaxation(self, model: Model) -> Relaxation:
        """Return the LP relaxation of a model, to whose rows others may be added."""
        return _HighsRelaxation(self.highspy, model) if self.has_highs else _CbcRelaxation(self.pulp, model)


class Relaxation(Protocol):
    """An LP relaxation that can be solved again when its model has more rows."""

    def solve(self, seconds: float | None = None, turns: int | None = None) -> Answer:
        """Solve it; after so many seconds or turns without an optimum there are no columns, and the bound is a guess.

        Turns are the steps that it takes.
        """
        ...

    def prices(self) -> list[float]:
        """Return, for each row at the last optimum, by how much the objective rises with what the row is at least."""
        ...

    def basis(self) -> Any:
        """Return where it has come to."""
        ...

    def go_on_from(self, basis: Any) -> None:
        """Go on from where it was; its model must have no more rows than then."""
        ...

    def limit_column(self, column: int, low: float, high: float) -> None:
        """Narrow what a column may be, or widen it again."""
        ...

    def limit_row(self, row: int, low: float, high: float) -> None:
        """Narrow what the sum of a row of the model may be, or widen it again."""
        ...


class _HighsRelaxation:
    """Goes on from the last optimum."""

    def __init__(self, highspy: Any, model: Model) -> None:
        self.highspy, self.model = highspy, model
        self.highs = _silent(highspy)
        self.highs.setOptionValue("threads", 1)
        self.highs.passModel(_matrix(highspy, model, relax=True))
        self.num_rows = len(model.rows)

    def solve(self, seconds: float | None = None, turns: int | None = None) -> Answer:
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
        return self.highs.getBasis()

    def go_on_from(self, basis: Any) -> None:
        self.highs.setBasis(basis)

    def prices(self) -> list[float]:
        return list(self.highs.getSolution().row_dual)

    def limit_column(self, column: int, low: float, high: float) -> None:
        self.highs.changeColBounds(column, low, high)

    def limit_row(self, row: int, low: float, high: float) -> None:
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


class _CbcRelaxation:
    """Begins anew each time."""

    def __init__(self, pulp: Any, model: Model) -> None:
        self.pulp, self.model = pulp, model
        self.columns: Ranges = {}
        self.rows: Ranges = {}
        self.last_prices: list[float] = []

    def solve(self, seconds: float | None = None, turns: int | None = None) -> Answer:
        programme, columns = _programme(self.pulp, self.model, relax=True, columns=self.columns, rows=self.rows)
        answer = _run_cbc(self.pulp, self.model, programme, columns, seconds=seconds, turns=None, relax=True)
        self.last_prices = [row.pi or 0.0 for row in programme.constraints.values()][: len(self.model.rows)]
        return answer

    def basis(self) -> Any:
        return None

    def go_on_from(self, basis: Any) -> None:
        pass

    def prices(self) -> list[float]:
        return self.last_prices

    def limit_column(self, column: int, low: float, high: float) -> None:
        self.columns[column] = low, high

    def limit_row(self, row: int, low: float, high: float) -> None:
        self.rows[row] = low, high


def _by_highs(highspy: Any, model: Model, *, seconds: float | None, turns: int | None, gap: float) -> Answer:
    counter = _Counter(turns)
    options = {"mip_rel_gap": 0.0, "mip_abs_gap": max(gap, 1e-9), "threads": 1, "time_limit": seconds}
    highs = _silent(highspy)
    for name, value in options.items():
        if value is not None:
            highs.setOptionValue(name, value)
    if turns is not None:
        highs.setCallback(counter.asked, None)
        highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    highs.passModel(_matrix(highspy, model, relax=False))
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if _is_infeasible(highspy, status):
        return Answer(None, 0.0, infeasible=True, turns=counter.turns)
    optimal = status == highspy.HighsModelStatus.kOptimal
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    columns, bound = _columns(highs) if found else None, info.mip_dual_bound
    if optimal and columns is not None:
        bound = met(model, columns, bound)
    return Answer(columns, max(bound, 0.0), turns=counter.turns)


def _is_infeasible(highspy: Any, status: Any) -> bool:
    # No column goes beyond 0..1, so nothing is unbounded.
    return status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


def _columns(highs: Any) -> list[float]:
    return list(highs.getSolution().col_value)


def met(model: Model, columns: Sequence[float], bound: float) -> float:
    """Return what an optimum costs in whole columns, if that is its bound but for rounding."""
    exact = sum(cost for cost, value in zip(model.cost, columns, strict=True) if value > 0.5)
    return exact if abs(exact - bound) <= 2 * _TOLERANCE * max(1.0, exact) else bound


def may_beat(bound: float, cutoff: float) -> bool:
    """Say whether what costs no less than a bound may cost less than the cutoff, by more than rounding."""
    return bound + 2 * _TOLERANCE * max(1.0, bound) < cutoff


def _silent(highspy: Any) -> Any:
    """Return a HiGHS that says nothing: from 1.16 on it prints its name on stdout as soon as it is made."""

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


def _by_cbc(pulp: Any, model: Model, *, seconds: float | None, turns: int | None, relax: bool) -> Answer:
    programme, columns = _programme(pulp, model, relax=relax, columns={}, rows={})
    return _run_cbc(pulp, model, programme, columns, seconds=seconds, turns=turns, relax=relax)


def _programme(pulp: Any, model: Model, *, relax: bool, columns: Ranges, rows: Ranges) -> tuple[Any, list[Any]]:
    """Lay a model out as PuLP takes it, the rows that are limited to both sides twice."""
    programme = pulp.LpProblem("stepcut", pulp.LpMinimize)
    found = [
        pulp.LpVariable(f"x{c}", *columns.get(c, (0, 1)), pulp.LpInteger if whole and not relax else pulp.LpContinuous)
        for c, whole in enumerate(model.integer)
    ]
    programme += pulp.LpAffineExpression([(found[c], cost) for c, cost in enumerate(model.cost) if cost])
    sums = [pulp.LpAffineExpression([(found[c], weight) for c, weight in terms]) for terms, _ in model.rows]
    for row, (_, least) in enumerate(model.rows):
        programme += sums[row] >= rows.get(row, (least, None))[0]
    for row, (_, high) in rows.items():
        if math.isfinite(high):
            programme += sums[row] <= high
    return programme, found


def _run_cbc(
    pulp: Any,
    model: Model,
    programme: Any,
    columns: list[Any],
    *,
    seconds: float | None,
    turns: int | None,
    relax: bool,
) -> Answer:
    programme.solve(pulp.PULP_CBC_CMD(mip=not relax, msg=False, timeLimit=seconds, maxNodes=turns))
    if programme.status == pulp.LpStatusInfeasible:
        return Answer(None, 0.0, infeasible=True)
    optimal = programme.sol_status == pulp.LpSolutionOptimal
    found = optimal or (programme.sol_status == pulp.LpSolutionIntegerFeasible and not relax)
    values = [column.varValue or 0.0 for column in columns] if found and programme.variables() else None
    bound = 0.0
    if relax:  # what a relaxation that was stopped has come to bounds nothing
        bound = (pulp.value(programme.objective) or 0.0) * (1 - _TOLERANCE) if optimal else 0.0
    elif optimal and values is not None:
        bound = sum(cost for cost, value in zip(model.cost, values, strict=True) if value > 0.5)
    else:  # CBC keeps its dual bound to itself
        bound = _by_cbc(pulp, model, seconds=seconds, turns=None, relax=True).bound
    return Answer(values, max(bound, 0.0))
