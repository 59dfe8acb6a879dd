"""Measure the rates of a device of this machine with a few timed kernels, in place of a data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from statistics import median
from typing import Any

import torch

from cost_models.devices import DeviceSpec
from planner.capture.torch_internals import entered
from planner.ir.problem import Progress
from planner.measure import devices

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_LEAST_SECONDS = 0.3
"""How long each kernel is run, at least."""

_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices, large enough for a kernel's best rate and quick on the slowest device."""

_STREAM_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Size of each tensor that is streamed: far above any cache."""


def calibrate(device: torch.device | None = None, progress: Progress | None = None) -> DeviceSpec:
    """Describe a device of this machine, by default its GPU, with measured rates and so with efficiencies of 1.

    Takes a few seconds and three tensors of 64 MiB on a CPU, of 1 GiB on a GPU.
    """
    tell = progress or (lambda line: None)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = devices.here(device)
    rates: dict[str, float] = {}
    generators = [device] if device.type == "cuda" else []
    with entered(device), torch.random.fork_rng(generators), torch.no_grad():
        for name, dtype in _DTYPES.items():
            tell(f"matrix products in {name}")
            rates[name] = _product_flops_per_second(device, dtype)
        if device.type == "cuda":
            tell("matrix products in tf32")
            rates["tf32"] = _tf32_flops_per_second(device)
        tell("memory bandwidth")
        bandwidth = _stream_bytes_per_second(device)
        tell("launches")
        launch_seconds = _launch_seconds(device)
        link = _link_bytes_per_second(device) if device.type == "cuda" else spec.host_link_bytes_per_second
    return replace(
        spec,
        flops_per_second=rates,
        bandwidth_bytes_per_second=bandwidth,
        launch_seconds=launch_seconds,
        host_link_bytes_per_second=link,
        compute_efficiency=1.0,
        bandwidth_efficiency=1.0,
        source=f"measured with torch {torch.__version__} on {date.today().isoformat()}",
    )


def _product_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    size = _SIZES[device.type]
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _tf32_flops_per_second(device: torch.device) -> float:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return _product_flops_per_second(device, torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)


def _stream_bytes_per_second(device: torch.device) -> float:
    """Read two tensors and write a third that is there already: no time goes into new pages."""
    elements = _STREAM_BYTES[device.type] // 4
    a, b, out = (torch.ones(elements, device=device) for _ in range(3))
    return 3 * 4 * elements / _seconds(lambda: torch.add(a, b, out=out), device)


def _launch_seconds(device: torch.device) -> float:
    """Time many tiny operations in a row: on a GPU they queue, so this is the rate of launches."""
    x = torch.zeros(1, device=device)
    count = 200

    def many() -> None:
        for _ in range(count):
            x.neg_()

    return _seconds(many, device) / count


def _link_bytes_per_second(device: torch.device) -> float:
    """Copy pinned memory both ways, and take the slower."""
    elements = 1 << 26
    host = torch.empty(elements, dtype=torch.float32, pin_memory=True)
    there = torch.empty(elements, dtype=torch.float32, device=device)
    ways = ((there, host), (host, there))
    return 4 * elements / max(_seconds(partial(to.copy_, of, non_blocking=True), device) for to, of in ways)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a call, after two that do not count."""

    def once() -> float:
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    for _ in range(2):
        first = once()
    if first > _LEAST_SECONDS:
        return first
    times: list[float] = []
    while sum(times) < _LEAST_SECONDS or len(times) < 5:
        times.append(once())
    return median(times)
