"""Measure the peak memory of running code."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch.autograd.profiler import profile

from planner.capture import torch_internals as internals
from planner.common.units import round_up
from planner.errors import UsageError
from planner.plans.allocator import MIN_BLOCK_BYTES

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Of glibc's ``malloc.h``."""


def measure_peak(step: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Run a step and return the most bytes that it held above what was there when it began.

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


def is_profiled() -> bool:
    """Whether a profiler of the user's is on; a log of a step stops for who asks."""
    if AllocationLog.current is not None:
        AllocationLog.current.stop()
    return internals.profiler_is_running()


_complained: list[bool] = []
"""Not empty once torch has warned, silenced, of a tensor that was freed."""


@contextmanager
def record() -> Iterator[Recording]:
    """Record allocations on the CPU; the recording is filled when the block ends.

    A UsageError says that a torch profiler is on: there cannot be a second one.
    """
    if is_profiled():
        raise UsageError("memory is measured by torch's profiler, and one is on already: measure outside it")
    recording, before = Recording(), [torch.empty(1)] if not _complained else []
    profiler = profile(use_kineto=True, profile_memory=True)
    with _quiet():
        profiler.__enter__()
        before.clear()  # torch complains of the first tensor that goes and that it did not see come
        _complained.append(True)
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


class AllocationLog:
    """What a device allocates and frees from now on, in parts that marks divide; it may begin and end anywhere.

    On a CPU torch's profiler tells, on CUDA the allocator's history: its peak counter belongs to the user.
    """

    current: ClassVar[AllocationLog | None] = None
    """The one that is open."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks_ns, self._stack = device, list[int](), ExitStack()
        self._recording: Recording | None = None
        self.found_bytes: int | None = None
        """What was asked for before, rounded up as plans do it; a CPU does not say."""
        if device.type == "cuda":
            self.found_bytes = sum(round_up(size, MIN_BLOCK_BYTES) for size in internals.start_history(device))
        else:
            with internals.memory_alone():
                self._recording = self._stack.enter_context(record())
        AllocationLog.current = self

    @staticmethod
    def can_start(device: torch.device) -> bool:
        """Whether nothing else watches what is allocated; other threads never do."""
        is_free = not internals.history_is_on() if device.type == "cuda" else not internals.profiler_is_running()
        return is_free and threading.current_thread() is threading.main_thread()

    def mark(self) -> None:
        """End a part, and begin another; what a backward does may mark."""
        if AllocationLog.current is not self:
            return
        self._marks_ns.append(time.time_ns())
        if self._recording is not None:
            torch.empty(_MARK_BYTES + len(self._marks_ns), dtype=torch.uint8, device="cpu")

    def stop(self) -> list[list[int]] | None:
        """Stop, outside of any backward, and return the signed bytes of each part; None if anything else measured."""
        if AllocationLog.current is not self:
            return None
        AllocationLog.current = None
        self._stack.close()
        if self._recording is None:
            changes = internals.stop_history(self._device)
            cuts = [0, *(bisect_left(changes, (mark,)) for mark in self._marks_ns), len(changes)]
            return [[change for _, change in changes[begin:end]] for begin, end in pairwise(cuts)]
        parts: list[list[int]] = [[]]
        for _, change in self._recording.changes:
            if not 0 < abs(change) - _MARK_BYTES <= len(self._marks_ns):
                parts[-1].append(change)
            elif change > 0:
                parts.append([])
        return parts if len(parts) == len(self._marks_ns) + 1 else None


_MARK_BYTES = 3_000_017
"""On a CPU a tensor of about this size, which is made and freed at once, is a mark among what is allocated."""


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
