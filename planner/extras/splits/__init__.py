"""Search for the fastest split of a model over many devices; nothing is run, and it needs :mod:`..pipelines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.common.registry import lazily

if TYPE_CHECKING:
    from planner.extras.splits.best import best_splits
    from planner.extras.splits.types import Answer

__all__ = ["Answer", "best_splits"]


def __getattr__(name: str) -> Any:
    return lazily(name, __name__, {"Answer": "types", "best_splits": "best"})
