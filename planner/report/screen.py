"""The report of a plan on one screen, in full, and as an object that notebooks show as a page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from html import escape

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.text import Text

from planner.common.program import program
from planner.common.units import format_bytes
from planner.plans.plan import Plan
from planner.report import comparisons, findings, layers, peak, verdict
from planner.report.comparisons import OF_A_PLAN, ToCopy
from planner.report.page import to_html
from planner.report.style import counted, one_line, print_report, signed_percent, uncut

_HEIGHT = 820
"""Of the frame that shows the page in a notebook."""

WIDTH = 100
"""No line is longer, however wide the terminal is."""

_KINDS, _LAYERS, _CHART_ROWS, _WARNINGS = 3, 5, 6, 2


def parts(plan: Plan, to_copy: ToCopy) -> Iterator[RenderableType]:
    """Return the parts of one screen in their order; what real steps showed stands in place of the timeline."""
    shown = (
        peak.render(plan, _KINDS),
        comparisons.render_baselines(plan, full=False),
        layers.render(plan, _LAYERS),
        verdict.render_offloading(plan),
        verdict.render_measured(plan) or peak.render_timeline(plan, rows=_CHART_ROWS),
        Group(Text("What to do next", style="bold"), *_next(plan, to_copy)),
    )
    return (Constrain(part, WIDTH) for part in shown if part is not None)


def full_parts(plan: Plan, to_copy: ToCopy) -> Iterator[RenderableType | None]:
    """Return the parts of the whole report in their order."""
    order = verdict.order_saves(plan)
    yield peak.render(plan)
    yield comparisons.render_baselines(plan)
    yield layers.render(plan)
    yield layers.render_kept(plan)
    yield peak.render_timeline(plan)
    yield comparisons.render_budgets(plan, to_copy)
    yield verdict.render_offloading(plan)
    yield Text(f"Order: {order}") if order else None
    yield findings.render(plan.warnings) if plan.warnings else None
    yield verdict.render_measured(plan)
    yield Group(Text("How far to trust it", style="bold"), *map(Text, verdict.statements(plan)))
    yield Group(Text("To use it", style="bold"), uncut(to_copy.use_it))


def _next(plan: Plan, to_copy: ToCopy) -> Iterator[Text]:
    """Say how to use the plan, what other budgets give, and where to look further."""
    lines = [("use it", to_copy.use_it)]
    if saved := verdict.order_saves(plan):
        lines.append(("order", saved))
    if others := " · ".join(_others(plan)):
        lines.append(("other budgets", others))
    for finding in plan.warnings[:_WARNINGS]:
        lines.append((str(finding.severity), f"[{finding.rule}] {finding.evidence}"))
    hidden = len(plan.warnings) - _WARNINGS
    more = ["--full" + (f" ({counted(hidden, 'more warning')})" if hidden > 0 else "")]
    more += ["--html FILE"] if plan.verification else ["--verify (real steps)", "--html FILE"]
    lines.append(("see more", " · ".join(more)))
    lines.append(("whole curve", to_copy.curve(plan, program())))
    widest = max(len(label) for label, _ in lines)
    indent, write = "\n" + " " * (widest + 4), {"use it": uncut, "whole curve": uncut}
    shown = ((label, f"  {label:<{widest}}  {said}".replace("\n", indent)) for label, said in lines)
    return (write.get(label, one_line)(text) for label, text in shown)


def _others(plan: Plan) -> Iterator[str]:
    """Name budgets other than the plan's, and the step time there."""
    for name, size, overhead in comparisons.budgets(plan):
        if name == comparisons.MORE and overhead is not None:
            yield f"+1 GiB: {signed_percent(overhead)}"
        elif name != comparisons.THIS:
            yield f"{name} {format_bytes(size)}"


class Report:
    """What ``planner.report(model)`` gives."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False, color_system=None)
        with console.capture() as capture:
            print_report(console, verdict.verdict(self.plan), *parts(self.plan, OF_A_PLAN))
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    __repr__ = __str__

    def to_html(self) -> str:
        """Return the report as one HTML page that needs nothing beside itself."""
        return to_html(self.plan)

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that its style is not the notebook's."""
        page = escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
