"""Limits of a search: a number of seconds, or an amount of counted work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real

from planner.errors import UsageError

Progress = Callable[[str], None]
"""Called with a short line on the progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveLimits:
    """The limits of a solve; raise UsageError for one that is not above zero."""

    time_limit_seconds: float = 30.0
    """Roughly when to stop improving."""
    deterministic: bool = False
    """Count work, not seconds: with the same versions of the libraries, the same problem gives the same plan every
    time, on a slow machine later than on a quick one. The limit then is what the work would take on a machine of 2024,
    within a factor of a few."""
    seed: int = 0
    """Seed of random choices."""
    enough: float = 0.0
    """How near to a proven bound a plan must come, as a share of the step: then the search for a better one ends."""
    told: Callable[[float], None] | None = field(default=None, compare=False, repr=False)
    """Called with the seconds of all counted work, for a limit on several solves together."""

    def __post_init__(self) -> None:
        limit = self.time_limit_seconds
        if not (isinstance(limit, Real) and limit > 0 and math.isfinite(limit)):
            raise UsageError(f"time limit must be a number above 0 s, not {limit!r}")

    def clock(self) -> Clock:
        """Start to count."""
        return Clock(self.time_limit_seconds, counts_work=self.deterministic, told=self.told)


class Clock:
    """How much of a limit is left; where work is counted, time passes only by :meth:`work`, on every machine alike.

    >>> clock = Clock(10.0, counts_work=True)
    >>> clock.work(4.0)
    >>> clock.left(), clock.left(0.5), clock.part(0.3).left()
    (6.0, 1.0, 3.0)
    """

    def __init__(
        self, limit_seconds: float, *, counts_work: bool = False, told: Callable[[float], None] | None = None
    ) -> None:
        self.limit_seconds = limit_seconds
        self.counts_work = counts_work
        self._started = 0.0 if counts_work else time.perf_counter()
        self._worked = 0.0
        self._told = told

    def work(self, seconds: float) -> None:
        """Count work that takes about so many seconds."""
        self._worked += seconds
        if self._told is not None:
            self._told(seconds)

    def part(self, share: float) -> Clock:
        """Start a clock for a share of the limit or of the rest; work counted there counts here too."""
        limit_seconds = max(min(share * self.limit_seconds, self.left()), 0.0)
        return Clock(limit_seconds, counts_work=self.counts_work, told=self.work)

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the limit is used up; negative after it."""
        now = self._worked if self.counts_work else time.perf_counter()
        return self._started + share * self.limit_seconds - now
