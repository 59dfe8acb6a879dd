"""Explain for each value of a module why a plan saves, recomputes or offloads it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from planner.common.json_reader import attributes
from planner.common.registry import did_you_mean
from planner.common.units import format_bytes, format_seconds
from planner.errors import UsageError
from planner.ir.layers import is_within, layer_among, path_prefixes
from planner.plans.plan import SCHEMA, Plan
from planner.plans.values import ValueRow, ValueTable

_SAME = 1e-6
"""Prices that differ by less are one price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedValue:
    """A value, what the plan does with it, and why."""

    value: ValueRow
    block: str
    """Path of the block that makes it, ``""`` if none does."""
    reason: str
    """Begins with ``"kept"``, ``"recomputed"`` or ``"offloaded"``."""
    made_from: tuple[ValueRow, ...]
    """What its operation reads, as far as the plan keeps or recomputes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan's decisions on the values of a module (``""``: the whole model), in the order of computation."""

    plan: Plan
    table: ValueTable
    module: str
    values: tuple[ExplainedValue, ...]

    @property
    def kept_bytes(self) -> int:
        """Bytes saved for the backward."""
        return sum(v.value.size_bytes for v in self.values if v.value.kept)

    @property
    def freed_bytes(self) -> int:
        """Bytes that the backward needs and the plan recomputes."""
        return sum(v.value.size_bytes for v in self.values if v.value.dropped)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes offloaded to the host."""
        return sum(v.value.size_bytes for v in self.values if v.value.offloaded)

    @property
    def added_runs(self) -> int:
        """Runs that the plan adds to operations of the module."""
        return sum({v.value.operation: v.value.runs - 1 for v in self.values}.values())

    @property
    def added_seconds(self) -> float:
        """Time of these runs."""
        by_operation = {v.value.operation: (v.value.runs - 1) * v.value.seconds for v in self.values}
        return sum(by_operation.values())

    def report(self) -> dict[str, Any]:
        """Return the explanation as JSON has it."""
        return {
            "schema": SCHEMA,
            "model": self.plan.model,
            "module": self.module,
            **attributes(self.plan, "budget_bytes", "peak_bytes", "baseline_peak_bytes"),
            **attributes(self.table, "steps", "baseline_peak_step", "peak_step"),
            **attributes(self, "kept_bytes", "freed_bytes", "offloaded_bytes", "added_runs", "added_seconds"),
            "values": [
                {
                    **attributes(explained.value, "module", "target"),
                    **asdict(explained.value),
                    "made_from": [source.operation for source in explained.made_from],
                    "reason": explained.reason,
                }
                for explained in self.values
            ],
        }


def explain(plan: Plan, module: str | None = None) -> Explanation:
    """Say why a plan keeps or recomputes each value of a module.

    Parameters
    ----------
    plan : Plan
    module : str, optional
        Path of a module, ``"transformer.h.0"`` for example; with what is inside it. By default the whole model.

    Returns
    -------
    Explanation

    Raises
    ------
    UsageError
        If the plan has no table of its values, or names no such module.

    Notes
    -----
    Prices are for this plan: what changing one value would cost, with all others as they are.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> plan = planner.plan(model, torch.randn(256, 64), budget="100%")
    >>> planner.explain(plan, "3").values[0].reason
    'kept: the step fits without recompute'
    """
    table = table_of(plan)
    if module is not None:
        paths = {row.module for row in table.rows} | {layer.module for layer in plan.placement}
        known = {prefix for path in paths for prefix in path_prefixes(path)}
        if module not in known:
            name = plan.model or "this model"
            hint = did_you_mean(module, sorted(known)).rstrip() or "leave the module out to see the largest values"
            raise UsageError(f"the plan for {name} keeps and recomputes nothing of {module!r}; {hint}")
    reasons = _Reasons(plan, table)
    blocks = {layer.module for layer in plan.placement if layer.block}
    return Explanation(
        plan=plan,
        table=table,
        module=module or "",
        values=tuple(
            ExplainedValue(
                value=row,
                block=layer_among(row.module, blocks),
                reason=reasons.of(number),
                made_from=tuple(table.rows[source] for source in row.made_from),
            )
            for number, row in enumerate(table.rows)
            if module is None or is_within(row.module, module)
        ),
    )


def table_of(plan: Plan) -> ValueTable:
    """Return the table of a plan's values, or raise UsageError with what to do if it has none."""
    if plan.values is not None:
        return plan.values
    if plan.runtime == "modules":
        raise UsageError(
            "the plan is for the runtime 'modules', which recomputes whole modules: its report says which, and "
            "what they keep; it does not choose single values. Plan with --runtime graph if the model can be captured"
        )
    raise UsageError(
        "the plan has no table of its values: it was made without comparisons (compare=False, or by auto_wrap), or "
        "by an older version; make a new one with 'plan MODEL --budget SIZE --save PLAN'"
    )


class _Reasons:
    """Writes the reason for a plan's decision on a value."""

    def __init__(self, plan: Plan, table: ValueTable) -> None:
        self.plan, self.rows = plan, table.rows
        self.read_again = {source for row in table.rows if row.runs > 1 for source in row.made_from}
        """Rows that something is made from again."""
        self.freed: Counter[str] = Counter()
        """For each operation that runs again, the bytes of its results that are not kept."""
        self.largest: dict[str, ValueRow] = {}
        """For each of these operations, the largest of these results."""
        dropped = [row for row in table.rows if row.dropped]
        for row in dropped:
            self.freed[row.operation] += row.size_bytes
            largest = self.largest.get(row.operation, row)
            self.largest[row.operation] = max(largest, row, key=lambda one: one.size_bytes)
        prices = (self.freed[row.operation] / row.again_seconds for row in dropped if row.again_seconds)
        self.lowest_price = min(prices, default=None)
        """Bytes that the worst bargain of the plan frees, for a second."""

    def of(self, number: int) -> str:
        row = self.rows[number]
        if row.offloaded:
            return f"offloaded: {self._offloaded(row)}"
        return f"kept: {self._kept(number, row)}" if row.kept else f"recomputed: {self._recomputed(row)}"

    def _offloaded(self, row: ValueRow) -> str:
        assert self.plan.offloading is not None
        transfer = format_seconds(row.size_bytes / self.plan.offloading.bytes_per_second)
        away = f"frees {format_bytes(row.size_bytes)}, {transfer} for the transfer there and as long back"
        if row.again_seconds is None:
            return f"{away}; it cannot be recomputed"
        return f"{away}; recomputing it would take {format_seconds(row.again_seconds)}"

    def _kept(self, number: int, row: ValueRow) -> str:
        if row.retained:
            return "the model returns it, so every plan keeps it to the end"
        if not row.repeatable:
            return (
                "its operation cannot be recomputed (it overwrites something, reads what is overwritten later, or "
                "communicates with other devices)"
            )
        if not row.needed:
            return "the backward does not read it, but recomputed operations do"
        if not self.plan.recomputations and not (self.plan.offloading and self.plan.offloading.values):
            return "the step fits without recompute"
        if row.busiest_bytes == 0:
            return "needed again at once"
        source = "; recomputed operations read it too" if number in self.read_again else ""
        if row.excess_bytes == 0:
            return f"it is idle only while the step fits without recompute, so dropping it would not help{source}"
        if row.again_seconds is None:
            return "its inputs are gone by then and cannot be recomputed"
        return self._price_of_dropping(row, row.again_seconds) + source

    def _price_of_dropping(self, row: ValueRow, seconds: float) -> str:
        cost = f"dropping it would free {format_bytes(row.size_bytes)} for {format_seconds(seconds)}"
        runs = f", {row.again_runs} operations recomputed" if row.again_runs > 1 else ""
        price = f" ({per_ms(row.size_bytes / seconds)}{runs})" if seconds > 0 else ""
        if self.lowest_price is None or seconds <= 0 or row.size_bytes / seconds > self.lowest_price * (1 + _SAME):
            return f"{cost}{price}, and the plan fits without that"
        if row.size_bytes / seconds >= self.lowest_price * (1 - _SAME):
            return (
                f"{cost}{price}, as much per byte as the most expensive value that the plan recomputes; the plan fits "
                "without this one"
            )
        return f"{cost}{price}; what the plan recomputes frees {per_ms(self.lowest_price)} or more"

    def _recomputed(self, row: ValueRow) -> str:
        if not row.needed:
            return "the backward does not read it, but recomputed operations do"
        if self.largest[row.operation] is not row:
            return f"its operation is recomputed for a larger result; this one frees {format_bytes(row.size_bytes)}"
        kept_bytes = row.busiest_bytes + row.size_bytes
        if kept_bytes > self.plan.budget_bytes:
            over = format_bytes(kept_bytes - self.plan.budget_bytes)
            return f"{self._frees(row)}. If kept, the step would exceed the budget by {over}"
        return f"{self._frees(row)}. This value alone could be kept within the budget"

    def _frees(self, row: ValueRow) -> str:
        seconds, size_bytes = row.again_seconds or 0.0, self.freed[row.operation]
        runs = f", {row.again_runs} runs" if row.again_runs > 1 else ""
        price = f" ({per_ms(size_bytes / seconds)}{runs})" if seconds > 0 else ""
        together = " with the operation's other results" if size_bytes > row.size_bytes else ""
        return f"frees {format_bytes(size_bytes)}{together} for {format_seconds(seconds)}{price}"


def per_ms(bytes_per_second: float) -> str:
    """Return a price as bytes for a millisecond."""
    return f"{format_bytes(bytes_per_second / 1000)} per ms"
