"""Threads take turns: captures and plans are made one at a time, and a wrapped model is called by one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_lock = threading.RLock()


class _Here(threading.local):
    depth = 0


_here = _Here()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let other threads wait with their captures and plans until the block ends.

    What is patched, measured and recorded meanwhile is the whole process's: torch's profiler aborts in two threads.
    """
    with _lock:
        _here.depth += 1
        try:
            yield
        finally:
            _here.depth -= 1


def turn_of(model_lock: threading.RLock) -> AbstractContextManager[object]:
    """Return what lets other threads wait with their calls of one model: its parts are replaced during a call.

    A call inside a capture does not wait. Whoever runs that model now may be waiting for the capture to end.
    """
    return nullcontext() if _here.depth else model_lock
