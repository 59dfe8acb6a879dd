"""What is alive at the peak, and where the peak is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.common.units import format_bytes, format_percent, in_unit_of
from planner.ir.graph import operator_name
from planner.plans.plan import Plan
from planner.report.style import sizes, table

_ORDER = (
    "parameters", "master weights", "buffers", "inputs", "gradients", "optimizer", "saved activations",
    "autocast weight copies", "forward temporaries", "recomputed values", "gradient temporaries", "outputs",
    "tangents", "workspace", "random state", "library workspace", "communication buffers", "reserve",
)  # fmt: skip
"""Kinds from what stays longest to what stays least; unknown kinds come last."""

_BAR = 24
"""Length of the bar that stands for the whole."""

_LARGEST = 5
"""So many kinds of tensors are named; the page shows more."""


def render(plan: Plan) -> Group:
    """Show what the peak is made of."""
    at = plan.peak_at
    place = f"{at.phase}: {at}" if at.phase else str(at)
    captured = f"Without recompute it is {format_bytes(plan.baseline_peak_bytes)}"
    today = f"Eager's is {format_bytes(plan.eager.peak_bytes)}" if plan.eager is not None else captured
    own_bytes = plan.eager.peak_bytes if plan.eager is not None else plan.baseline_peak_bytes
    less = 1 - plan.peak_bytes / own_bytes if own_bytes else 0.0
    saving = f": the plan is {format_percent(less)} lower" if less > 0 else ""
    beside = f". {captured}" if plan.eager is not None else ""
    return Group(
        _sizes(plan.anatomy, f"Peak memory, {format_bytes(plan.peak_bytes)}", "peak"),
        Text(f"The peak is in the {place}. {today}{saving}{beside}"),
        *_beyond(plan),
        *_largest(plan),
    )


def _largest(plan: Plan) -> Iterator[Text]:
    """Name the tensors that fill most of the peak, those of equal layers together."""
    named = [row for row in plan.details.alive if row.kind][:_LARGEST] if plan.details else []
    if not named:
        return
    yield Text("Largest there:")
    widest = max(len(in_unit_of(row.size_bytes, plan.peak_bytes)) for row in named)
    for row in named:
        each = f"{row.count} x " if row.count > 1 else ""
        made = f"{operator_name(row.operation)} in {row.module or 'the model'}"
        source = f" ({row.source.rpartition('/')[2]})" if row.source else ""
        size = in_unit_of(row.size_bytes, plan.peak_bytes)
        line = f"  {size:>{widest}}  {each}{made}{source}: {row.kind}"
        yield Text(line, no_wrap=True, overflow="ellipsis")


def _beyond(plan: Plan) -> Iterator[Text]:
    """Say what the optimizer's step holds, and what CUDA's allocator or an arena makes of the plan."""
    if plan.optimizer_step_bytes or "optimizer" in plan.static_bytes:
        larger = plan.optimizer_peak_bytes > plan.peak_bytes
        yield Text(
            f"The optimizer's step peaks at {format_bytes(plan.optimizer_peak_bytes)} "
            f"({format_bytes(plan.optimizer_step_bytes)} of it temporaries): "
            + ("above the peak of forward and backward, so it decides" if larger else "below that peak")
        )
    if plan.reserved is not None:
        yield Text(
            f"CUDA's allocator would report {format_bytes(plan.reserved.allocated_bytes)} allocated and "
            f"{format_bytes(plan.reserved.reserved_bytes)} reserved"
        )
        if plan.reserved.graph_pool_bytes:
            yield Text(f"CUDA graphs hold {format_bytes(plan.reserved.graph_pool_bytes)} of both between steps")
    if plan.arena is not None:
        share = plan.arena.size_bytes / max(plan.arena.step_peak_bytes, 1)
        is_least = ", and no arena can be smaller" if plan.arena.size_bytes == plan.arena.lower_bound_bytes else ""
        yield Text(
            f"One arena of {format_bytes(plan.arena.size_bytes)} has places for all {plan.arena.tensors} tensors of "
            f"the step: {share:.3f} of what it allocates at its peak{is_least}"
        )


def render_infeasible(report: dict[str, Any]) -> Group:
    """Show what is resident, which no plan can change, and the unplanned peak."""
    baseline_bytes = report["baseline"]["peak_bytes"]
    return Group(
        _sizes(report["static_bytes"], "Resident before the step", "resident"),
        Text(f"Without recompute the peak is {format_bytes(baseline_bytes)}"),
    )


def in_order(size_of: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return sizes by kind, from what stays longest to what stays least, without those that are empty."""
    kinds = sorted(size_of, key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER))
    return [(kind, size_of[kind]) for kind in kinds if size_of[kind]]


def bar(size_bytes: int, whole_bytes: int) -> Text:
    """Return a bar as long as a share of the whole."""
    return Text("█" * round(_BAR * size_bytes / whole_bytes), style="green")


def _sizes(size_of: dict[str, int], title: str, total: str) -> Table:
    whole_bytes = sum(size_of.values())
    rows = [*in_order(size_of), (total, whole_bytes)]

    def is_total(row: tuple[str, int]) -> bool:
        return row is rows[-1]

    shown = table(
        title,
        rows,
        ("", lambda row: row[0], str),
        ("size", lambda row: row[1], sizes([whole_bytes])),
        ("bytes", lambda row: row[1], "{:,}".format),
        ("share", lambda row: 1.0 if is_total(row) else row[1] / whole_bytes, format_percent),
        ("", lambda row: "" if is_total(row) else bar(row[1], whole_bytes), str),
        bold=is_total,
    )
    shown.columns[0].no_wrap = True  # the bars give way first
    bars = shown.columns[-1]
    bars.justify, bars.no_wrap, bars.overflow = "left", False, "crop"
    return shown
