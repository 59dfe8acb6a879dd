"""An export of a plan to another framework, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.common.atomic import write_text
from planner.common.units import format_bytes, format_percent
from planner.errors import UsageError


class Label(StrEnum):
    """How much of a plan an export carries over."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a framework recomputes."""

    modules: tuple[str, ...] = ()
    """Paths of the recomputed modules, each by itself."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The framework's own options for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Peak of the whole device and added time of a way to recompute."""

    peak_bytes: int
    overhead: float

    @property
    def exact(self) -> str:
        """The figures, with the peak to the byte."""
        return f"peak {self.peak_bytes:,} bytes, +{self.overhead:.1%} step time"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan expressed for another framework."""

    target: str
    """Name of the framework."""
    model: str
    """Name of the model."""
    label: Label
    """``"exact"`` (what runs there is the plan), ``"approximate"`` or ``"unsupported"``."""
    reason: str
    """Why it has that label."""
    lost: tuple[str, ...] = ()
    """What else differs in the export, one line each."""
    language: str = "python"
    """Language of the text, for readers of the report."""
    text: str = ""
    """Python code; empty if unsupported."""
    modules: tuple[str, ...] = ()
    """What the export recomputes; a path stands for a whole module."""
    budget_bytes: int
    plan: Figures
    """The plan's budget, and the plan itself."""
    predicted: Figures | None = None
    """The export, simulated; None if unsupported."""

    @property
    def verdict(self) -> str:
        """One line: the label, and what the export costs beside the plan."""
        if self.predicted is None:
            return f"{self.target}: {self.label}: {self.reason}"
        return (
            f"{self.target}: {self.label}: the export peaks at {format_bytes(self.predicted.peak_bytes)} "
            f"(budget {format_bytes(self.budget_bytes)}) and pays +{format_percent(self.predicted.overhead)} "
            f"where the plan pays +{format_percent(self.plan.overhead)}; {self.reason}"
        )

    def report(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write the text to a file, whole or not at all; a UsageError if there is none, or it cannot be written."""
        if self.label is Label.UNSUPPORTED:
            raise UsageError(self.verdict)
        write_text(path, self.text)
