"""Pieces of the texts that exporters write."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

_WIDTH = 100

WITHOUT_CACHE = "    model.config.use_cache = False  # a layer that runs again would fill it twice\n"
"""What a function that is given a model of transformers has to say."""


def comment(text: str) -> str:
    """Return a text as lines of comment, as Python, YAML and shells have them."""
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False) + "\n"


def names(constant: str, values: Iterable[str]) -> str:
    """Return the definition of a tuple of texts, one a line, with double quotes."""
    lines = "".join(f"    {json.dumps(value)},\n" for value in values)
    return f"{constant} = (\n{lines})\n" if lines else f"{constant} = ()\n"


def numbers(constant: str, values: Iterable[int]) -> str:
    """Return the definition of a set of numbers."""
    return f"{constant} = frozenset([{', '.join(map(str, values))}])\n"
