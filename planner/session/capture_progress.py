"""Progress of captures and planning: one at a time, a bar on a terminal and a log line at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.plans.plan import Plan
from planner.report.progress import shown
from planner.report.verdict import verdict

_log = logging.getLogger("planner")

one_at_a_time = threading.RLock()
"""What is patched, measured and recorded meanwhile is the whole process's: torch's profiler aborts in two threads."""


@contextmanager
def log_progress(name: str, what: str = "planned") -> Iterator[Callable[[str, Plan | None], None]]:
    """Show how the work of the block stands; it calls what it is given with why it was needed, and what came of it.

    Another thread that comes here waits until the block ends.
    """
    begun = time.perf_counter()

    def done(why: str, plan: Plan | None) -> None:
        came = "nothing to plan" if plan is None else verdict(plan)
        _log.info("%s %s in %.1f s (%s): %s", what, name, time.perf_counter() - begun, why, came)

    with one_at_a_time, shown():
        yield done
