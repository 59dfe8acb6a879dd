"""What a present set-up costs, beside the best plans."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.analysis.audit import Audit
from planner.common.units import format_bytes, format_seconds
from planner.plans.plan import Plan
from planner.report.style import at_least_percent, cells, in_unit_of, signed_percent, table
from planner.report.verdict import print_verdict


def render(audit: Audit, console: Console) -> None:
    """Print an audit."""
    print_verdict(answer(audit), console, style="bold green" if _is_best(audit) else "bold yellow")
    console.print()
    console.print(_ways(audit))
    for line in _lines(audit):
        console.print(Text(line))


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


def _ways(audit: Audit) -> Table:
    host = any(plan.offloading for plan in (audit.now, audit.best))
    added = "added" if host else "recompute"
    shown = table("way", "peak", "overhead", added, "above bound", title="What is done now, and what would do")
    rows = [(f"now: {audit.current}", audit.now, audit.best), ("best at that peak", audit.best, audit.best)]
    if audit.within_budget is not None:
        best = audit.within_budget
        rows.append((f"best within {format_bytes(best.budget_bytes)}", best, best))
    without_bytes = audit.now.baseline_peak_bytes
    largest_bytes = max(without_bytes, *(plan.whole_step_peak_bytes for _, plan, _ in rows))
    shown.add_row(*cells("without recompute", in_unit_of(without_bytes, largest_bytes), "+0.0%", "-", "-"))
    for label, plan, bound in rows:
        is_proven = bound.lower_bound_seconds > 0 or plan.added_seconds <= 0
        shown.add_row(
            *cells(
                label,
                in_unit_of(plan.whole_step_peak_bytes, largest_bytes),
                signed_percent(plan.overhead),
                format_seconds(plan.added_seconds) if plan.added_seconds else "-",
                signed_percent(plan.overhead - bound.lower_bound_overhead) if is_proven else "-",
            )
        )
    return shown


def _lines(audit: Audit) -> Iterator[str]:
    now = audit.now
    yield (
        f"Overhead is of the step without recompute, {format_seconds(now.baseline_step_seconds)} by the "
        f"{now.cost_model} cost model of {now.device}. The set-up is simulated on the captured step, on the model "
        "without checkpointing of its own."
    )
    host = ""
    if audit.now.offloading is not None:
        host = f" --offload --host-budget {audit.now.offloading.host_bytes}"
        host += " --offload-lossy" if audit.now.offloading.lossy else ""
        yield f"It offloads {format_bytes(audit.now.offloading.host_bytes)}; so much may the plans beside it."
    if not _is_best(audit):
        runtime = " --runtime modules" if audit.best.runtime == "modules" else ""
        yield (
            f"For the plan at the same peak: --budget {audit.best.budget_bytes}{runtime}{host}, to 'plan' or to "
            "planner.auto_wrap."
        )
    yield from audit.notes
