"""How long each stage of planning takes: ``with timings.stage("lowering")`` wherever one runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

STAGES = ("capture", "lowering", "costing", "solving", "simulation", "baselines", "rewriting", "real steps")
"""In the order in which they are reported."""

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)
_inside: ContextVar[list[float] | None] = ContextVar("inside", default=None)


@contextmanager
def collected() -> Iterator[dict[str, float]]:
    """Return a dict that fills with the seconds of each stage that runs in the block."""
    found: dict[str, float] = {}
    token = _seconds.set(found)
    try:
        yield found
    finally:
        _seconds.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the time of a block to a stage; what a stage inside it takes is counted there alone."""
    found = _seconds.get()
    if found is None:
        yield
        return
    within: list[float] = []
    around = _inside.get()
    token = _inside.set(within)
    begun = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - begun
        _inside.reset(token)
        if around is not None:
            around.append(seconds)
        found[name] = found.get(name, 0.0) + seconds - sum(within)
