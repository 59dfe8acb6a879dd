"""The report of a plan as an object: a page in a notebook, one screen of text wherever it is printed."""

from __future__ import annotations

import io
from html import escape

from rich.console import Console

from planner.plans.plan import Plan
from planner.report.brief import WIDTH, parts
from planner.report.style import print_report
from planner.report.verdict import verdict

_HEIGHT = 820


class Report:
    """What ``planner.report(model)`` gives."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False, color_system=None)
        with console.capture() as capture:
            print_report(console, verdict(self.plan), *parts(self.plan))
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that its style is not the notebook's."""
        page = escape(self.plan.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
