"""What the reader should know: what was seen, why it matters, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from planner.findings.finding import Finding, Severity
from planner.plans.plan import Plan

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def render(plan: Plan) -> Group | None:
    """Show the warnings of a plan, if there are any."""
    return listed(plan.warnings) if plan.warnings else None


def listed(findings: Sequence[Finding]) -> Group:
    """Show findings one after the other: evidence first, cause and fix beneath."""
    return Group(*(part for finding in findings for part in _lines(finding)))


def _lines(finding: Finding) -> tuple[Text, Padding, Padding]:
    return (
        Text.assemble((f"{finding.severity} [{finding.rule}] ", _STYLES[finding.severity]), finding.evidence),
        Padding(Text(finding.cause), (0, 0, 0, 4)),
        Padding(Text(f"fix: {finding.fix}"), (0, 0, 0, 4)),
    )
