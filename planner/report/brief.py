"""The report of a plan on one screen: the parts that decide, in few lines each; the whole report has the rest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from planner.common.program import program
from planner.common.units import format_bytes, format_percent
from planner.ir.graph import operator_name
from planner.plans.plan import Plan
from planner.report import alternatives, anatomy, offloading, placement, timeline, trust
from planner.report.style import counted, one_line, signed_percent, sizes, table, yes_or_no
from planner.report.verdict import order_saves

WIDTH = 100
"""No line is longer, however wide the terminal is."""

_KINDS, _LAYERS, _CHART_ROWS, _WARNINGS = 3, 5, 6, 2
_LABEL = 32


def parts(plan: Plan) -> Iterator[RenderableType]:
    """Return the parts in their order; what real steps showed stands in place of the timeline."""
    measured = trust.render_measured(plan)
    shown = (
        _peak(plan),
        _other_ways(plan),
        _layers(plan),
        offloading.render(plan),
        measured or timeline.render(plan, rows=_CHART_ROWS),
        Group(Text("What to do next", style="bold"), *_next(plan)),
    )
    return (Constrain(part, WIDTH) for part in shown if part is not None)


def _peak(plan: Plan) -> Group:
    """Say where the peak is, and show the kinds of memory that fill most of it."""
    found = sorted(plan.anatomy.items(), key=lambda item: -item[1])
    rest = found[_KINDS - 1 :]
    if len(rest) > 1:
        found = [*found[: _KINDS - 1], (f"{len(rest)} other kinds", sum(size for _, size in rest))]
    at = plan.peak_at
    shown = table(
        None,
        found,
        ("", lambda row: row[0], str),
        ("size", lambda row: row[1], sizes([plan.peak_bytes])),
        ("share", lambda row: row[1] / plan.peak_bytes, format_percent),
        ("", lambda row: anatomy.bar(row[1], plan.peak_bytes), str),
    )
    shown.show_header = False
    shown.columns[-1].justify = "left"
    place = f"{operator_name(at.operation)} in {at.module or 'the model'}" if at.operation else "its end"
    source = f" ({at.source.rpartition('/')[2]})" if at.source else ""
    title = f"Peak memory, {format_bytes(plan.peak_bytes)}, in the {at.phase or 'step'} at {place}{source}"
    return Group(one_line(title, style="bold"), shown)


def _other_ways(plan: Plan) -> Table | None:
    """Show what else could be done, the plan last."""
    if not plan.baselines:
        return None
    rows = list(alternatives.methods(plan))
    return table(
        None,
        rows,
        ("Beside other ways", lambda row: row.name, str),
        ("peak", lambda row: row.peak_bytes, sizes(row.peak_bytes for row in rows)),
        ("fits", lambda row: row.fits, yes_or_no),
        ("step time", lambda row: row.overhead, signed_percent),
        bold=lambda row: row is rows[-1],
    )


def _layers(plan: Plan) -> Group | None:
    """Show the layers that free most, those that are treated alike in one row; then those that save most."""

    def gives(row: placement.Row) -> tuple[int, int]:
        members = [plan.placement[position] for position in row.positions]
        return sum(layer.freed_bytes for layer in members), sum(layer.saved_bytes for layer in members)

    rows = sorted(placement.rows(plan)[:-1], key=gives, reverse=True) if plan.placement else []
    if not rows:
        return None
    title = f"Layers, {_LAYERS} of {len(rows)}" if len(rows) > _LAYERS else "Layers"
    cells = [(title, "saved", "freed", "added", "runs again")]
    for row in rows[:_LAYERS]:
        saved, freed, _, added, _ = row.numbers
        cells.append((placement.fitting(row.label, _LABEL), saved, freed, added, row.why))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{label:<{widths[0]}}  {saved:>{widths[1]}}  {freed:>{widths[2]}}  {added:>{widths[3]}}  {why}"
        for label, saved, freed, added, why in cells
    ]
    return Group(*(one_line(line, style="" if number else "bold") for number, line in enumerate(lines)))


def _next(plan: Plan) -> Iterator[Text]:
    """Say how to use the plan, what other budgets give, what to look into, and where there is more."""
    lines = [("use it", f"planner.auto_wrap(model, budget={plan.budget_bytes})")]
    if saved := order_saves(plan):
        lines.append(("order", saved))
    if others := " · ".join(_others(plan)):
        lines.append(("other budgets", others))
    for finding in plan.warnings[:_WARNINGS]:
        lines.append((str(finding.severity), f"[{finding.rule}] {finding.evidence}"))
    hidden = len(plan.warnings) - _WARNINGS
    more = ["--full" + (f" ({counted(hidden, 'more warning')})" if hidden > 0 else "")]
    more += ["--html FILE"] if plan.verification else ["--verify (real steps)", "--html FILE"]
    lines.append(("see more", " · ".join(more)))
    lines.append(("whole curve", f"{program()} what-if {shlex.quote(plan.model) if plan.model else 'MODEL'}"))
    widest = max(len(label) for label, _ in lines)
    return (one_line(f"  {label:<{widest}}  {said}") for label, said in lines)


def _others(plan: Plan) -> Iterator[str]:
    """Name budgets other than the plan's, and the step time there."""
    for name, size, overhead in alternatives.budgets(plan):
        if name == alternatives.MORE and overhead is not None:
            yield f"+1 GiB: {signed_percent(overhead)}"
        elif name != alternatives.THIS:
            yield f"{name} {format_bytes(size)}"
