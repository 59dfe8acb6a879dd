"""The slow tier, marked where its tests stand: cases that try more of what a quick one covers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], *, slow: Collection[Any] | None = None, quick: Collection[Any] = ()) -> list[Any]:
    """Return parameters of a test of which the ``slow`` ones, or all but the ``quick`` ones, carry the mark."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        if (value in slow if slow is not None else value not in quick)
        else value
        for value in values
    ]
