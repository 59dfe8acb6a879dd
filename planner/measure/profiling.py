"""Measure a step's operations one by one: each distinct one is run alone on the device that is here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from statistics import median
from typing import Any

import torch
from torch import fx

from cost_models.base import OperationCost
from cost_models.measured import Measurement, Profile, ProfiledOperation
from planner.capture import operands
from planner.capture.lowering import LoweredGraph
from planner.ir.problem import Progress

_LEAST_RUNS, _MOST_RUNS = 3, 15
_SECONDS_EACH = 0.1
"""An operation is run until it has taken so long altogether, within those numbers of runs."""

_LONG_SECONDS = 1.0
"""One whose first run takes longer is not run again."""

_CACHE_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""What is written between two runs: inside a step an operation seldom finds its inputs in a cache."""

_TOLD_EVERY_SECONDS = 1.0

_known: dict[tuple[str, int, str], Measurement] = {}
"""By device, threads and signature: planning again in one process measures nothing twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a measurement came to, by signature, and how long it took."""

    measurements: dict[str, Measurement]
    failed: dict[str, str]
    """Signatures that could not be run, with the reason."""
    skipped: tuple[str, ...]
    """Those that there was no time for."""
    seconds: float


def measure(
    lowered: LoweredGraph,
    estimates: tuple[OperationCost, ...],
    device: torch.device,
    *,
    time_limit_seconds: float,
    progress: Progress | None = None,
) -> Outcome:
    """Time every distinct operation of a step, those first that ``estimates`` expect to take longest.

    No operation is started after the time limit. Memory is that of one operation at a time; a model larger than the
    device can be measured. The random state is left as it was.
    """
    begun = time.perf_counter()
    totals: defaultdict[str, float] = defaultdict(float)
    node_of: dict[str, fx.Node] = {}
    workspace_bytes: dict[str, int] = {}
    for node, operation, estimate in zip(lowered.operation_nodes, lowered.graph.operations, estimates, strict=True):
        if operation.signature and node is not None:
            node_of.setdefault(operation.signature, node)
            totals[operation.signature] += estimate.seconds
            workspace_bytes[operation.signature] = estimate.workspace_bytes
    order = sorted(totals, key=lambda signature: -totals[signature])
    found: dict[str, Measurement] = {}
    failed: dict[str, str] = {}
    told = begun
    where = (str(device), torch.get_num_threads())
    with operands.running_alone(device):
        for number, signature in enumerate(order):
            now = time.perf_counter()
            if now - begun > time_limit_seconds:
                break
            if progress and now - told > _TOLD_EVERY_SECONDS:
                told = now
                progress(f"measuring: {number} of {len(order)} different operations, {now - begun:.0f} s")
            known = _known.get((*where, signature))
            if known is None:
                try:
                    known = _time(node_of[signature], device)
                except (RuntimeError, IndexError, ValueError, TypeError, MemoryError, NotImplementedError) as error:
                    failed[signature] = " ".join(str(error).split())[:200] or type(error).__name__
                    if device.type == "cuda":
                        torch.cuda.empty_cache()  # it may have been memory that ran out
                    continue
                _known[(*where, signature)] = known
            found[signature] = replace(known, workspace_bytes=workspace_bytes[signature])
    skipped = tuple(signature for signature in order if signature not in found and signature not in failed)
    return Outcome(measurements=found, failed=failed, skipped=skipped, seconds=time.perf_counter() - begun)


def _time(node: fx.Node, device: torch.device) -> Measurement:
    """Run one operation until its median is trustworthy."""
    args, kwargs = operands.arguments(node, device)

    def call() -> Any:
        return node.target(*args, **kwargs)  # type: ignore[operator]

    run = _run_on_cuda if device.type == "cuda" else _run_on_cpu
    first = run(call, device)
    if first > _LONG_SECONDS:
        return Measurement(seconds=first)
    elsewhere = torch.empty(_CACHE_BYTES[device.type], dtype=torch.uint8, device=device)
    seconds: list[float] = []
    while len(seconds) < _LEAST_RUNS or (len(seconds) < _MOST_RUNS and sum(seconds) <= _SECONDS_EACH):
        elsewhere.zero_()
        seconds.append(run(call, device))
    return Measurement(seconds=median(seconds), runs=len(seconds))


def _run_on_cpu(call: Callable[[], Any], device: torch.device) -> float:
    begun = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begun
    del result  # giving memory back is not the kernel's time
    return seconds


def _run_on_cuda(call: Callable[[], Any], device: torch.device) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return float(begin.elapsed_time(end)) / 1e3


def profile_of(
    lowered: LoweredGraph, outcome: Outcome, *, model: str, device: str, inputs: tuple[tuple[int, ...], ...]
) -> Profile:
    """Make a profile that can be kept of what was measured."""
    return Profile(
        model=model,
        device=device,
        torch=torch.__version__,
        date=date.today().isoformat(),
        inputs=inputs,
        measurements=outcome.measurements,
        operations=profiled_operations(lowered),
    )


def profiled_operations(lowered: LoweredGraph) -> tuple[ProfiledOperation, ...]:
    """Describe a step's operations as a profile does."""
    return tuple(
        ProfiledOperation(
            key=o.key, signature=o.signature, target=o.target, dtype=o.dtype, flops=o.flops, moved_bytes=o.moved_bytes
        )
        for o in lowered.graph.operations
    )
