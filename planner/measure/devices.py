"""Find the device that a model is on, its figures, and what settings of the environment change of what CUDA holds.

Workspaces of matrix libraries are torch's defaults by version (``aten/src/ATen/cuda/CublasHandlePool.cpp``) unless a
variable says otherwise; held against torch 2.11 and 2.14 in ``tests/cuda/test_workspace.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache

import torch

import cost_models
from cost_models.devices import DeviceSpec, library_bytes, unknown_gpu
from planner.capture.torch_internals import has_onednn
from planner.errors import UsageError
from planner.plans import device_file

_THREADS = 2
"""The forward's and the backward's: each has a workspace of its own."""
_LARGE_BYTES = 32 * 2**20
_SMALL_BYTES = (2 * 4096 + 8 * 16) * 2**10
_LT_BYTES = 2**20
_UNIFIED_SINCE = (2, 12)
"""The version since which cuBLASLt works in cuBLAS's workspace."""

_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""The first that is there counts."""


def here(device: torch.device) -> DeviceSpec:
    """Describe a device of this machine: by the table, or as far as its driver does."""
    if device.type != "cuda":
        spec = cost_models.device("cpu")
        if has_onednn(torch.bfloat16):
            return spec
        # Neither type of 16 bits has a fast kernel then.
        rates = spec.flops_per_second
        return replace(spec, flops_per_second={**rates, "bfloat16": rates["float16"]})
    name = torch.cuda.get_device_name(device)
    try:
        spec = cost_models.device(name)
    except cost_models.UnknownNameError:
        facts = torch.cuda.get_device_properties(device)
        bus_bits, memory_kilohertz = getattr(facts, "memory_bus_width", 256), getattr(facts, "memory_clock_rate", 7e6)
        spec = unknown_gpu(
            name,
            architecture=facts.gcnArchName.split(":")[0] if torch.version.hip else f"sm{facts.major}{facts.minor}",
            memory_bytes=facts.total_memory,
            multiprocessors=facts.multi_processor_count,
            clock_hertz=1e3 * getattr(facts, "clock_rate", 1.5e6),
            memory_bits_per_second=2e3 * memory_kilohertz * bus_bits,
        )
    return _under_this_torch(spec if _can_pin() else replace(spec, host_link_bytes_per_second=0.0))


@cache
def _can_pin() -> bool:
    """Whether memory of the host can be pinned: copies to other memory let computing wait."""
    with suppress(RuntimeError):
        return torch.empty(1, pin_memory=True) is not None
    return False


def find(name: str) -> DeviceSpec:
    """Return the figures of a named device, of a device file, or of a card that is here, under this torch."""
    if name.startswith("cuda"):
        return here(torch.device("cuda", card(name)))
    return _under_this_torch(device_file.find(name))


def card(name: str) -> int:
    """Return the number of a card that is here by torch's name, ``cuda`` or ``cuda:0``."""
    if not re.fullmatch(r"cuda(:\d)?", name):
        raise UsageError(f"unknown device {name!r}: a card that is here is cuda or cuda:0")
    number, there = int(name[5:] or 0), torch.cuda.device_count()
    if number >= there:
        raise UsageError(f"{name}: CUDA devices here: {there}; name the one to plan for, like h100")
    return number


def _under_this_torch(spec: DeviceSpec) -> DeviceSpec:
    """Let matrix libraries keep what they do in this version of torch; what a device file says of them stays."""
    if spec.library_bytes != library_bytes(spec.architecture):
        return spec
    return replace(spec, library_bytes=sum(workspaces(spec.architecture)))


def _is_here(spec: DeviceSpec, device: torch.device) -> bool:
    return spec.kind == device.type and (spec.kind == "cpu" or spec.name == here(device).name)


def place(wanted: str | None) -> str:
    """Say where to build a model that is to be planned for a device: on the GPU of this machine if it is that one."""
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if wanted is None or _is_here(find(wanted), torch.device("cuda")) else "cpu"


def device_here(device: torch.device, spec: DeviceSpec) -> torch.device | None:
    """Return the device that a model is on if it is the one that is planned for, so that it can be asked."""
    return device if _is_here(spec, device) else None


def device_spec(device: torch.device, name: str | None) -> DeviceSpec:
    """Return the figures of a named device, or of the one that a model is on."""
    return find(name) if name else here(device)


def workspaces(
    architecture: str, environment: Mapping[str, str] = os.environ, version: str = torch.__version__
) -> tuple[int, ...]:
    """Return the size of each piece that cuBLAS and cuBLASLt keep, as torch makes them on its two threads.

    Examples
    --------
    >>> workspaces("sm90", {}, "2.14.1"), workspaces("sm80", {}, "2.11.0")
    ((33554432, 33554432), (8519680, 1048576, 8519680, 1048576))
    """
    if not architecture.startswith("sm"):  # AMD's, and CPUs
        whole = library_bytes(architecture)
        return (whole // _THREADS,) * _THREADS if whole else ()
    major, minor = (int(part) for part in version.split(".")[:2])
    is_old = (major, minor) < _UNIFIED_SINCE
    large = ("sm90",) if is_old else ("sm90", "sm100", "sm103", "sm120")
    found = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    default_bytes = _LARGE_BYTES if architecture in large else _SMALL_BYTES
    of_each = [2**10 * sum(int(size) * int(count) for size, count in found) if found else default_bytes]
    if is_old:
        of_each.append(_LT_BYTES)
    return tuple(of_each) * _THREADS


def pieces(spec: DeviceSpec) -> tuple[int, ...]:
    """Return the pieces of a device's ``library_bytes``: of a device file nothing else is known."""
    known = workspaces(spec.architecture)
    if sum(known) == spec.library_bytes:
        return known
    return (spec.library_bytes // _THREADS, spec.library_bytes - spec.library_bytes // _THREADS)


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether segments of the caching allocator grow.

    Examples
    --------
    >>> expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    True
    """
    return _allocator_settings(environment)[1].get("expandable_segments") == "True"


def not_simulated(environment: Mapping[str, str] = os.environ) -> str:
    """Name settings of the allocator that are not simulated, another allocator or other rules; ``""`` if none is.

    Examples
    --------
    >>> not_simulated({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    'PYTORCH_CUDA_ALLOC_CONF sets backend:cudaMallocAsync'
    """
    name, settings = _allocator_settings(environment)
    others = [
        f"{key}:{value}"
        for key, value in settings.items()
        if not (key == "expandable_segments" or key.startswith("pinned_") or f"{key}:{value}" == "backend:native")
    ]
    return f"{name} sets {', '.join(others)}" if others else ""


def _allocator_settings(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    name = next((name for name in _ALLOCATOR if environment.get(name)), "")
    return name, dict(re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", environment.get(name, "").replace(" ", "")))
