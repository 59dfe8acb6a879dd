"""Memory of the planned step: what is alive at its peak, and a chart over time drawn with characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.table import Table
from rich.text import Text

from planner.common.units import format_bytes, format_percent, format_seconds, in_unit_of
from planner.ir.graph import operator_name
from planner.plans.plan import Plan, StepDetails, Timeline
from planner.report.style import one_line, sizes, table

_ORDER = (
    "parameters", "master weights", "buffers", "inputs", "gradients", "optimizer", "saved activations",
    "autocast weight copies", "forward temporaries", "recomputed values", "gradient temporaries", "outputs",
    "tangents", "workspace", "random state", "library workspace", "communication buffers", "reserve",
)  # fmt: skip
"""Kinds from what stays longest to what stays least; unknown kinds come last."""

_BAR, _LARGEST, _ROWS = 24, 5, 9
"""Length of the bar for the whole peak; how many tensors are named; height of the chart."""

_PARTS, _BEHIND, _BUDGET = " ▁▂▃▄▅▆▇█", "░", "─"


def render(plan: Plan, most: int | None = None) -> Group:
    """Show where the peak is, and what is alive there by kind; with ``most`` the largest kinds alone."""
    at = plan.peak_at
    place = f"{operator_name(at.operation)} in {at.module or 'the model'}" if at.operation else "its end"
    source = f" ({at.source.rpartition('/')[2]})" if at.source else ""
    where = "between forward and backward" if at.phase == "loss" else f"in the {at.phase or 'step'} at {place}{source}"
    title = f"Peak memory, {format_bytes(plan.peak_bytes)}, {where}"
    if most is None:
        return Group(one_line(title, style="bold"), _kinds(plan.anatomy, "peak"), *_lower(plan), *_beyond(plan))
    kinds = sorted(plan.anatomy.items(), key=lambda item: -item[1])
    rest = kinds[most - 1 :]
    if len(rest) > 1:
        kinds = [*kinds[: most - 1], (f"{len(rest)} other kinds", sum(size for _, size in rest))]
    return Group(one_line(title, style="bold"), _kinds(dict(kinds), None))


def render_infeasible(report: dict[str, Any]) -> Group:
    """Show what is resident, which no plan can change, and the peak without recompute."""
    baseline_bytes = report["baseline"]["peak_bytes"]
    return Group(
        Text("Resident before the step", style="bold"),
        _kinds(report["static_bytes"], "resident"),
        Text(f"Without recompute the peak is {format_bytes(baseline_bytes)}"),
    )


def in_order(size_of: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return sizes by kind, from what stays longest to what stays least, without those that are empty."""
    kinds = sorted(size_of, key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER))
    return [(kind, size_of[kind]) for kind in kinds if size_of[kind]]


def _kinds(size_of: Mapping[str, int], total: str | None) -> Table:
    """Show sizes by kind with bars; with a name for the total in order and in bytes, the total last."""
    whole_bytes = sum(size_of.values())
    rows = [*in_order(size_of), (total, whole_bytes)] if total else list(size_of.items())

    def is_total(row: tuple[str | None, int]) -> bool:
        return row[0] == total

    shown = table(
        None,
        rows,
        ("", lambda row: row[0], str),
        ("size", lambda row: row[1], sizes([whole_bytes])),
        ("bytes", lambda row: row[1], "{:,}".format if total else None),
        ("share", lambda row: 1.0 if is_total(row) else row[1] / whole_bytes, format_percent),
        ("", lambda row: "" if is_total(row) else Text("█" * round(_BAR * row[1] / whole_bytes), style="green"), str),
        bold=is_total,
    )
    shown.show_header = total is not None
    shown.columns[0].no_wrap = True  # the bars give way first
    bars = shown.columns[-1]
    bars.justify, bars.no_wrap, bars.overflow = "left", False, "crop"
    return shown


def _lower(plan: Plan) -> Iterator[Text]:
    """Say how much lower the peak is than without a plan, and name the tensors that fill most of it."""
    captured = f"Without recompute it is {format_bytes(plan.baseline_peak_bytes)}"
    own_bytes = plan.baseline_peak_bytes if plan.eager is None else plan.eager.peak_bytes
    beside = captured if plan.eager is None else f"Eager's is {format_bytes(own_bytes)}"
    less = 1 - plan.peak_bytes / own_bytes if own_bytes else 0.0
    beside += f": the plan is {format_percent(less)} lower" if less > 0 else ""
    yield Text(beside if plan.eager is None else f"{beside}. {captured}")
    named = [row for row in plan.details.alive if row.kind][:_LARGEST] if plan.details else []
    if named:
        yield Text("Largest there:")
    widest = max((len(in_unit_of(row.size_bytes, plan.peak_bytes)) for row in named), default=0)
    for row in named:
        each = f"{row.count} x " if row.count > 1 else ""
        source = f" ({row.source.rpartition('/')[2]})" if row.source else ""
        place = f"{operator_name(row.operation)} in {row.module or 'the model'}{source}"
        yield one_line(f"  {in_unit_of(row.size_bytes, plan.peak_bytes):>{widest}}  {each}{place}: {row.kind}")


def _beyond(plan: Plan) -> Iterator[Text]:
    """Say what the optimizer's step holds, and what CUDA's allocator makes of the plan."""
    if plan.optimizer_step_bytes or "optimizer" in plan.static_bytes:
        larger = plan.optimizer_peak_bytes > plan.peak_bytes
        yield Text(
            f"The optimizer's step peaks at {format_bytes(plan.optimizer_peak_bytes)} "
            f"({format_bytes(plan.optimizer_step_bytes)} of it temporaries): "
            + ("above the peak of forward and backward, so it decides" if larger else "below that peak")
        )
    if (reserved := plan.reserved) is not None:
        yield Text(
            f"CUDA's allocator would report {format_bytes(reserved.allocated_bytes)} allocated and "
            f"{format_bytes(reserved.reserved_bytes)} reserved"
        )


def render_timeline(plan: Plan, rows: int = _ROWS) -> Chart | None:
    """Show what the device holds over the step, with the plan and without."""
    return Chart(plan, plan.details, rows) if plan.details and plan.details.after.points else None


class Chart:
    """A chart as wide as the console: the plan in full blocks, the step without recompute behind."""

    def __init__(self, plan: Plan, details: StepDetails, rows: int) -> None:
        self._rows = rows
        self._before, self._after = details.before, details.after
        self._end_seconds = max(details.before.step_seconds, details.after.step_seconds)
        self._top_bytes = max(details.before.peak_bytes, details.after.peak_bytes, 1)
        is_within = plan.budget_bytes < self._top_bytes
        self._budget_row = int(rows * plan.budget_bytes / self._top_bytes) if is_within else None
        self._labels = {rows - 1: in_unit_of(self._top_bytes, self._top_bytes, digits=1)}
        if self._budget_row is not None:
            self._labels.setdefault(self._budget_row, in_unit_of(plan.budget_bytes, self._top_bytes, digits=1))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        margin = max(map(len, self._labels.values()))
        columns = options.max_width - margin - 2
        budget = "  ─ budget" if self._budget_row is not None else ""
        legend = Text(f": █ this plan  ░ without recompute{budget}", style="not bold")
        yield Text("Memory over the step", style="bold") + legend
        if columns < 20:
            yield Text("(too narrow to draw)")
            return
        before, after = (_heights(line, columns, self._end_seconds or 1.0) for line in (self._before, self._after))
        scale = self._rows / self._top_bytes
        for row in reversed(range(self._rows)):
            line = Text(f"{self._labels.get(row, ''):>{margin}} │")
            for ahead, behind in zip(after, before, strict=True):
                line.append(*_cell(row, scale * ahead, scale * behind, row == self._budget_row))
            yield line
        yield Text(f"{'0':>{margin}} └{'─' * columns}")
        yield Text(" " * (margin + 2) + self._axis(columns))

    def _axis(self, columns: int) -> str:
        turn = int(columns * self._after.backward_seconds / (self._end_seconds or 1.0))
        end = format_seconds(self._end_seconds)
        axis = "forward".ljust(turn)[:turn] if turn > 8 else " " * turn
        rest = columns - turn
        middle = "backward" if rest > len(end) + 11 else ""
        return axis + f"{'│' + middle:<{max(rest - len(end), 0)}}{end}"


def _heights(line: Timeline, columns: int, end_seconds: float) -> Sequence[int]:
    """Return the highest moment within each column; nothing after the end of the step."""
    heights = [0] * columns
    ends = [*(point.seconds for point in line.points[1:]), line.step_seconds]
    for point, end in zip(line.points, ends, strict=True):
        first, last = (min(int(columns * at / end_seconds), columns - 1) for at in (point.seconds, end))
        for column in range(first, last + 1):
            heights[column] = max(heights[column], point.size_bytes)
    return heights


def _cell(row: int, ahead: float, behind: float, is_budget: bool) -> tuple[str, str]:
    """Return the character of a cell and its style; heights count in rows."""
    eighths = min(max(round(8 * (ahead - row)), 0), 8)
    if eighths:
        return _PARTS[eighths], "green"
    if is_budget:
        return _BUDGET, "red"
    return (_BEHIND, "dim") if behind - row >= 0.5 else (" ", "")
