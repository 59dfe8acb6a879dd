"""The report on the terminal: one module for each part, in the order in which they are shown."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from planner.plans.plan import Plan
from planner.report import (
    anatomy,
    baselines,
    kept,
    offloading,
    operations,
    origin,
    placement,
    room,
    timeline,
    tree,
    verdict,
    verification,
    warnings,
)
from planner.report.audit import render as render_audit
from planner.report.device import render as render_device
from planner.report.diagnosis import render as render_diagnosis
from planner.report.diff import render as render_difference
from planner.report.established import render as render_established
from planner.report.explain import render as render_explanation
from planner.report.pipeline import render as render_pipeline
from planner.report.pipeline import render_infeasible as render_infeasible_pipeline
from planner.report.profile import render as render_profile
from planner.report.timings import render as render_timings
from planner.report.what_if import render as render_what_if

__all__ = [
    "render",
    "render_audit",
    "render_device",
    "render_diagnosis",
    "render_difference",
    "render_established",
    "render_explanation",
    "render_infeasible",
    "render_infeasible_pipeline",
    "render_pipeline",
    "render_profile",
    "render_timings",
    "render_what_if",
]


def render(plan: Plan, console: Console, *, show_operations: bool = False, show_tree: bool = False) -> None:
    """Print the report of a plan.

    Parameters
    ----------
    show_operations : bool
        Add the table of all operations.
    show_tree : bool
        Add the tree of all modules.
    """
    verdict.print_verdict(verdict.verdict(plan), console, style="bold green")
    for part in (
        anatomy.render(plan),
        baselines.render(plan),
        placement.render(plan),
        kept.render(plan),
        tree.render(plan) if show_tree else None,
        timeline.render(plan),
        room.render(plan),
        offloading.render(plan),
        warnings.render(plan),
        verification.render(plan),
        origin.render(plan),
        operations.render(plan) if show_operations else None,
    ):
        if part is not None:
            console.print()
            console.print(part)


def render_infeasible(report: dict[str, Any], console: Console) -> None:
    """Print that no plan fits, from the report that the error carries."""
    verdict.print_verdict(verdict.infeasible_verdict(report), console, style="bold red")
    console.print()
    console.print(anatomy.render_infeasible(report))
