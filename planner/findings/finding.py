"""Findings: one type for all warnings of the project, with evidence, cause and fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SCHEMA = 1
"""Version of the JSON of a diagnosis."""


class Severity(StrEnum):
    """How bad a finding is, worst first."""

    ERROR = "error"
    """Training gives wrong numbers."""
    WARNING = "warning"
    """Memory or time is wasted, or a plan cannot be made or kept."""
    NOTE = "note"
    """Worth knowing; nothing to mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule found."""

    rule: str
    """Name of the rule, in kebab case."""
    severity: Severity = Severity.WARNING
    evidence: str
    """What was seen: module paths, operations, bytes."""
    cause: str
    """Why that matters."""
    fix: str
    """What to do about it."""

    @property
    def is_problem(self) -> bool:
        """Whether there is something to mend."""
        return self.severity is not Severity.NOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found about a model, the worst first."""

    model: str
    findings: tuple[Finding, ...]
    captured: bool
    """Whether the step could be captured as one graph; rules on its bytes need that."""

    def report(self) -> dict[str, Any]:
        """Return the diagnosis as JSON has it."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "captured": self.captured,
            "problems": len(self.problems),
            "notes": len(self.notes),
            "findings": [asdict(finding) for finding in self.findings],
        }

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are worse than a note."""
        return tuple(finding for finding in self.findings if finding.is_problem)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are no more than a note."""
        return tuple(finding for finding in self.findings if not finding.is_problem)


def collapsed(things: Sequence[str], *, shown: int = 3) -> str:
    """Name a few of many things, each once.

    >>> collapsed(["h.0", "h.1", "h.0"]), collapsed(["a", "b", "c", "d", "e"])
    ('h.0, h.1', 'a, b, c and 2 more')
    """
    distinct = list(dict.fromkeys(things))
    more = f" and {len(distinct) - shown} more" if len(distinct) > shown else ""
    return ", ".join(distinct[:shown]) + more
