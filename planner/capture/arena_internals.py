"""Before torch's CPU allocator, one that knows fixed places for a step's memory: ``arena.cpp``, compiled on demand.

That file says why it is safe. That torch's allocator can be replaced is not written down; tests/capture try it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from planner.common import cache_folder
from planner.errors import RuntimeUnsupportedError

FORWARD, BETWEEN, BACKWARD = 0, 1, 2
"""Parts of a step."""

_SOURCE = Path(__file__).with_name("arena.cpp")
_KIND = "arena"


def missing() -> str | None:
    """Name what an arena needs and does not find, or None."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    return None if _compiler() else "a C++ compiler (g++, clang++, or what the environment variable CXX names)"


class Memory:
    """Bytes that belong to an arena: given back to the system when nothing lies in them any more."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.handle = _library().arena_memory(size_bytes)
        if not self.handle:
            raise MemoryError(f"an arena of {size_bytes} bytes is more than the system gives")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            _library().arena_release(self.handle)


class Table:
    """The allocations of a step, one after the other: it records them, or has places for them."""

    def __init__(self, handle: int | None = None) -> None:
        self.handle = handle or _library().arena_table()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            _library().arena_forget(self.handle)

    def enter(self, part: int) -> None:
        """Let this thread's next allocations be those of a part of the step."""
        _library().arena_enter(self.handle, part)

    def recorded(self) -> list[tuple[int, int]]:
        """Return each allocation's size, and how many had been made when it was freed, -1 if it is still there."""
        count = _library().arena_recorded(self.handle)
        sizes, died = (ctypes.c_int64 * count)(), (ctypes.c_int64 * count)()
        _library().arena_read(self.handle, count, sizes, died)
        return list(zip(sizes, died, strict=True))

    def placed(self, offsets: Sequence[int], memory: Memory) -> Table:
        """Return a table with places for what this one recorded; those below 0 stay outside."""
        given = (ctypes.c_int64 * len(offsets))(*offsets)
        return Table(_library().arena_placed(self.handle, len(offsets), given, memory.handle))

    def counts(self) -> tuple[int, int]:
        """Return how many allocations lay at their places since this was last asked, and how many did not."""
        counts = (ctypes.c_int64 * 2)()
        _library().arena_counts(self.handle, counts)
        return counts[0], counts[1]


def leave() -> None:
    """Let this thread's allocations be nobody's."""
    _library().arena_leave()


@cache
def _library() -> ctypes.PyDLL:
    """Return the library, installed: from then on torch's CPU allocations go through it."""
    library = ctypes.PyDLL(str(_built()))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("install", number, ()),
        ("table", pointer, ()),
        ("forget", None, (pointer,)),
        ("enter", None, (pointer, number)),
        ("leave", None, ()),
        ("recorded", number, (pointer,)),
        ("read", None, (pointer, number, pointer, pointer)),
        ("memory", pointer, (number,)),
        ("release", None, (pointer,)),
        ("placed", pointer, (pointer, number, pointer, pointer)),
        ("counts", None, (pointer, pointer)),
    ):
        function = getattr(library, f"arena_{name}")
        function.restype, function.argtypes = result, arguments
    if not library.arena_install():
        raise RuntimeUnsupportedError("something else allocates this process's tensors: leave arena out")
    return library


def _built() -> Path:
    """Return the compiled library, made now or kept from an earlier process."""
    source, compiler = _SOURCE.read_bytes(), _compiler()
    if lacking := missing():
        raise RuntimeUnsupportedError(f"an arena needs {lacking}, and there is none: leave arena out")
    assert compiler is not None
    digest = hashlib.sha256(source + f"{torch.__version__} {platform.machine()} {compiler}".encode()).hexdigest()[:16]
    kept = cache_folder.folder(_KIND)
    place = kept if kept is not None else Path(tempfile.mkdtemp(prefix="arena-"))
    path = place / f"{digest}.so"
    if path.is_file():
        return path
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = place / f"{digest}.{os.getpid()}"
    command = [
        compiler, "-O2", "-std=c++20", "-fPIC", "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in include_paths()), str(_SOURCE), "-o", str(written),
        *(f"-L{folder}" for folder in library_paths()), "-lc10",
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        with suppress(OSError):
            written.unlink()
        raise RuntimeUnsupportedError(f"{compiler} did not compile the arena's allocator: {made.stderr.strip()[:400]}")
    written.replace(path)
    return path


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next((found for name in (named, "c++", "g++", "clang++") if name and (found := shutil.which(name))), None)
