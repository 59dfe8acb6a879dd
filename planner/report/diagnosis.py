"""What a check found, the answer first."""

from __future__ import annotations

from rich.console import Console

from planner.findings.finding import Diagnosis, Finding
from planner.report.verdict import print_verdict
from planner.report.warnings import listed


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis."""
    print_verdict(answer(diagnosis), console, style="bold red" if diagnosis.problems else "bold green")
    if diagnosis.findings:
        console.print()
        console.print(listed(diagnosis.findings))


def answer(diagnosis: Diagnosis) -> str:
    """Return the answer as one line."""
    counts = _count(diagnosis.problems, "problem") or "no problems"
    notes = _count(diagnosis.notes, "note")
    line = f"{counts}{f', {notes}' if notes else ''} in {diagnosis.model}"
    return line if diagnosis.captured else f"{line}, which cannot be captured"


def _count(findings: tuple[Finding, ...], noun: str) -> str:
    return f"{len(findings)} {noun}{'s' if len(findings) > 1 else ''}" if findings else ""
