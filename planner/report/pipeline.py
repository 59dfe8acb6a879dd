"""The plan of a pipeline: a verdict that names the stage that binds, and a table of the stages."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.text import Text

from planner.common.units import format_bytes, format_seconds
from planner.plans.pipeline_types import PipelinePlan, StagePlan
from planner.report.style import cells, in_unit_of, signed_percent, table
from planner.report.verdict import print_verdict


def render(plan: PipelinePlan, console: Console) -> None:
    """Print the report of a pipeline's plan."""
    print_verdict(_verdict(plan), console, style="bold green")
    console.print()
    shown = table(
        "stage", "layers", "in flight", "saved each", "peak", "keeping all", "recompute",
        title=f"Stages of the {plan.schedule.name} schedule, {plan.schedule.micro_batches} micro-batches",
        text_columns=2,
    )  # fmt: skip
    largest_bytes = max(stage.baseline_peak_bytes for stage in plan.stages)
    for stage in plan.stages:
        style = "bold" if stage.index == plan.binding_stage else ""
        for chunk in range(len(stage.plans)):
            shown.add_row(*cells(*_row(stage, chunk, largest_bytes), style=style))
    console.print(shown)
    console.print()
    console.print(_explained(plan))
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
    print_verdict(line, console, style="bold red")


def _verdict(plan: PipelinePlan) -> str:
    budget = in_unit_of(plan.budget_bytes, plan.budget_bytes, digits=1)
    peak = in_unit_of(plan.peak_bytes, plan.budget_bytes, digits=1).split()[0]
    cost = f"{signed_percent(plan.overhead)} step time"
    if plan.overhead > 0:
        # Rounded down: the sentence must stay true.
        bound = math.floor(plan.lower_bound_overhead * 1000 + 1e-6) / 1000
        cost += f" (no plan can pay less than {signed_percent(bound)})"
    binding = plan.stages[plan.binding_stage]
    count = binding.micro_batches_in_flight
    layers = [layer for stage in plan.stages for part in stage.plans for layer in part.placement if layer.block]
    recomputed = sum(layer.recomputed > 0 for layer in layers)
    return (
        f"FITS {peak} of {budget} · {cost} · stage {binding.index} of {plan.schedule.stages} binds, "
        f"{_in_flight(plan, count)} in flight · {recomputed} of {len(layers)} layers recomputed"
    )


def _in_flight(plan: PipelinePlan, count: int) -> str:
    one, several = ("micro-batch", "micro-batches") if plan.schedule.chunks == 1 else ("chunk", "chunks")
    return f"{count} {one if count == 1 else several}"


def _row(stage: StagePlan, chunk: int, largest_bytes: int) -> list[str]:
    layers, part = stage.layers[chunk], stage.plans[chunk]
    is_first = chunk == 0
    return [
        str(stage.index) if is_first else "",
        _short(layers[0]) if len(layers) == 1 else f"{_short(layers[0])} to {_short(layers[-1])} ({len(layers)})",
        str(stage.micro_batches_in_flight) if is_first else "",
        in_unit_of(stage.saved_bytes[chunk], largest_bytes),
        in_unit_of(part.whole_step_peak_bytes, largest_bytes),
        in_unit_of(part.baseline_peak_bytes, largest_bytes),
        signed_percent(part.overhead),
    ]


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
