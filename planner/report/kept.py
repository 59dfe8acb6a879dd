"""What modules that run again keep, so that it does not run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from planner.ir.layers import collapse
from planner.plans.plan import Plan
from planner.report.placement import short_name


def render(plan: Plan) -> Text | None:
    """Name the operators whose results are kept, module by module, modules that are alike in one line."""
    if not plan.kept:
        return None
    lines = [
        f"{label}: {_named(plan.kept[list(plan.kept)[positions[0]]])}"
        for label, positions in collapse(list(plan.kept), [_named(kept) for kept in plan.kept.values()])
    ]
    text = Text("Kept in modules that run again", style="bold")
    text.append("\n" + "\n".join(lines), style="not bold")
    return text.append("\nOf an operator that a module calls more than once, #0 is the first call.", style="not bold")


def _named(kept: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{short_name(operator)} #{n}" for operator, numbers in kept.items() for n in numbers)
