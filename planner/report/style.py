"""Format numbers and tables, and print whole reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from planner.common.units import in_unit_of

Write = Callable[[Any], str]
"""How the contents of a column are written."""

Column = tuple[str, Callable[[Any], Any], Write | None]
"""A column's name, what it takes from a row, and how that is written; one that nothing writes is left out."""

_COUNTS = (("K", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12))


def compact_count(count: int) -> str:
    """Return a large number with three or four digits.

    >>> compact_count(950), compact_count(372_500_000_000)
    ('950', '372.5 G')
    """
    if abs(count) < 1000:
        return f"{count}"
    letter, factor = next((u for u in _COUNTS if abs(count) < 999.95 * u[1]), _COUNTS[-1])
    return f"{count / factor:,.1f} {letter}"


def signed_percent(ratio: float) -> str:
    """Return a ratio as a percentage with its sign.

    >>> signed_percent(0.0844), signed_percent(-0.0000001)
    ('+8.4%', '+0.0%')
    """
    return f"{round(ratio * 100, 1) + 0.0:+.1f}%"


def at_least_percent(ratio: float) -> str:
    """Return a lower bound as a percentage, rounded down: the sentence around it must stay true.

    >>> at_least_percent(0.0839), signed_percent(0.0839)
    ('+8.3%', '+8.4%')
    """
    return signed_percent(math.floor(ratio * 1000 + 1e-6) / 1000)


def counted(count: int, noun: str) -> str:
    """Return ``"1 value"``, or ``"2 values"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def sizes(column: Iterable[int | None]) -> Write:
    """Return what writes a column of sizes, all in the unit that suits the largest."""
    return partial(in_unit_of, largest_bytes=max((size for size in column if size is not None), default=0))


def yes_or_no(is_so: bool) -> str:
    """Return a truth as a word."""
    return "yes" if is_so else "no"


def one_line(text: str, style: str = "") -> Text:
    """Return a text that is cut, not wrapped, where there is no room."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def uncut(text: str) -> Text:
    """Return lines that are to be copied: they go on beyond the width."""
    return Text(text, no_wrap=True, overflow="ignore")


def table(
    title: str | None,
    rows: Iterable[Any],
    *columns: Column,
    text_columns: int = 1,
    bold: Callable[[Any], Any] = lambda row: False,
) -> Table:
    """Return a table whose first columns are text, aligned left, and the others numbers.

    Texts are written as they are, whatever rich would read as markup in them, and None as a dash. A table without a
    title is named by the head of its first column.
    """
    heading = None if title is None else Text(title, style="bold")
    made = Table(title=heading, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [(name, take, write) for name, take, write in columns if write is not None]
    for position, (name, _, _) in enumerate(shown):
        if position < text_columns:
            made.add_column(Text(name), overflow="fold", min_width=8)
        else:
            made.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        style = "bold" if bold(row) else ""
        made.add_row(*(_cell(take(row), write, style) for _, take, write in shown))
    return made


def _cell(content: Any, write: Write, style: str) -> Text:
    if isinstance(content, Text):
        return content
    text = "-" if content is None else content if isinstance(content, str) else write(content)
    return Text(text, style=style)


def print_report(console: Console, line: str, *parts: RenderableType | None, style: str = "bold") -> None:
    """Print parts beneath a verdict: wrapped on a terminal, elsewhere always one line for other programs."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)
    print_parts(console, *parts)


def print_parts(console: Console, *parts: RenderableType | None) -> None:
    """Print the parts that there are, each after an empty line."""
    for part in parts:
        if part is not None:
            console.print()
            console.print(part, crop=False)  # each part keeps to the width; what is to be copied goes beyond it
