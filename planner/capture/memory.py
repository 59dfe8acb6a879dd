"""Peak memory of running code, measured; and of code that is not run, by tracking fake storages."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.capture.operands import storage_bytes
from planner.capture.torch_internals import storage_id

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
    device : torch.device

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


class StorageTracker(TorchDispatchMode):
    """Follows the storages that eager code makes under a fake mode: ``peak_bytes`` is what it would need.

    Storages that were there before the tracker was entered do not count.
    """

    def __init__(self, alignment_bytes: int) -> None:
        super().__init__()
        self.alignment_bytes = alignment_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()
        self._sizes: dict[int, int] = {}

    def ignore(self, tensors: Any) -> None:
        """Take the tensors in a tree as resident."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, torch.Tensor):
                self._known.add(storage_id(leaf))

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Give the bytes behind a tensor that was made under the tracker; 0 for others."""
        return self._sizes.get(storage_id(tensor), 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage(), storage_bytes(function, read, leaf))
        return result

    def _follow(self, storage: torch.UntypedStorage, needed_bytes: int) -> None:
        identity = id(storage)
        if identity in self._known:
            return
        size_bytes = -(-needed_bytes // self.alignment_bytes) * self.alignment_bytes
        self._known.add(identity)
        self._sizes[identity] = size_bytes
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, identity, size_bytes)

    def _release(self, identity: int, size_bytes: int) -> None:
        self._known.discard(identity)
        del self._sizes[identity]
        self.live_bytes -= size_bytes
