"""The plan of a pipeline: a verdict that names the stage that binds, and a table of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from planner.common.units import format_bytes, format_seconds
from planner.extras.pipelines.plan import PipelinePlan
from planner.report.style import at_least_percent, print_report, signed_percent, sizes, table
from planner.report.verdict import fits, recomputed


def render(plan: PipelinePlan, console: Console) -> None:
    """Print the report of a pipeline's plan."""
    size = sizes(stage.baseline_peak_bytes for stage in plan.stages)
    shown = table(
        f"Stages of the {plan.schedule.name} schedule, {plan.schedule.micro_batches} micro-batches",
        [(stage, chunk) for stage in plan.stages for chunk in range(len(stage.plans))],
        ("stage", lambda row: "" if row[1] else row[0].index, str),
        ("layers", lambda row: _ends(row[0].layers[row[1]]), str),
        ("in flight", lambda row: "" if row[1] else row[0].micro_batches_in_flight, str),
        ("saved each", lambda row: row[0].saved_bytes[row[1]], size),
        ("peak", lambda row: row[0].plans[row[1]].whole_step_peak_bytes, size),
        ("keeping all", lambda row: row[0].plans[row[1]].baseline_peak_bytes, size),
        ("recompute", lambda row: row[0].plans[row[1]].overhead, signed_percent),
        text_columns=2,
        bold=lambda row: row[0].index == plan.binding_stage,
    )
    print_report(console, _verdict(plan), shown, _explained(plan), style="bold green")
    warnings = {warning for stage in plan.stages for part in stage.plans for warning in part.warnings}
    for warning in sorted(warnings, key=lambda warning: (warning.rule, warning.cause)):
        console.print(Text.assemble((f"warning [{warning.rule}] ", "yellow"), f"{warning.cause}; {warning.fix}"))


def render_infeasible(report: dict[str, Any], console: Console) -> None:
    """Print that some stage has no plan, from the report that the error carries."""
    smallest_bytes = report["minimum_feasible_peak_bytes"]
    line = (
        f"DOES NOT FIT {format_bytes(report['budget_bytes'])} · smallest budget known to be feasible "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes) · bound by stage {report['binding_stage']} of "
        f"{report['pipeline']['stages']}"
    )
    print_report(console, line, style="bold red")


def _verdict(plan: PipelinePlan) -> str:
    cost = f"{signed_percent(plan.overhead)} step time"
    if plan.overhead > 0:
        cost += f" (no plan below {at_least_percent(plan.lower_bound_overhead)})"
    binding = plan.stages[plan.binding_stage]
    count = binding.micro_batches_in_flight
    one, several = ("micro-batch", "micro-batches") if plan.schedule.chunks == 1 else ("chunk", "chunks")
    parts = [part for stage in plan.stages for part in stage.plans]
    return (
        f"{fits(plan.peak_bytes, plan.budget_bytes)} · {cost} · stage {binding.index} of {plan.schedule.stages} binds, "
        f"{count} {one if count == 1 else several} in flight · {recomputed(parts)}"
    )


def _ends(layers: Sequence[str]) -> str:
    return _short(layers[0]) if len(layers) == 1 else f"{_short(layers[0])} to {_short(layers[-1])} ({len(layers)})"


def _short(layer: str) -> str:
    """Return the end of a path: the name, and before a number the name of the row."""
    parts = layer.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _explained(plan: PipelinePlan) -> Text:
    slowest = plan.stages[plan.slowest_stage]
    seconds = slowest.baseline_seconds + slowest.recompute_seconds
    part = slowest.plans[0]
    chunks = ", counted in chunks of layers" if plan.schedule.chunks > 1 else ""
    solved = sum(stage.plans[0].solve_seconds for stage in plan.stages)
    return Text(
        f"Each device may hold {format_bytes(plan.budget_bytes)}; the batch size is that of one micro-batch. "
        f"'in flight' counts micro-batches between forward and backward{chunks}, 'saved each' is what one holds in "
        f"between, and 'recompute' is of the stage's own time. Stage {slowest.index} paces the pipeline: a micro-batch "
        f"takes {format_seconds(seconds)} there by the {part.cost_model} cost model of {part.device}. Step time is "
        f"relative to the slowest stage without recompute. Captured in {format_seconds(part.capture_seconds)}, "
        f"torch {part.torch}; solved in {format_seconds(solved)}."
    )
