"""What else could be done: other methods at the plan's budget, and what other budgets would do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group
from rich.text import Text

import cost_models
from cost_models.devices import device_names
from planner.common.program import NAME, program
from planner.common.units import format_seconds
from planner.plans.plan import BaselineRow, Plan
from planner.report.style import signed_percent, sizes, table, yes_or_no

THIS, MORE = "this one", "1 GiB more"
"""What the plan's own budget and the next larger one are called among others."""


def render_baselines(plan: Plan) -> Group | None:
    """Show eager and the baselines: peak, whether it fits, overhead, how far above the bound, time to find it."""
    if not plan.baselines:
        return None
    rows = list(methods(plan))
    shown = table(
        "Beside other ways",
        rows,
        ("method", lambda row: row.name, str),
        ("peak", lambda row: row.peak_bytes, sizes(row.peak_bytes for row in rows)),
        ("fits", lambda row: row.fits, yes_or_no),
        ("overhead", lambda row: row.overhead, signed_percent),
        ("gap", lambda row: gap_to_bound(row, plan), signed_percent),
        ("found in", lambda row: row.seconds or None, format_seconds),
        bold=lambda row: row is rows[-1],
    )
    return Group(shown, *(Text(f"{row.name}: {row.reason}") for row in rows if row.reason))


def methods(plan: Plan) -> Iterator[BaselineRow]:
    """Return the methods of a plan, the model's own step first; overheads are over that, if it is known."""
    if plan.eager is not None:
        fits = plan.eager.peak_bytes <= plan.budget_bytes
        yield BaselineRow(name="eager", peak_bytes=plan.eager.peak_bytes, overhead=0.0, fits=fits)
    for row in plan.baselines:
        yield row if row.overhead is None else replace(row, overhead=plan.over_eager(row.overhead))


def gap_to_bound(row: BaselineRow, plan: Plan) -> float | None:
    """Return how far a method is above the proven bound; it holds within the budget: what breaks it may pay less."""
    if not row.fits or row.overhead is None:
        return None
    return row.overhead - plan.over_eager(plan.lower_bound_overhead)


def render_budgets(plan: Plan) -> Group:
    """Show what other budgets would buy, and the accelerators that the step fits on."""
    shown = table(
        "With more memory, or less",
        budgets(plan),
        ("budget", lambda row: row[0], str),
        ("size", lambda row: row[1], sizes([plan.budget_bytes])),
        ("step time", lambda row: row[2], signed_percent),
    )
    return Group(shown, *map(Text, notes(plan, program())))


def budgets(plan: Plan) -> Iterator[tuple[str, int, float | None]]:
    """Return budgets worth knowing, from the smallest: what each is, its bytes, the step time there over eager."""
    if plan.minimum_feasible_peak_bytes < plan.peak_bytes:
        yield "smallest", plan.minimum_feasible_peak_bytes, None
    yield THIS, plan.budget_bytes, plan.over_eager(plan.overhead)
    more = plan.details.one_more_gib if plan.details else None
    if more is not None and more.budget_bytes < plan.baseline_peak_bytes:
        yield MORE, more.budget_bytes, plan.over_eager(more.overhead)
    if plan.added_seconds > 0:
        yield "no recompute", max(plan.baseline_peak_bytes, plan.optimizer_peak_bytes), plan.over_eager(0.0)


def notes(plan: Plan, called: str = NAME) -> Iterator[str]:
    """Say which accelerators of the table have the memory, and what to call for more."""
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
    yield f"The whole curve: {called} what-if {model}"
