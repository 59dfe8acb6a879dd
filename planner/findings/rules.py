"""The type of a rule, and how rules are applied to a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from planner.findings.finding import Finding, Severity
from planner.findings.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of trouble: plain data, and how to see it."""

    name: str
    """In kebab case."""
    severity: Severity = Severity.WARNING
    evidence: Callable[[Subject], str]
    """What was seen in a subject, ``""`` if nothing was."""
    cause: str
    fix: str


def examine(subject: Subject, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """Return what rules find, the worst first."""
    found = [
        Finding(rule=rule.name, severity=rule.severity, evidence=evidence, cause=rule.cause, fix=rule.fix)
        for rule in rules
        if (evidence := rule.evidence(subject))
    ]
    worst_first = list(Severity)
    return tuple(sorted(found, key=lambda finding: worst_first.index(finding.severity)))
