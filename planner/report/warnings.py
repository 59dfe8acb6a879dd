"""What the reader should know: a rule's name, the cause, the fix."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from planner.plan_types import Plan


def render(plan: Plan) -> Group | None:
    """Show the warnings, if there are any."""
    if not plan.warnings:
        return None
    return Group(
        *(
            Text.assemble((f"warning [{warning.rule}] ", "yellow"), f"{warning.cause}; {warning.fix}")
            for warning in plan.warnings
        )
    )
