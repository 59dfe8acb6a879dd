"""Peak memory of running code, measured."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Of glibc's ``malloc.h``."""


def measure_peak(step: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Run a step and give the most bytes that it held above what was there when it began.

    On a CPU every allocation and release that the profiler reports is added up; on CUDA the
    allocator's own peak counter is read.

    Parameters
    ----------
    step : callable
        Run once.

    Returns
    -------
    tuple
        Peak in bytes, and what the step returned.
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
    live_bytes = peak_bytes = 0
    for _, change_bytes in recording.changes:
        live_bytes += change_bytes
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes, result


def keep_freed_memory() -> bool:
    """Tell the C library to keep what this process frees, as CUDA's caching allocator does.

    Otherwise large tensors come from the system page by page, again and again, and a step with a lower
    peak is faster for that alone: measured steps then say little about recompute.

    Returns
    -------
    bool
        Whether there is such a switch: glibc has one, for the rest of the process.
    """
    try:
        library = ctypes.CDLL("libc.so.6")
        settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 256 << 20))
        return bool(sum(library.mallopt(setting, value) for setting, value in settings) == len(settings))
    except (OSError, AttributeError):
        return False


@dataclass
class Recording:
    """What the profiler saw on the CPU.

    Parameters
    ----------
    changes : list of tuple of int
        Time in nanoseconds and bytes of each allocation (positive) and release (negative), in order.
    windows : dict of str to tuple of int
        Begin and end in nanoseconds of each ``record_function`` label.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    windows: dict[str, tuple[int, int]] = field(default_factory=dict)


@contextmanager
def record() -> Iterator[Recording]:
    """Record allocations on the CPU; the recording is filled when the block ends."""
    recording = Recording()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _quiet():
        profiler.start()
    try:
        yield recording
    finally:
        with _quiet():
            profiler.stop()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
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
