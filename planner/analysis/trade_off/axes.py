"""Other axes of a what-if at one budget: batch sizes, sequence lengths and devices.

What a step needs is close to affine in its size, so two sizes say where the largest that fits about is, and a few more
around that place decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from planner.analysis.study import Study
from planner.analysis.trade_off.ranges import SizeRange
from planner.common.json_reader import attributes
from planner.common.options import Budget, Offload, Search
from planner.plans.device_file import find
from planner.plans.ordering import smallest_budget
from planner.plans.plan import NoPlanFitsError


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """What one size costs, and how many samples, or tokens, the planned step trains a second: None where none fits."""

    size: int
    outcome: Outcome
    per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class SizeAxis:
    """Sizes at one budget: those that were planned, in rising order.

    ``name`` is ``"batch size"`` or ``"sequence length"``, and ``unit`` what ``per_second`` counts, ``"samples"`` or
    ``"tokens"``.
    """

    name: str
    unit: str
    budget_bytes: int
    rows: tuple[SizeRow, ...] = ()

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
        """Return the axis as plain data for JSON."""
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
        }


@dataclass(kw_only=True)
class SizeSearch:
    """A search along one axis.

    Sizes are looked at until one does not fit: no larger one is expected to. If they are dense, the largest that fits
    is then found among those between, to within ``step``. ``study_at`` captures the step at a size, and one of size 1
    trains ``units_of_one`` samples or tokens.
    """

    sizes: SizeRange
    study_at: Callable[[int], Study]
    axis: SizeAxis
    search: Search
    offload: Offload = field(default_factory=lambda: Offload(False))
    units_of_one: int = 1
    step: int = 1

    @classmethod
    def along(
        cls, option: str, sizes: SizeRange, budget_bytes: int, search: Search, *, samples: int, **more: Any
    ) -> SizeSearch:
        """Return a search along ``"batch_size"`` or ``"seq_len"``, with a share of the time that a curve has.

        Lengths are those of a batch of so many samples, and single tokens do not count.
        """
        if option == "batch_size":
            axis = SizeAxis(name="batch size", unit="samples", budget_bytes=budget_bytes)
        else:
            axis = SizeAxis(name="sequence length", unit="tokens", budget_bytes=budget_bytes)
            more |= {"units_of_one": samples, "step": sizes.coarse_step}
        return cls(sizes=sizes, axis=axis, search=for_one_row(search), **more)

    def run(self) -> SizeAxis:
        """Try sizes until the largest that fits is known."""
        lower = None
        for size in self.sizes.values:
            if not self._look(size).fits:
                if lower is not None and self.sizes.is_dense:
                    self._close_in(lower, size)
                break
            lower = size
        return self.axis

    def _close_in(self, lower: int, upper: int) -> None:
        """Find the largest size that fits between one that does and one that does not."""
        # Where a line puts it; beyond that in growing strides where one end moved twice, since solvers often go
        # beyond the line; and by halving where a stride went too far.
        before, stride, halve = None, 1, False
        while places := range(lower // self.step + 1, (upper - 1) // self.step + 1):
            place = self._guess(lower, upper) // self.step
            if stride > 1:
                place = max(place, places[0] + stride - 1) if before else min(place, places[-1] - stride + 1)
            place = places[len(places) // 2] if halve else min(max(place, places[0]), places[-1])
            fits = self._look(place * self.step).fits
            lower, upper = (place * self.step, upper) if fits else (lower, place * self.step)
            halve = fits is not before and stride > 2
            stride *= 2 if fits is before else 1
            before = fits

    def _guess(self, lower: int, upper: int) -> int:
        """Interpolate the largest size from the smallest budgets of two sizes."""
        needs = {row.size: row.outcome.minimum_feasible_peak_bytes for row in self.axis.rows}
        rise_bytes = needs[upper] - needs[lower]
        if rise_bytes <= 0:
            return (lower + upper) // 2
        return lower + int((upper - lower) * (self.axis.budget_bytes - needs[lower]) / rise_bytes)

    def _look(self, size: int) -> Outcome:
        axis = self.axis
        search = self.search.under(f"{axis.name} {size}")
        search.tell("capturing forward and backward")
        outcome = ask(self.study_at(size), axis.budget_bytes, search, self.offload)
        per_second = size * self.units_of_one / outcome.step_seconds if outcome.step_seconds else None
        row = SizeRow(size=size, outcome=outcome, per_second=per_second)
        self.axis = replace(axis, rows=tuple(sorted((*axis.rows, row), key=lambda row: row.size)))
        return outcome


ENOUGH = 5e-4
"""How near to its bound a plan need come, as a share of the step: half of what the last digit in a table stands for."""

_ROW_SHARE = 0.2
"""What each size and each device may take of the time limit for the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan in numbers, or that there is none: its status is then ``"infeasible"``.

    In both cases the smallest budget for which a plan is known is there; ``step_seconds`` is of the planned step.
    """

    status: str
    minimum_feasible_peak_bytes: int
    predicted_peak_bytes: int | None = None
    overhead: float | None = None
    lower_bound_overhead: float | None = None
    step_seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.predicted_peak_bytes is not None


def for_one_row(search: Search) -> Search:
    """Return the search options for one size or device, a share of the curve's."""
    return replace(search, time_limit_seconds=_ROW_SHARE * search.time_limit_seconds, enough=ENOUGH)


def ask(study: Study, budget_bytes: int, search: Search, offload: Offload) -> Outcome:
    """Plan a step for a budget, without comparisons, and return the figures."""
    try:
        plan = study.plan(budget_bytes, search=replace(search, compare=False), offload=offload)
    except NoPlanFitsError as error:
        return Outcome(status="infeasible", minimum_feasible_peak_bytes=error.minimum_feasible_peak_bytes)
    problem = study.posed(Budget(plan.budget_bytes), study.host_for(offload, search))
    smallest_bytes = smallest_budget(problem, plan.schedule_for(study.graph), search, study.static_memory)
    return Outcome(
        status=plan.status,
        minimum_feasible_peak_bytes=smallest_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        overhead=plan.overhead,
        lower_bound_overhead=plan.lower_bound_overhead,
        step_seconds=plan.step_seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One device: its memory is the budget, the baseline what the step needs there without recompute."""

    device: str
    memory_bytes: int
    baseline_peak_bytes: int
    outcome: Outcome

    def report(self) -> dict[str, Any]:
        """Return the row as plain data for JSON."""
        return {**attributes(self, "device", "memory_bytes", "baseline_peak_bytes"), **asdict(self.outcome)}


def on_devices(
    names: Sequence[str], study_on: Callable[[str], Study], search: Search, offload: Offload
) -> tuple[DeviceRow, ...]:
    """Plan for devices by name or file, on each of which ``study_on`` captures the step."""
    rows = []
    for name, spec in {name: find(name) for name in names}.items():
        each = search.under(name)
        each.tell("capturing forward and backward")
        study = study_on(name)
        rows.append(
            DeviceRow(
                device=spec.name,
                memory_bytes=spec.memory_bytes,
                baseline_peak_bytes=study.problem().budget_bytes + study.graph.total_static_bytes,
                outcome=ask(study, spec.memory_bytes, each, offload),
            )
        )
    return tuple(rows)
