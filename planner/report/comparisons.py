"""Ways to train a step beside each other: a plan's baselines, a present set-up, and budgets to choose."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from planner.analysis.audit import Audit
from planner.common.program import NAME, program
from planner.common.units import format_bytes, format_seconds
from planner.plans.plan import OWN, ComparisonRow, Plan
from planner.report.style import at_least_percent, print_report, signed_percent, sizes, table, uncut, yes_or_no

THIS, MORE = "this one", "1 GiB more"
"""What the plan's own budget and the next larger one are called among others."""


@dataclass(frozen=True, slots=True)
class ToCopy:
    """What a report shows to be copied: the call that makes its plan, and the command line's words for the curve."""

    use_it: str
    what_if: str = ""

    def curve(self, plan: Plan, called: str = NAME) -> str:
        """Return what to type for more budgets."""
        return f"{called} {self.what_if or shlex.join(['what-if', plan.model or 'MODEL'])}"


OF_A_PLAN = ToCopy("planner.auto_wrap(model, budget=plan)")
"""Where no more is known of a plan than that it is at hand."""


def comparison_table(title: str | None, rows: Sequence[ComparisonRow], head: str = "method") -> Table:
    """Return a table of ways with the columns that any of them fills."""
    size = sizes(row.peak_bytes for row in rows)
    return table(
        title,
        rows,
        (head, lambda row: row.name, str),
        ("peak", lambda row: row.peak_bytes, size),
        ("fits", lambda row: row.fits, yes_or_no if any(row.fits for row in rows) else None),
        ("host", lambda row: row.host_bytes or None, size if any(row.host_bytes for row in rows) else None),
        ("overhead", lambda row: row.overhead, signed_percent),
        ("gap", lambda row: row.gap, signed_percent if any(row.gap is not None for row in rows) else None),
        ("found in", lambda row: row.seconds or None, format_seconds if any(row.seconds for row in rows) else None),
        bold=lambda row: row.name == OWN,
    )


def render_baselines(plan: Plan, *, full: bool = True) -> Group | None:
    """Show eager and the baselines beside the plan; in full with their gaps, and why some of them do not exist."""
    if not plan.baselines:
        return None
    rows = list(methods(plan))
    if not full:
        rows = [replace(row, seconds=0.0, lower_bound_overhead=None) for row in rows]
    lines = [Text(f"{row.name}: {row.reason}") for row in rows if row.reason and full]
    return Group(comparison_table(None, rows, "Beside other ways"), *lines)


def methods(plan: Plan) -> Iterator[ComparisonRow]:
    """Return the methods of a plan, the model's own step first; overheads and bounds are over that, if it is known.

    The bound holds within the budget: what breaks that may pay less.
    """
    if plan.eager is not None:
        fits = plan.eager.peak_bytes <= plan.budget_bytes
        yield ComparisonRow(name="eager", peak_bytes=plan.eager.peak_bytes, overhead=0.0, fits=fits)
    bound = plan.over_eager(plan.lower_bound_overhead)
    for row in plan.baselines:
        overhead = None if row.overhead is None else plan.over_eager(row.overhead)
        yield replace(row, overhead=overhead, lower_bound_overhead=bound if row.fits else None)


def render_budgets(plan: Plan, to_copy: ToCopy) -> Group:
    """Show what other budgets would buy."""
    shown = table(
        "With more memory, or less",
        budgets(plan),
        ("budget", lambda row: row[0], str),
        ("size", lambda row: row[1], sizes([plan.budget_bytes])),
        ("step time", lambda row: row[2], signed_percent),
    )
    return Group(shown, uncut(f"The whole curve: {to_copy.curve(plan, program())}"))


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


def render_audit(audit: Audit, console: Console) -> None:
    """Print an audit."""
    style = "bold green" if _is_best(audit) else "bold yellow"
    answer = "; ".join(filter(None, (_at_its_peak(audit), _at_the_budget(audit))))
    print_report(console, answer, Group(_plans(audit), *map(Text, _audit_notes(audit))), style=style)


def _at_its_peak(audit: Audit) -> str:
    pays = signed_percent(audit.now.overhead)
    if audit.now.added_seconds <= 0:
        return "you pay nothing"
    if _is_best(audit):
        return f"you pay {pays}, and nothing better is known at the same peak ({_bound(audit.best)})"
    return f"you pay {pays}, {signed_percent(audit.best.overhead)} would do at the same peak ({_bound(audit.best)})"


def _is_best(audit: Audit) -> bool:
    return signed_percent(audit.best.overhead) == signed_percent(audit.now.overhead)


def _bound(plan: Plan) -> str:
    if plan.added_seconds > 0 and plan.lower_bound_seconds <= 0:
        return "no lower bound proven"
    return f"proven: no plan pays less than {at_least_percent(plan.lower_bound_overhead)}"


def _at_the_budget(audit: Audit) -> str:
    if audit.budget_bytes is None:
        return ""
    verb = "it fits" if audit.fits else "it does not fit"
    budget = f"{verb} {format_bytes(audit.budget_bytes)}"
    if audit.within_budget is None:
        return f"{budget}, and no plan is known that does"
    best = audit.within_budget
    if audit.fits and signed_percent(best.overhead) == signed_percent(audit.now.overhead):
        return f"{budget}, where nothing better is known"
    return f"{budget}, where {signed_percent(best.overhead)} would do ({_bound(best)})"


def _plans(audit: Audit) -> Table:
    """Return the set-up beside the best plans; a gap is to the bound on plans for the same budget."""
    now, best, within = audit.now, audit.best, audit.within_budget
    rows = [ComparisonRow(name="without recompute", peak_bytes=now.baseline_peak_bytes, overhead=0.0)]
    rows += [_audit_row(f"now: {audit.current}", now, best), _audit_row("best at that peak", best, best)]
    if within is not None:
        rows.append(_audit_row(f"best within {format_bytes(within.budget_bytes)}", within, within))
    return comparison_table("What you do now, and better plans", rows)


def _audit_row(name: str, plan: Plan, best: Plan) -> ComparisonRow:
    is_proven = best.lower_bound_seconds > 0 or plan.added_seconds <= 0
    host_bytes = plan.offloading.host_bytes if plan.offloading else 0
    row = ComparisonRow(name=name, peak_bytes=plan.whole_step_peak_bytes, overhead=plan.overhead, host_bytes=host_bytes)
    return replace(row, lower_bound_overhead=best.lower_bound_overhead if is_proven else None)


def _audit_notes(audit: Audit) -> Iterator[str]:
    now = audit.now
    yield (
        f"Overhead is of the step without recompute, {format_seconds(now.baseline_step_seconds)} by the "
        f"{now.cost_model} cost model of {now.device}. Your set-up is simulated on the captured step, without "
        "the model's own checkpointing."
    )
    host = ""
    if audit.now.offloading is not None:
        host = f" --offload --host-budget {audit.now.offloading.host_bytes}"
        yield f"It offloads {format_bytes(audit.now.offloading.host_bytes)}; the plans beside it may offload as much."
    if not _is_best(audit):
        runtime = " --runtime modules" if audit.best.runtime == "modules" else ""
        yield (
            f"To use the plan at the same peak: --budget {audit.best.budget_bytes}{runtime}{host}, for 'plan' or "
            "planner.auto_wrap."
        )
