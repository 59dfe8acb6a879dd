"""What exporters share that can name any modules of an eager model."""

from __future__ import annotations

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep


class WholeModules:
    """The best set of whole modules, whichever they are."""

    summary = "whole modules run again, where the plan chooses single operations"
    language = "python"
    eager = True
    to_the_end = False
    lost: tuple[str, ...] = ()

    def takes(self, modules: tuple[str, ...]) -> bool:
        """Take any modules."""
        return True

    def place(self, step: ExportStep) -> Placement:
        """Choose among all modules."""
        return step.best_modules(step.modules)
