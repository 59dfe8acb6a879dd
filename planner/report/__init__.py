"""The report on the terminal: one module for each part, in the order in which they are shown.

The package can be called: ``planner.report(model)`` is the report of the plan in force, or of a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rich.console import Console, RenderableType

from planner.common.timings import STAGES
from planner.common.units import format_seconds
from planner.errors import UsageError
from planner.plans.plan import Plan
from planner.report import (
    alternatives,
    anatomy,
    brief,
    findings,
    offloading,
    placement,
    timeline,
    trust,
    verdict,
    whole,
)
from planner.report.audit import render as render_audit
from planner.report.diff import render as render_difference
from planner.report.established import render as render_established
from planner.report.explain import render as render_explanation
from planner.report.findings import render_diagnosis
from planner.report.inline import Report
from planner.report.measured import render_device, render_profile
from planner.report.pipeline import render as render_pipeline
from planner.report.pipeline import render_infeasible as render_infeasible_pipeline
from planner.report.splits import render as render_splits
from planner.report.style import print_parts, print_report, table
from planner.report.suggest import render as render_suggestions
from planner.report.what_if import render as render_what_if

__all__ = [
    "render", "render_audit", "render_device", "render_diagnosis", "render_difference", "render_established",
    "render_explanation", "render_infeasible", "render_infeasible_pipeline", "render_pipeline", "render_profile",
    "render_splits", "render_suggestions", "render_timings", "render_what_if",
]  # fmt: skip


def render(
    plan: Plan, console: Console, *, full: bool = False, show_operations: bool = False, show_tree: bool = False
) -> None:
    """Print the report of a plan on one screen, or in full; add the tree of modules and all operations if asked for."""
    line = verdict.verdict(plan)
    tree = whole.render_modules(plan) if show_tree else None
    operations = whole.render_operations(plan) if show_operations else None
    parts = _full(plan, tree) if full else (*brief.parts(plan), tree)
    print_report(console, line, *parts, operations, style="bold green")


def _full(plan: Plan, tree: RenderableType | None) -> tuple[RenderableType | None, ...]:
    return (
        anatomy.render(plan),
        alternatives.render_baselines(plan),
        placement.render(plan),
        placement.render_kept(plan),
        tree,
        timeline.render(plan),
        alternatives.render_budgets(plan),
        offloading.render(plan),
        verdict.render_order(plan),
        findings.render(plan.warnings) if plan.warnings else None,
        trust.render_measured(plan),
        trust.render(plan),
    )


def render_infeasible(report: dict[str, Any], console: Console) -> None:
    """Print that no plan fits, from the report that the error carries."""
    print_report(console, verdict.infeasible_verdict(report), anatomy.render_infeasible(report), style="bold red")


def render_timings(seconds: Mapping[str, float], console: Console) -> None:
    """Print the seconds of each stage of planning that ran, and their sum."""
    shown = table(
        "Where the time went",
        [*(stage for stage in STAGES if stage in seconds), "all"],
        ("stage", str, str),
        ("time", lambda stage: sum(seconds.values()) if stage == "all" else seconds[stage], format_seconds),
        bold=lambda stage: stage == "all",
    )
    print_parts(console, shown)


class _Room(ModuleType):
    """The package itself, which people can call."""

    def __call__(self, of: object) -> Report:
        """Return the report of a plan, or of the plan that a wrapped model has in force."""
        if isinstance(of, Plan):
            return Report(of)
        api = sys.modules.get("planner.api")  # who wraps a model has imported it
        if api is None:
            raise UsageError(f"{type(of).__name__} is not wrapped: call planner.auto_wrap(model, budget=...) first")
        return Report(api.plan_of(of))


sys.modules[__name__].__class__ = _Room
