"""Figures of devices: memory, bandwidth and peak FLOP/s.

Peak figures are the vendor's published ones, dense (no sparsity), matrix units included where
PyTorch uses them: float32 is the plain float32 rate, ``"tf32"`` the one that
``torch.set_float32_matmul_precision("high")`` turns on. ``memory_bytes`` is what a process is
told it can have (``torch.cuda.mem_get_info``), 1 to 8% less than the nominal size.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_GIB = 2**30
_GB = 10**9
_TERA = 10**12


class UnknownNameError(ValueError):
    """No device or cost model has this name; the message lists the nearest."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        known = tuple(known)
        begin_so = [each for each in known if name and each.startswith(name.lower())]
        near = begin_so[:3] or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        super().__init__(f"unknown {what} {name!r}: {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device.

    Parameters
    ----------
    name : str
        Lower case, as :func:`device` finds it.
    kind : str
        What PyTorch calls it: ``"cpu"`` or ``"cuda"`` (AMD's too).
    memory_bytes : int
        What a process can allocate.
    bandwidth_bytes_per_second : float
        Peak memory bandwidth.
    flops_per_second : mapping of str to float
        Peak dense rate by element type; see :meth:`peak_flops_per_second`.
    launch_seconds : float
        Least time between two kernels.
    alignment_bytes : int
        What PyTorch's allocator rounds sizes up to.
    host_link_bytes_per_second : float
        Bandwidth to the host's memory, one direction; 0 where there is none, or none is known.
    source : str
        Where the figures come from.
    compute_efficiency, bandwidth_efficiency : float
        Fraction of the peaks that large operations reach.
    cores : int
        Threads that share one kernel; what rates per core are scaled by. 1 except on a CPU.
    architecture : str
        Decides which kernels PyTorch takes: ``"sm80"``, ``"gfx942"``; empty on a CPU.
    library_bytes : int
        Allowance for what matrix libraries keep allocated for good: in training, one workspace of
        cuBLAS for the thread of the forward and one for that of the backward.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops_per_second: Mapping[str, float] = field(hash=False)
    launch_seconds: float
    alignment_bytes: int
    host_link_bytes_per_second: float
    source: str
    compute_efficiency: float = 0.7
    bandwidth_efficiency: float = 0.8
    cores: int = 1
    architecture: str = ""
    library_bytes: int = 0

    def peak_flops_per_second(self, dtype: str) -> float:
        """Peak rate for an element type; the float32 rate for a type without one of its own.

        Examples
        --------
        >>> device("h100").peak_flops_per_second("bfloat16") / 1e12
        989.4
        """
        return self.flops_per_second.get(dtype, self.flops_per_second["float32"])


def cpu(cores: int | None = None, *, memory_bytes: int | None = None) -> DeviceSpec:
    """Describe a CPU, crudely: so much per core of a server with AVX-512; by default the cores that we may run on."""
    cores = cores or available_cores()
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        memory_bytes=memory_bytes or _physical_memory_bytes(),
        # Bandwidth of a core is what torch 2.13 reached adding tensors of 25 MB, single-threaded;
        # the flops are a 2,048 x 768 by 768 x 3,072 product. float16 has no fast kernel.
        bandwidth_bytes_per_second=20 * _GB * cores,
        flops_per_second={
            "float32": 100e9 * cores,
            "bfloat16": 200e9 * cores,
            "float16": 1e9,
            "float64": 50e9 * cores,
        },
        launch_seconds=2e-6,
        alignment_bytes=64,
        host_link_bytes_per_second=20 * _GB,
        source="crude per-core figures of an x86 server with AVX-512; measure instead",
        compute_efficiency=0.9,
        bandwidth_efficiency=0.75,
        cores=cores,
    )


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: what this process was given, not what the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _physical_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 16 * _GIB


# Which card, from which document; rates in TFLOP/s, bandwidth and host link (PCIe x16, one
# direction) in GB/s, memory in GiB. "half" is float16 and bfloat16, accumulated in float32. The share of the peaks that
# an H200 reaches was measured (benchmarks/results/gpu.json: 730 in bfloat16, 688 in float16, 366 in tf32, 50.8 in
# float32); its link moved 55 GB/s, which is near the share that bandwidths have.
# fmt: off
_GPU_COLUMNS = (
    "architecture", "multiprocessors", "memory", "bandwidth", "half", "tf32", "float32", "link", "compute_efficiency",
    "source",
)
_GPU_FIGURES = {
    "rtx-3090": ("sm86",    82,  23.6,  936,   71.0,   35.6,  35.6, 32, 0.8, "NVIDIA Ampere GA102 whitepaper"),
    "rtx-4090": ("sm89",   128,  23.5, 1008,  165.2,   82.6,  82.6, 32, 0.8, "NVIDIA Ada architecture whitepaper"),
    "rtx-5090": ("sm120",  170,  31.3, 1792,  209.5,  104.8, 104.8, 64, 0.8, "NVIDIA RTX Blackwell whitepaper"),
    "a10":      ("sm86",    72,  22.0,  600,  125.0,   62.5,  31.2, 32, 0.7, "NVIDIA A10 datasheet"),
    "a10g":     ("sm86",    80,  22.1,  600,   70.0,   35.0,  35.0, 32, 0.7, "NVIDIA A10G datasheet"),
    "a100-40":  ("sm80",   108,  39.4, 1555,  312.0,  156.0,  19.5, 32, 0.7, "NVIDIA A100 datasheet"),
    "a100-80":  ("sm80",   108,  79.2, 2039,  312.0,  156.0,  19.5, 32, 0.7, "NVIDIA A100 80GB datasheet, SXM"),
    "a100-80-pcie": ("sm80", 108, 79.1, 1935, 312.0, 156.0, 19.5, 32, 0.7, "NVIDIA A100 80GB datasheet, PCIe"),
    "l4":       ("sm89",    58,  22.0,  300,  121.0,   60.0,  30.3, 32, 0.6, "NVIDIA L4 datasheet"),
    "l40s":     ("sm89",   142,  44.4,  864,  362.0,  183.0,  91.6, 32, 0.6, "NVIDIA L40S datasheet"),
    "h100":     ("sm90",   132,  79.1, 3350,  989.4,  494.7,  66.9, 64, 0.7, "NVIDIA H100 whitepaper, SXM"),
    "h100-pcie": ("sm90",  114,  79.1, 2000,  756.5,  378.0,  51.2, 64, 0.7, "NVIDIA H100 datasheet, PCIe"),
    "h100-nvl": ("sm90",   132,  93.0, 3938,  835.5,  417.5,  60.0, 64, 0.7, "NVIDIA H100 NVL datasheet, one card"),
    "gh200":    ("sm90",   132,  95.0, 4000,  989.4,  494.7,  66.9, 450, 0.7, "NVIDIA GH200 datasheet, 96 GB of HBM3"),
    "h20":      ("sm90",    78,  95.0, 4000,  148.0,   74.0,  44.0, 64, 0.7, "NVIDIA H20, 96 GB, as others quote it"),
    "h200":     ("sm90",   132, 139.8, 4800,  989.4,  494.7,  66.9, 64, 0.74, "NVIDIA H200 datasheet, SXM"),
    "b200":     ("sm100",  148, 178.0, 8000, 2250.0, 1125.0,  75.0, 64, 0.7, "NVIDIA DGX B200 datasheet, one of 8"),
    "mi300x":   ("gfx942", 304, 191.9, 5300, 1307.4,  653.7, 163.4, 64, 0.5, "AMD Instinct MI300X data sheet"),
}
# fmt: on


def _gpu(name: str) -> DeviceSpec:
    figures: dict[str, Any] = dict(zip(_GPU_COLUMNS, _GPU_FIGURES[name], strict=True))
    rates = {dtype: figures[dtype] for dtype in ("tf32", "float32")}
    rates |= dict.fromkeys(("float16", "bfloat16"), figures["half"])
    return DeviceSpec(
        name=name,
        kind="cuda",
        memory_bytes=int(figures["memory"] * _GIB),
        bandwidth_bytes_per_second=figures["bandwidth"] * _GB,
        flops_per_second={dtype: rate * _TERA for dtype, rate in rates.items()},
        # Kernels that are queued back to back start about this far apart, whatever the card.
        launch_seconds=4e-6,
        alignment_bytes=512,
        host_link_bytes_per_second=figures["link"] * _GB,
        source=figures["source"],
        compute_efficiency=figures["compute_efficiency"],
        architecture=figures["architecture"],
        library_bytes=library_bytes(figures["architecture"]),
    )


def unknown_gpu(
    name: str,
    *,
    architecture: str,
    memory_bytes: int,
    multiprocessors: int,
    clock_hertz: float,
    memory_bits_per_second: float,
) -> DeviceSpec:
    """Describe a GPU that is not in the table by what its driver tells; memory's rate is that of the whole bus.

    128 multiply-adds of float32 a clock in each multiprocessor, and four times as many on matrix units in 16 bits, are
    right for consumer cards since Ampere, too little for those of data centres.
    """
    float32 = 2 * 128 * multiprocessors * clock_hertz
    return DeviceSpec(
        name=name.lower(),
        kind="cuda",
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_second=memory_bits_per_second / 8,
        flops_per_second={"float32": float32, "tf32": 2 * float32, "float16": 4 * float32, "bfloat16": 4 * float32},
        launch_seconds=4e-6,
        alignment_bytes=512,
        host_link_bytes_per_second=32 * _GB,
        source="figures of its driver; calibrate or measure instead",
        architecture=architecture,
        library_bytes=library_bytes(architecture),
    )


def library_bytes(architecture: str) -> int:
    """Return what matrix libraries keep for one thread of the forward and one of the backward.

    Sizes of a workspace are the defaults of torch 2.12 and later (``aten/src/ATen/cuda/CublasHandlePool.cpp``). For the
    torch at hand :mod:`planner.measure.devices` knows better.

    Examples
    --------
    >>> library_bytes("sm80"), library_bytes("sm90"), library_bytes("")
    (17039360, 67108864, 0)
    """
    if not architecture:
        return 0
    if architecture in ("sm90", "sm100", "sm103", "sm120"):
        return 2 * 32 * 2**20
    if architecture.startswith("gfx"):  # that of rocBLAS on MI300, and that of hipBLASLt
        return 2 * (128 + 76) * 2**20
    return 2 * (2 * 4096 + 8 * 16) * 2**10


def multiprocessors(name: str) -> int:
    """Return how many multiprocessors a device of the table has, else an A100's: some kernels take memory for each.

    Examples
    --------
    >>> multiprocessors("h100"), multiprocessors("a card of my own")
    (132, 108)
    """
    figures: dict[str, Any] = dict(zip(_GPU_COLUMNS, _GPU_FIGURES.get(name, _GPU_FIGURES["a100-80"]), strict=True))
    return int(figures["multiprocessors"])


def device_names() -> tuple[str, ...]:
    """Names that :func:`device` knows, the CPU first, then as they came to market."""
    return ("cpu", *_GPU_FIGURES)


def device(name: str) -> DeviceSpec:
    """Find a device by name, in any case, with or without dashes, blanks and ``rtx``, or raise UnknownNameError.

    Examples
    --------
    >>> device("RTX 4090").name, device("A100-80GB").name
    ('rtx-4090', 'a100-80')
    """
    key = _normalised(name)
    if key == "cpu":
        return cpu()
    for known in _GPU_FIGURES:
        if key == _normalised(known):
            return _gpu(known)
    raise UnknownNameError("device", name, device_names())


_NOISE = re.compile(r"nvidia|amd|geforce|rtx|instinct|sxm\d?|hbm\de?|oam|gb|[-_ ]")


def _normalised(name: str) -> str:
    """Reduce what drivers and people call a card to what tells it from others.

    Examples
    --------
    >>> [_normalised(n) for n in ("NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB")]
    ['4090', 'h100', 'gh200']
    """
    # What a GH200 adds is the memory of its CPU.
    return re.sub(r"^(h100(?=80$)|gh200(?=\d{3}$))\d+$", r"\1", _NOISE.sub("", name.lower()))
