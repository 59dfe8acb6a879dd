"""Print why each value of a module is saved, recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from planner.analysis.explain import ExplainedValue, Explanation, per_ms
from planner.common.units import format_bytes, format_seconds
from planner.ir.layers import is_within
from planner.report.layers import alike, result_name
from planner.report.style import counted, print_parts, print_report


def render(explanation: Explanation, console: Console, *, largest: int | None = None) -> None:
    """Print an explanation; with ``largest`` only so many of the values, those with the most bytes."""
    plan, table = explanation.plan, explanation.table
    print_report(console, answer(explanation))
    peaks = (
        f"Of {table.steps} steps, the peak without recompute is step {table.baseline_peak_step + 1} "
        f"({format_bytes(plan.baseline_peak_bytes)}), the plan's step {table.peak_step + 1} "
        f"({format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)})"
    )
    console.print(Text(peaks))
    shown = groups = list(
        alike(
            explanation.values,
            lambda v: (v.value.operation, v.value.output, v.block),
            lambda v: (v.value.size_bytes, v.reason, v.value.spans_baseline_peak, v.value.spans_peak),
        )
    )
    if largest is not None:
        shown = sorted(groups, key=lambda group: -sum(v.value.size_bytes for v in group[1]))[:largest]
    print_parts(console, *(_paragraph(label, members) for label, members in shown))
    if len(shown) < len(groups):
        left = Text(f"{len(groups) - len(shown)} smaller values are not shown: name a module, or pass --all")
        print_parts(console, left)


def answer(explanation: Explanation) -> str:
    """Return the answer as one line."""
    name = explanation.module or explanation.plan.model or "the model"
    if not explanation.values:
        return f"{name} saves nothing for the backward"
    parts = [f"{name} keeps {format_bytes(explanation.kept_bytes)}"]
    if explanation.added_runs:
        price = ""
        if explanation.freed_bytes and explanation.added_seconds > 0:
            price = f", {per_ms(explanation.freed_bytes / explanation.added_seconds)}"
        runs = counted(explanation.added_runs, "run")
        parts.append(
            f"recomputes {format_bytes(explanation.freed_bytes)} in {runs} of "
            f"{format_seconds(explanation.added_seconds)}{price}"
        )
    else:
        parts.append("recomputes nothing")
    if explanation.offloaded_bytes:
        parts.insert(1, f"offloads {format_bytes(explanation.offloaded_bytes)}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _paragraph(label: str, members: Sequence[ExplainedValue]) -> Group:
    first = members[0]
    each = f" each, {format_bytes(sum(v.value.size_bytes for v in members))} together" if len(members) > 1 else ""
    state, _, why = first.reason.partition(": ")
    style = "green" if first.value.kept else "yellow"
    lines: list[Text | Padding] = [
        Text(f"{label}, {format_bytes(first.value.size_bytes)}{each}", style="bold"),
        Padding(Text.assemble((state, style), f": {why}"), (0, 0, 0, 4)),
    ]
    if len(members) == 1:
        lines.append(Padding(Text(_where(first)), (0, 0, 0, 4)))
    return Group(*lines)


def _where(explained: ExplainedValue) -> str:
    row = explained.value
    at = {
        (True, True): "at both peaks",
        (True, False): "at the peak without recompute, not at the plan's",
        (False, True): "at the plan's peak",
        (False, False): "at neither peak",
    }[row.spans_baseline_peak, row.spans_peak]
    line = f"idle from step {row.idle_from + 1} to step {row.idle_to + 1}, {at}"
    sources = [
        f"{_inside(source.module, explained.block)}{result_name(source.operation, source.output)} "
        f"({'offloaded' if source.offloaded else 'kept' if source.kept else 'recomputed'})"
        for source in explained.made_from
    ]
    return f"{line}; made from {', '.join(sources)}" if sources else line


def _inside(module: str, block: str) -> str:
    """Shorten the path of a module by the block that is spoken of."""
    if block and is_within(module, block):
        module = module[len(block) + 1 :]
    return f"{module} " if module else ""
