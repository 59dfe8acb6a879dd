"""Offload tensors to host memory and fetch them back, overlapped with compute: what planned graphs call.

A planned graph holds an offloaded tensor as its *place*: bytes of the host as a CPU tensor, which
autograd saves like any other. On CUDA a place is pinned, and copies run on two streams of their own,
one each way; computing waits for them only where the graph says so. On a CPU there is no second
memory: places are then ordinary memory that torch's allocator does not hand out, so that what is
measured on the device is what a device would hold, and copies are done at once.

Graphs that Inductor compiles call the same functions as operators. There a tensor's memory may be a part of another's,
so its own part alone is sent; what Inductor is to keep in order is said to be written to.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Any

import torch

from planner.capture.inductor_order_internals import HOST_COPIES
from planner.common.units import format_bytes
from planner.errors import RuntimeUnsupportedError


def offload(tensor: torch.Tensor, size_bytes: int | None = None) -> torch.Tensor:
    """Begin to copy a tensor's storage, or so many bytes from its first on, to the host; give the place for it."""
    device, first = tensor.device, 0 if size_bytes is None else tensor.storage_offset()
    if size_bytes is None:  # all of its storage, whatever of it the tensor shows
        size_bytes = tensor.untyped_storage().nbytes()
    of = tensor.as_strided((size_bytes // tensor.itemsize,), (1,), first)
    is_beside = _copies_beside(device)
    place = POOL.take(size_bytes, tensor.dtype, pinned=is_beside)
    record = POOL.record(place)
    record.layout = (tensor.size(), tensor.stride(), tensor.storage_offset() - first)
    record.device = device
    if is_beside:
        record.copy(place, of, _streams(device)[0])
        record.moving = of
    else:
        place.copy_(of)
    return place


def wait_offload(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Make the compute stream wait until a tensor is sent; its memory may then be reused."""
    POOL.record(place).wait()


def reload(place: torch.Tensor) -> torch.Tensor:
    """Take memory on the device again, and begin to copy back what a place holds."""
    record = POOL.record(place)
    there = torch.empty(place.numel(), dtype=place.dtype, device=record.device)
    if _copies_beside(record.device):
        record.copy(there, place, _streams(record.device)[1])
        record.moving = there
    else:
        there.copy_(place)
    return there.as_strided(*record.layout)


def wait_reload(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Make the compute stream wait until a tensor is fetched."""
    POOL.record(place).wait()


def keep(place: torch.Tensor) -> None:
    """Hold a place to the end of a forward: the next step then finds memory for each, and pins none."""


_LIBRARY: Any = torch.library.Library(HOST_COPIES, "DEF")  # type: ignore[no-untyped-call]


def _operator(schema: str, run: Any, fake: Any = lambda *_: None) -> Any:
    name = _LIBRARY.define(schema, tags=torch.Tag.needs_exact_strides)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{HOST_COPIES}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, HOST_COPIES), name).default


OPERATORS = {
    offload: _operator(
        "offload(Tensor tensor, int size_bytes) -> Tensor",
        offload,
        lambda tensor, size_bytes: torch.empty(size_bytes // tensor.itemsize, dtype=tensor.dtype),
    ),
    wait_offload: _operator("wait_offload(Tensor(a!) place, Tensor tensor) -> ()", wait_offload),
    reload: _operator(
        "reload(Tensor place, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor",
        lambda place, *_: reload(place),
        lambda _, size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype, device=device),
    ),
    wait_reload: _operator("wait_reload(Tensor(a!) tensor, Tensor place) -> ()", wait_reload),
    keep: _operator("keep(Tensor(a!) place) -> ()", keep),
}
"""What compiled code calls in place of each function."""


def _copies_beside(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Return the streams to the host and back: one copy engine each."""
    return torch.Stream(device), torch.Stream(device)


@dataclass(slots=True, eq=False)
class _Record:
    """Some memory of the host, the last copy to or from it, and the layout of the tensor whose place it is."""

    memory: mmap.mmap
    size_bytes: int
    pinned: bool
    address: int
    copied: torch.Event | None = None
    """The event after the last copy, also one of a tensor that had the place before."""
    layout: tuple[Any, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lease: Any = None
    """Calls back when the place goes; ``weakref.finalize`` took 1 of the 17 us that a value cost."""
    moving: torch.Tensor | None = None
    """Keeps the memory on the device that the copy is of from others, should a step break off."""

    def copy(self, to: torch.Tensor, of: torch.Tensor, stream: torch.Stream) -> None:
        """Begin a copy, after all that computes in that memory, and after the last copy."""
        self.settle()  # of a backward that has broken off, and runs again
        stream.wait_stream(torch.accelerator.current_stream(self.device.index))
        if self.copied is not None:
            stream.wait_event(self.copied)
        with stream:
            to.copy_(of, non_blocking=True)
        self.copied = stream.record_event()

    def wait(self) -> None:
        """Let the compute stream wait for the copy that is under way, if there is one."""
        if self.moving is not None and self.copied is not None:
            torch.accelerator.current_stream(self.device.index).wait_event(self.copied)
            self.moving = None

    def settle(self) -> None:
        """Wait for a copy that no stream has waited for."""
        if self.moving is not None and self.copied is not None:
            self.copied.synchronize()
            self.moving = None


class Pool:
    """Host memory that is used again from step to step: it never grows beyond what was in use at once."""

    def __init__(self) -> None:
        self.in_use_bytes = self.peak_bytes = 0
        """In use now, and at most so far."""
        self._free: defaultdict[tuple[int, bool], list[_Record]] = defaultdict(list)
        self._free_bytes = 0
        self._records: dict[int, _Record] = {}
        self._lock = RLock()  # backwards run in threads of their own, and places come back in any of them

    def take(self, size_bytes: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        """Return a place of so many bytes; it comes back by itself when nothing refers to it any more."""
        with self._lock:
            free = self._free[size_bytes, pinned]
            if free:
                record = free.pop()
                self._free_bytes -= size_bytes
            else:
                self._shrink(self.peak_bytes - self.in_use_bytes - size_bytes)
                memory = _memory(size_bytes, pinned=pinned)
                record = _Record(memory, size_bytes, pinned, _address(memory))
                self._records[record.address] = record
            self.in_use_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        lease = memoryview(record.memory)
        # The storage, and nothing else, holds the lease, so this runs when the storage goes.
        record.lease = weakref.ref(lease, lambda _: self._give_back(record))
        return torch.frombuffer(lease, dtype=dtype)

    def record(self, place: torch.Tensor) -> _Record:
        """Return what is known of a place."""
        record = self._records.get(place.data_ptr())
        if record is None:
            raise RuntimeUnsupportedError(
                "a hook has replaced the placeholder of an offloaded value by a copy: call the model outside of "
                "saved_tensors_hooks and save_on_cpu, or plan without offload"
            )
        return record

    def _give_back(self, record: _Record) -> None:
        record.settle()
        with self._lock:
            self.in_use_bytes -= record.size_bytes
            self._free[record.size_bytes, record.pinned].append(record)
            self._free_bytes += record.size_bytes

    def _shrink(self, most_free_bytes: int) -> None:
        """Return memory of other sizes back to the system until no more than so much is kept."""
        for free in self._free.values():
            while free and self._free_bytes > most_free_bytes:
                record = free.pop()
                if record.copied is not None:
                    record.copied.synchronize()
                if record.pinned:
                    _cuda_runtime().cudaHostUnregister(record.address)
                del self._records[record.address]
                record.memory.close()
                self._free_bytes -= record.size_bytes


POOL = Pool()


def _memory(size_bytes: int, *, pinned: bool) -> mmap.mmap:
    """Take memory of the host that torch's allocators know nothing of: they would round it up to a power of two."""
    try:
        memory = mmap.mmap(-1, size_bytes)
    except OSError as error:
        raise RuntimeUnsupportedError(_none_left(size_bytes, str(error))) from error
    if pinned:
        code = int(_cuda_runtime().cudaHostRegister(_address(memory), size_bytes, 0))
        if code:
            memory.close()
            raise RuntimeUnsupportedError(_none_left(size_bytes, f"cudaHostRegister gives error {code}"))
    return memory


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _none_left(size_bytes: int, reason: str) -> str:
    return (
        f"no {'pinned ' if torch.cuda.is_available() else ''}host memory is left for an offloaded value of "
        f"{format_bytes(size_bytes)} ({reason}), beside {format_bytes(POOL.in_use_bytes)} in use: plan with a smaller "
        "host_budget, or raise the limit on locked memory (ulimit -l)"
    )


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
