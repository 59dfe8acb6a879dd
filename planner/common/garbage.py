"""Let Python's garbage collector run rarely while planning.

A plan's data has few reference cycles, so collections find next to nothing and walk all of it each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = (50_000, 20, 100)
"""New objects before the young are walked, and how often that is done before all are."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Collect garbage rarely within the context."""
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def not_collected() -> Iterator[None]:
    """Turn automatic garbage collection off within the context."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
