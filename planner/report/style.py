"""How numbers and tables look in every part of the report."""

from __future__ import annotations

import math

from rich.table import Table
from rich.text import Text

_UNITS = (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1), ("B", 1, 0))

_COUNTS = (("K", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12))


def in_unit_of(size_bytes: int, largest_bytes: int, *, digits: int | None = None) -> str:
    """Return a size in the unit that suits the largest of a column, so that the column can be added up.

    Examples
    --------
    >>> in_unit_of(1536 * 2**10, 3 * 2**30), in_unit_of(0, 2**20)
    ('0.00 GiB', '0.0 MiB')
    """
    unit, factor, usual_digits = next((u for u in _UNITS if largest_bytes >= u[1]), _UNITS[-1])
    if digits is None or unit == "B":
        digits = usual_digits
    return f"{size_bytes / factor:,.{digits}f} {unit}"


def compact_count(count: int) -> str:
    """Return a large number with three or four digits.

    Examples
    --------
    >>> compact_count(950), compact_count(372_500_000_000)
    ('950', '372.5 G')
    """
    if abs(count) < 1000:
        return f"{count}"
    letter, factor = next((u for u in _COUNTS if abs(count) < 999.95 * u[1]), _COUNTS[-1])
    return f"{count / factor:,.1f} {letter}"


def signed_percent(ratio: float) -> str:
    """Return a ratio as a percentage with its sign.

    Examples
    --------
    >>> signed_percent(0.0844), signed_percent(-0.0000001)
    ('+8.4%', '+0.0%')
    """
    return f"{round(ratio * 100, 1) + 0.0:+.1f}%"


def at_least_percent(ratio: float) -> str:
    """Return a lower bound as a percentage, rounded down: the sentence around it must stay true.

    Examples
    --------
    >>> at_least_percent(0.0839), signed_percent(0.0839)
    ('+8.3%', '+8.4%')
    """
    return signed_percent(math.floor(ratio * 1000 + 1e-6) / 1000)


def operator_name(target: str) -> str:
    """Return an operator's own name.

    Examples
    --------
    >>> operator_name("aten.mm.default"), operator_name("given")
    ('mm', 'given')
    """
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def table(*columns: str, title: str, text_columns: int = 1) -> Table:
    """Return an empty table whose first columns are text, aligned left, and the others numbers."""
    made = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, name in enumerate(columns):
        if position < text_columns:
            made.add_column(Text(name), overflow="fold", min_width=8)
        else:
            made.add_column(Text(name), justify="right", no_wrap=True)
    return made


def cells(*contents: str, style: str = "") -> list[Text]:
    """Return contents as they are: names may hold what rich would read as markup."""
    return [Text(content, style=style) for content in contents]
