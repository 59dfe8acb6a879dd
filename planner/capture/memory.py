"""Measure the peak memory of running code."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile

from planner.capture.torch_internals import profiler_is_running
from planner.common.units import round_up
from planner.errors import UsageError

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Of glibc's ``malloc.h``."""


def measure_peak(step: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Run a step and give the most bytes that it held above what was there when it began.

    On a CPU every allocation and release that the profiler reports is added up; on CUDA the
    allocator's own peak counter is read. What the step returned comes second.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before_bytes, result
    with record() as recording:
        result = step()
    return recording.peak_bytes(), result


def keep_freed_memory() -> bool:
    """Tell the C library to keep what this process frees, as CUDA's caching allocator does.

    Otherwise large tensors come from the system page by page, again and again, and a step with a lower
    peak is faster for that alone: measured steps then say little about recompute. Return whether there is such a
    switch: glibc has one, for the rest of the process.
    """
    try:
        library = ctypes.CDLL("libc.so.6")
        settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 256 << 20))
        return bool(sum(library.mallopt(setting, value) for setting, value in settings) == len(settings))
    except (OSError, AttributeError):
        return False


@dataclass
class Recording:
    """What the profiler saw on the CPU; times are in nanoseconds."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """Time and bytes of each allocation (positive) and release (negative), in order."""
    windows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Begin and end of each ``record_function`` label."""

    def peak_bytes(self, label: str | None = None, *, until: str | None = None, alignment_bytes: int = 1) -> int:
        """Return the most bytes held above what was there before: within a label, until one begins, or in all.

        Allocations count as they are, or rounded up to an alignment, as plans count them.
        """
        begin_ns, end_ns = self.windows[label] if label else (-math.inf, self.windows[until][0] if until else math.inf)
        within = slice(bisect_left(self.changes, (begin_ns,)), bisect_right(self.changes, (end_ns, math.inf)))
        signed = ((1 if change > 0 else -1, abs(change)) for _, change in self.changes[within])
        return max(accumulate((sign * round_up(size, alignment_bytes) for sign, size in signed), initial=0))

    def seconds(self, label: str) -> float:
        """Return how long a label took."""
        begin_ns, end_ns = self.windows[label]
        return (end_ns - begin_ns) / 1e9


@contextmanager
def record() -> Iterator[Recording]:
    """Record allocations on the CPU; the recording is filled when the block ends.

    A UsageError says that a torch profiler is on: there cannot be a second one.
    """
    if profiler_is_running():
        raise UsageError("memory is measured by torch's profiler, and one is on already: measure outside it")
    recording = Recording()
    profiler = profile(use_kineto=True, profile_memory=True)
    with _quiet():
        profiler.__enter__()
    try:
        yield recording
    finally:
        with _quiet():
            profiler.__exit__(None, None, None)
    # What torch.profiler makes of these takes ten times as long, and has no bytes of single allocations.
    assert profiler.kineto_results is not None
    events: list[Any] = profiler.kineto_results.events()
    recording.changes += sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    recording.windows.update({e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() != "[memory]"})


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's library, which logs to the process's standard error, from doing so."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
