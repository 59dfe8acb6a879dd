"""Print findings: evidence, cause and fix; the warnings of a plan, and the answer of ``check``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from planner.findings.finding import Diagnosis, Finding, Severity
from planner.report.style import counted, print_report

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def render(findings: Sequence[Finding]) -> Group:
    """Show findings one after the other: evidence first, cause and fix beneath."""
    return Group(*(part for finding in findings for part in _lines(finding)))


def _lines(finding: Finding) -> tuple[Text, Padding, Padding]:
    return (
        Text.assemble((f"{finding.severity} [{finding.rule}] ", _STYLES[finding.severity]), finding.evidence),
        Padding(Text(finding.cause), (0, 0, 0, 4)),
        Padding(Text(f"fix: {finding.fix}"), (0, 0, 0, 4)),
    )


def render_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print what a check found, the answer first."""
    style = "bold red" if diagnosis.problems else "bold green"
    print_report(console, answer(diagnosis), render(diagnosis.findings) if diagnosis.findings else None, style=style)


def answer(diagnosis: Diagnosis) -> str:
    """Return the answer as one line."""
    problems = counted(len(diagnosis.problems), "problem") if diagnosis.problems else "no problems"
    notes = f", {counted(len(diagnosis.notes), 'note')}" if diagnosis.notes else ""
    line = f"{problems}{notes} in {diagnosis.model}"
    return line if diagnosis.captured else f"{line}, which cannot be captured"
