"""What a present set-up costs, beside the best plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from planner.analysis.audit import Audit
from planner.common.units import format_bytes, format_seconds
from planner.plans.plan import Plan
from planner.report.style import at_least_percent, print_report, signed_percent, sizes, table


def render(audit: Audit, console: Console) -> None:
    """Print an audit."""
    style = "bold green" if _is_best(audit) else "bold yellow"
    print_report(console, answer(audit), Group(_plans(audit), *map(Text, _lines(audit))), style=style)


def answer(audit: Audit) -> str:
    """Return the answer as one line."""
    return "; ".join(filter(None, (_at_its_peak(audit), _at_the_budget(audit))))


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
    now, best, within = audit.now, audit.best, audit.within_budget
    rows: list[tuple[Any, ...]] = [("without recompute", now.baseline_peak_bytes, 0.0, None, None)]
    rows += [_row(f"now: {audit.current}", now, best), _row("best at that peak", best, best)]
    if within is not None:
        rows.append(_row(f"best within {format_bytes(within.budget_bytes)}", within, within))
    return table(
        "What you do now, and better plans",
        rows,
        ("method", lambda row: row[0], str),
        ("peak", lambda row: row[1], sizes(row[1] for row in rows)),
        ("overhead", lambda row: row[2], signed_percent),
        ("added" if now.offloading or best.offloading else "recompute", lambda row: row[3], format_seconds),
        ("above bound", lambda row: row[4], signed_percent),
    )


def _row(name: str, plan: Plan, best: Plan) -> tuple[Any, ...]:
    """Return what a plan costs, and how far that is above the bound of the best one."""
    is_proven = best.lower_bound_seconds > 0 or plan.added_seconds <= 0
    above = plan.overhead - best.lower_bound_overhead if is_proven else None
    return name, plan.whole_step_peak_bytes, plan.overhead, plan.added_seconds or None, above


def _lines(audit: Audit) -> Iterator[str]:
    now = audit.now
    yield (
        f"Overhead is of the step without recompute, {format_seconds(now.baseline_step_seconds)} by the "
        f"{now.cost_model} cost model of {now.device}. Your set-up is simulated on the captured step, without "
        "the model's own checkpointing."
    )
    host = ""
    if audit.now.offloading is not None:
        host = f" --offload --host-budget {audit.now.offloading.host_bytes}"
        host += " --offload-lossy" if audit.now.offloading.lossy else ""
        yield f"It offloads {format_bytes(audit.now.offloading.host_bytes)}; the plans beside it may offload as much."
    if not _is_best(audit):
        runtime = " --runtime modules" if audit.best.runtime == "modules" else ""
        yield (
            f"To use the plan at the same peak: --budget {audit.best.budget_bytes}{runtime}{host}, for 'plan' or "
            "planner.auto_wrap."
        )
    yield from audit.notes
