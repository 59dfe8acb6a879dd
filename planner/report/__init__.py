"""The report on the terminal and as a page; the modules are the parts that a reader sees.

The package can be called: ``planner.report(model)`` is the report of the plan in force, or of a plan.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from rich.console import Console

from planner.errors import UsageError
from planner.plans.plan import Plan
from planner.report import peak, screen
from planner.report.comparisons import OF_A_PLAN, ToCopy
from planner.report.screen import Report
from planner.report.style import print_report
from planner.report.verdict import infeasible_verdict, verdict


def render(plan: Plan, console: Console, *, full: bool = False, to_copy: ToCopy = OF_A_PLAN) -> None:
    """Print the report of a plan on one screen, or in full."""
    parts = screen.full_parts(plan, to_copy) if full else screen.parts(plan, to_copy)
    print_report(console, verdict(plan), *parts, style="bold green")


def render_infeasible(report: dict[str, Any], console: Console) -> None:
    """Print that no plan fits, from the report that the error carries."""
    print_report(console, infeasible_verdict(report), peak.render_infeasible(report), style="bold red")


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
