"""Show the progress of slow work: a bar on a terminal, lines elsewhere, nothing if it is quick."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

QUICK_SECONDS = 2.0
"""What takes no longer shows nothing."""


class Shown:
    """The current work and its progress; hidden for the first :data:`QUICK_SECONDS`."""

    def __init__(self, *, as_bar: bool, as_lines: bool) -> None:
        is_terminal = sys.stderr.isatty()
        self._as_bar, self._as_lines = as_bar and is_terminal, as_lines and not is_terminal
        self._began = time.perf_counter()
        self._line, self._done, self._total = "", 0, 0
        self._bar: Any = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(QUICK_SECONDS, self._start)
        self._timer.daemon = True
        if self._as_bar or self._as_lines:
            self._timer.start()

    def __call__(self, line: str) -> None:
        """Say what is being done."""
        with self._lock:
            is_new, self._line, self._done, self._total = line != self._line, line, 0, 0
            self._update(is_new)

    def count(self, done: int, total: int) -> None:
        """Say how much of it is done."""
        with self._lock:
            self._done, self._total = done, total
            self._update(True)

    def end(self) -> None:
        """Show nothing more."""
        self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar[0].stop()
                self._bar = None

    def _start(self) -> None:
        with self._lock:
            if self._as_bar:
                from rich.console import Console
                from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

                made = (SpinnerColumn(), BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
                bar = Progress(*made, console=Console(stderr=True), transient=True)
                self._bar = bar, bar.add_task("", total=None)
                bar.start()
            self._update(True)

    def _update(self, is_new: bool) -> None:
        counted = f" ({self._done} of {self._total})" if self._total else ""
        if self._bar is not None:
            from rich.markup import escape

            bar, task = self._bar
            bar.update(task, description=escape(self._line) + counted, completed=self._done, total=self._total or None)
        elif self._as_lines and is_new and self._line and time.perf_counter() - self._began >= QUICK_SECONDS:
            print(f"{time.perf_counter() - self._began:.0f} s: {self._line}{counted}", file=sys.stderr, flush=True)


_current: ContextVar[Shown | None] = ContextVar("shown", default=None)


@contextmanager
def shown(*, as_bar: bool = True, as_lines: bool = False) -> Iterator[Shown]:
    """Show progress of the block on standard error: a bar on a terminal, lines elsewhere.

    Work inside of work that is shown already is part of it.
    """
    if (around := _current.get()) is not None:
        yield around
        return
    showing = Shown(as_bar=as_bar, as_lines=as_lines)
    token = _current.set(showing)
    try:
        yield showing
    finally:
        _current.reset(token)
        showing.end()


def tell(line: str) -> None:
    """Report the current work where progress is shown."""
    if (showing := _current.get()) is not None:
        showing(line)
