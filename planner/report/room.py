"""What another amount of memory would do, as far as the plan knows; ``what-if`` has the whole curve."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

import cost_models
from cost_models.devices import device_names
from planner.plans.plan import Plan
from planner.report.style import cells, in_unit_of, signed_percent, table


def render(plan: Plan) -> Group:
    """Show what other budgets would buy, and the accelerators that the step fits on."""
    shown = table("budget", "size", "step time", title="With more memory, or less", text_columns=1)
    for name, size_bytes, overhead in budgets(plan):
        cost = "-" if overhead is None else signed_percent(overhead)
        shown.add_row(*cells(name, in_unit_of(size_bytes, plan.budget_bytes), cost))
    return Group(shown, *map(Text, notes(plan)))


def budgets(plan: Plan) -> Iterator[tuple[str, int, float | None]]:
    """Return budgets worth knowing, from the smallest: what it is, its bytes, the overhead there."""
    if plan.minimum_feasible_peak_bytes < plan.peak_bytes:
        yield "the smallest known to be feasible", plan.minimum_feasible_peak_bytes, None
    yield "this one", plan.budget_bytes, plan.overhead
    more = plan.details.one_more_gib if plan.details else None
    if more is not None and more.budget_bytes < plan.baseline_peak_bytes:
        yield "one more GiB", more.budget_bytes, more.overhead
    if plan.added_seconds > 0:
        yield "without recompute", max(plan.baseline_peak_bytes, plan.optimizer_peak_bytes), 0.0


def notes(plan: Plan) -> Iterator[str]:
    """Say which accelerators of the table have the memory, and where there is more to see."""
    memory = {name: cost_models.device(name).memory_bytes for name in device_names() if name != "cpu"}
    planned = [name for name in memory if memory[name] >= plan.whole_step_peak_bytes]
    unplanned = [name for name in memory if memory[name] >= max(plan.baseline_peak_bytes, plan.optimizer_peak_bytes)]
    only = [name for name in planned if name not in unplanned]
    if len(unplanned) == len(memory):
        yield f"By memory alone the step fits on each of the {len(memory)} accelerators of the table, planned or not"
    elif not planned:
        yield "By memory alone the planned step fits on no accelerator of the table"
    else:
        yield f"By memory alone the step fits without recompute on {', '.join(unplanned) or 'no accelerator'}"
    if only:
        yield f"As planned it also fits on {', '.join(only)}"
    model = shlex.quote(plan.model) if plan.model else "MODEL"
    yield f"The whole curve: python cli.py what-if {model}"
