"""Sizes and durations as people write and read them; the only place that parses a size."""

from __future__ import annotations

import contextlib
import math
import re
from numbers import Real

from planner.errors import UsageError

Size = int | float | str
"""Bytes, ``"8GiB"``, ``"8GB"`` or ``"60%"`` of eager's peak."""

_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,  # as ls and docker read them
}  # fmt: skip
_UNITS = (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1))
_SIZE = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]*)?|-?\.[0-9]+)\s*([A-Za-z]*)\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
_HINT = "write bytes (8589934592), '8GiB', '8GB' or '60%' of eager's peak"


def parse_size(size: Size, *, whole_bytes: int | None = None) -> int:
    """Turn a size into bytes, rounded down.

    Sizes are bytes, ``"8GiB"`` or ``"8G"`` (2**30), ``"8GB"`` (10**9) and ``"60%"`` of the whole.
    A UsageError says that it cannot be read, is not above zero, or is a percentage where the whole is not known.

    >>> parse_size("1.5GiB"), parse_size("2 GB"), parse_size("50%", whole_bytes=1000)
    (1610612736, 2000000000, 500)
    """
    if isinstance(size, bool) or not isinstance(size, (Real, str)):
        raise UsageError(f"a size must be a number or text, not {type(size).__name__}: {_HINT}")
    if isinstance(size, Real):  # numpy's numbers too
        value = int(size) if math.isfinite(size) else -1
    elif len(size) > 64:
        raise UsageError(f"cannot read size {size[:16]!r}...: {_HINT}")
    elif percent := _PERCENT.fullmatch(size):
        if whole_bytes is None:
            raise UsageError(f"size {size!r} is a percentage, and there is nothing here to take it of")
        value = int(whole_bytes * float(percent[1]) / 100)
    elif match := _SIZE.fullmatch(size):
        factor = _FACTORS.get(match[2].lower())
        if factor is None:
            raise UsageError(f"unknown unit {match[2]!r} in size {size!r}: {_HINT}")
        value = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    else:
        raise UsageError(f"cannot read size {size!r}: {_HINT}")
    if value == 0 and (share := 100 * _as_number(size)) > 0:
        raise UsageError(f"size {size!r} is less than a byte: did you mean '{share:g}%'?")
    if value <= 0:
        raise UsageError(f"size {size!r} is not above zero: {_HINT}")
    return value


def _as_number(size: Size) -> float:
    with contextlib.suppress(ValueError):
        return float(size)
    return 0.0


def is_share(size: Size | None) -> bool:
    """Whether a size is a percentage of something.

    >>> is_share("60%"), is_share("8GiB")
    (True, False)
    """
    return isinstance(size, str) and _PERCENT.fullmatch(size) is not None


def round_up(size: int, unit: int) -> int:
    """Return the least multiple of a unit that is no smaller.

    >>> round_up(513, 512), round_up(512, 512)
    (1024, 512)
    """
    return -(-size // unit) * unit


def format_bytes(size_bytes: int | float) -> str:
    """Return a size in the binary unit that suits it.

    >>> format_bytes(1536), format_bytes(3 * 2**30)
    ('1.5 KiB', '3.00 GiB')
    """
    return in_unit_of(size_bytes, abs(size_bytes))


def in_unit_of(size_bytes: int | float, largest_bytes: int | float, *, digits: int | None = None) -> str:
    """Return a size in the unit that suits the largest of a column, so that the column can be added up.

    >>> in_unit_of(1536 * 2**10, 3 * 2**30), in_unit_of(0, 2**20)
    ('0.00 GiB', '0.0 MiB')
    """
    if largest_bytes < 1024:
        return f"{size_bytes:.0f} B"
    unit, factor, usual_digits = next(u for u in _UNITS if largest_bytes >= u[1])
    return f"{size_bytes / factor:,.{usual_digits if digits is None else digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit that suits it.

    >>> format_seconds(0.0000123), format_seconds(0.0456), format_seconds(2)
    ('12 us', '45.6 ms', '2.00 s')
    """
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def format_percent(ratio: float) -> str:
    """Return a ratio as a percentage with one decimal.

    >>> format_percent(0.0844)
    '8.4%'
    """
    return f"{ratio * 100:.1f}%"
