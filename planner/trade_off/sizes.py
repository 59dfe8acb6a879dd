"""How large a batch, or how long a sequence, fits a budget, and which size trains most a second.

Every row is a capture of its own. What a step needs is close to affine in its size, so two captures say where the
largest that fits about is, and a few more around that place decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner.effort import Effort
from planner.problem import Progress
from planner.study_types import Study
from planner.trade_off.outcome import Outcome, ask
from planner.trade_off.ranges import SizeRange

_GUESSES = 2
"""So many looks for the boundary go by a line, the others halve what is left: solvers go beyond the line at times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """What one size costs.

    Parameters
    ----------
    size : int
    outcome : Outcome
    per_second : float or None
        Samples, or tokens, that the planned step trains a second; None where nothing fits.
    """

    size: int
    outcome: Outcome
    per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class SizeAxis:
    """Sizes at one budget.

    Parameters
    ----------
    name : str
        ``"batch size"`` or ``"sequence length"``.
    unit : str
        What ``per_second`` counts: ``"samples"`` or ``"tokens"``.
    budget_bytes : int
    rows : tuple of SizeRow
        Those that were captured, in rising order.
    is_complete : bool
        Whether the largest size is the largest of all that were asked about.
    """

    name: str
    unit: str
    budget_bytes: int
    rows: tuple[SizeRow, ...]
    is_complete: bool = True

    @property
    def largest(self) -> SizeRow | None:
        """The largest size that fits."""
        return max((row for row in self.rows if row.outcome.fits), key=lambda row: row.size, default=None)

    @property
    def best(self) -> SizeRow | None:
        """The size that trains most a second; the smallest of those that do."""
        return max(
            (row for row in self.rows if row.per_second is not None),
            key=lambda row: (row.per_second or 0.0, -row.size),
            default=None,
        )

    def report(self) -> dict[str, Any]:
        """Give the axis as plain data for JSON."""
        largest, best = self.largest, self.best
        return {
            "budget_bytes": self.budget_bytes,
            "unit": self.unit,
            "rows": [
                {"size": row.size, **asdict(row.outcome), f"{self.unit}_per_second": row.per_second}
                for row in self.rows
            ],
            "largest": largest.size if largest else None,
            "best": best.size if best else None,
            "is_complete": self.is_complete,
        }


class SizeSearch:
    """An axis in the making; what is done can be asked for at any time.

    Parameters
    ----------
    sizes : SizeRange
        Its values are looked at until one does not fit. If it is dense, the largest that fits is then found among
        the sizes between.
    study_at : callable
        Captures the step at a size.
    budget_bytes : int
    name : str
        ``"batch size"`` or ``"sequence length"``.
    unit : str
        What a step trains: ``"samples"`` or ``"tokens"``.
    units_of_one : int
        How many of these a step of size 1 trains.
    step : int
        How exactly the largest size is found.
    solver, effort
        For each size.

    Notes
    -----
    If a size does not fit, no larger one is expected to.
    """

    def __init__(
        self,
        sizes: SizeRange,
        study_at: Callable[[int], Study],
        *,
        budget_bytes: int,
        name: str,
        unit: str,
        units_of_one: int = 1,
        step: int = 1,
        solver: str = "auto",
        effort: Effort | None = None,
    ) -> None:
        self.sizes = sizes
        self.study_at = study_at
        self.axis_so_far = SizeAxis(name=name, unit=unit, budget_bytes=budget_bytes, rows=(), is_complete=False)
        self.units_of_one = units_of_one
        self.step = step
        self.solver = solver
        self.effort = effort or Effort()

    def run(self, *, progress: Progress | None = None) -> None:
        """Look at sizes until the largest that fits is known."""
        lower = None
        for size in self.sizes.values:
            if not self._look(size, progress).fits:
                if lower is not None and self.sizes.is_dense:
                    self._close_in(lower, size, progress)
                break
            lower = size
        self.axis_so_far = replace(self.axis_so_far, is_complete=True)

    def _close_in(self, lower: int, upper: int, progress: Progress | None) -> None:
        """Find the largest size that fits between one that does and one that does not."""
        looks = 0
        while (places := (upper - 1) // self.step - lower // self.step) > 0:
            looks += 1
            middle = lower // self.step + (places + 1) // 2
            guess = self._guess() if looks <= _GUESSES else None
            place = middle if guess is None else guess // self.step
            size = min(max(place, lower // self.step + 1), (upper - 1) // self.step) * self.step
            if self._look(size, progress).fits:
                lower = size
            else:
                upper = size

    def _guess(self) -> int | None:
        """Say where a line through the smallest budgets of the two sizes around the boundary meets the budget."""
        rows, budget_bytes = self.axis_so_far.rows, self.axis_so_far.budget_bytes
        above = next(place for place, row in enumerate(rows) if not row.outcome.fits)
        low, high = rows[above - 1], rows[above]
        low_bytes, high_bytes = low.outcome.minimum_feasible_peak_bytes, high.outcome.minimum_feasible_peak_bytes
        if high_bytes <= low_bytes:
            return None
        return low.size + int((high.size - low.size) * (budget_bytes - low_bytes) / (high_bytes - low_bytes))

    def _look(self, size: int, progress: Progress | None) -> Outcome:
        axis = self.axis_so_far

        def tell(line: str) -> None:
            if progress is not None:
                progress(f"{axis.name} {size}: {line}")

        tell("capturing forward and backward")
        study = self.study_at(size)
        outcome = ask(study, axis.budget_bytes, solver=self.solver, effort=self.effort, progress=tell)
        per_second = size * self.units_of_one / outcome.step_seconds if outcome.step_seconds else None
        rows = sorted(
            [*axis.rows, SizeRow(size=size, outcome=outcome, per_second=per_second)], key=lambda row: row.size
        )
        self.axis_so_far = replace(axis, rows=tuple(rows))
        return outcome
