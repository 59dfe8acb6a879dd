"""Base classes of exporters that can name any modules of the model, or none, and pieces of the texts they write."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from importlib import resources

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.plans.plan import Plan

_WIDTH = 100

WITHOUT_CACHE = "    model.config.use_cache = False  # a recomputed layer would fill it twice\n"
"""What a function that is given a model of transformers has to say."""


def comment(text: str) -> str:
    """Return a text as lines of comment, as Python has them."""
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False) + "\n"


def names(constant: str, values: Iterable[str]) -> str:
    """Return the definition of a tuple of texts, one a line, with double quotes."""
    lines = "".join(f"    {json.dumps(value)},\n" for value in values)
    return f"{constant} = (\n{lines})\n" if lines else f"{constant} = ()\n"


class WholeModules:
    """The best set of whole modules, whichever they are, written into a template: the file ``NAME.txt`` beside it.

    There ``{modules}`` is their names, as a tuple MODULES, and ``{without_cache}`` a line, or nothing, in a function of
    the model: what keeps one of transformers from filling its cache twice.
    """

    name = ""
    summary = "recomputes whole modules, where the plan chooses single operations"
    lost: tuple[str, ...] = ()

    def takes(self, modules: tuple[str, ...]) -> bool:
        """Take any modules."""
        return True

    def place(self, step: ExportStep) -> Placement:
        """Choose among all modules."""
        return step.best_modules()

    def write(self, placement: Placement, plan: Plan) -> str:
        """Fill in the template."""
        is_transformers = str(plan.fingerprint.get("model", "")).startswith("transformers.")
        without_cache = WITHOUT_CACHE if is_transformers else ""
        return self.filled(modules=names("MODULES", placement.modules), without_cache=without_cache)

    def filled(self, **parts: str) -> str:
        """Return the template with its parts filled in."""
        return resources.files(__package__).joinpath(f"{self.name}.txt").read_text(encoding="utf-8").format(**parts)
