"""What exporters share: whether they can name the modules of the plan's own model."""

from __future__ import annotations

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep


class OwnLayers:
    """The framework has layers of its own, or counts them: none of the model's modules can be named."""

    language = "python"
    to_the_end = True

    def takes(self, modules: tuple[str, ...]) -> bool:
        """Take no modules."""
        return False


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
