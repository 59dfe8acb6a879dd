"""Measure the workspace of kernels, allocated beyond their outputs, by running each distinct one once.

This is the one thing that a graph does not show: a convolution packs its weights, dropout on a CPU
draws integers before it has a mask. Without it ResNet-50's peak comes out 1% too low.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from cost_models.flops import moved_bytes
from planner.capture import operands
from planner.capture.inputs import new_bytes
from planner.capture.joint import values_of
from planner.capture.lowering import LoweredGraph
from planner.capture.memory import is_profiled, record
from planner.capture.torch_internals import storage_id
from planner.capture.trees import tensors_in
from planner.common.units import round_up
from planner.ir.graph import OperationCost
from planner.measure.runs import Run, timed
from planner.plans.allocator import MIN_BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """What may be spent; the clock plays no part, so that a busy machine sees as much as an idle one."""

    seconds: float
    """What all that is run may take together, as predicted: the cheapest come first."""
    operation_bytes: float
    """Operations that read and write more are not run."""


TO_RUN = TrialLimits(seconds=math.inf, operation_bytes=math.inf)
"""For a model that is about to run here: each of its operations takes and holds no more than the step does."""

TO_PLAN = TrialLimits(seconds=2.0, operation_bytes=256 << 20)
"""For a model on fake tensors, which may be far larger than this machine."""


def effort_for(*, is_fake: bool) -> TrialLimits:
    """Say what trying kernels may take: those of a model that is about to run here may take what it takes."""
    return TO_PLAN if is_fake else TO_RUN


_LABEL = "workspace of operation "


@dataclass(frozen=True, slots=True)
class Tried:
    """What one run of an operation showed."""

    workspace_bytes: int
    run: Run
    """The first run, with all that a library does once."""
    small_bytes: int = 0
    """What CUDA's allocator takes of the workspace from its pool of small blocks."""


_known: dict[tuple[str, int, str], Tried] = {}
"""By device, threads and signature: a deep model costs what one layer costs, planning again nothing."""


def measure(
    lowered: LoweredGraph, costs: tuple[OperationCost, ...], device: torch.device, effort: TrialLimits
) -> dict[int, Tried | None]:
    """See how many bytes of workspace operations need, by index.

    None where it is not known: the operation was too large to be run, would have taken too long by its cost, or did not
    run on made-up tensors. Nothing for what Inductor writes a kernel of its own for. Each distinct (operator, shapes,
    strides, dtypes, other arguments) runs once, one at a time, on ones and zeros; the random state is left as it was.
    """
    signatures = {
        index: operation.signature
        for index, (operation, node) in enumerate(zip(lowered.graph.operations, lowered.operation_nodes, strict=True))
        if node is None or not lowered.is_written_by_inductor(node)
    }

    def affordable(operations: list[int]) -> Iterator[int]:
        spent_seconds = 0.0
        for index in sorted(operations, key=lambda index: costs[index].seconds):
            spent_seconds += costs[index].seconds
            if spent_seconds > effort.seconds:
                return
            if lowered.graph.operations[index].moved_bytes <= effort.operation_bytes:
                yield index

    return _seen(lowered.operation_nodes, signatures, device, affordable)


def of_calls(nodes: Sequence[fx.Node | None], device: torch.device, effort: TrialLimits) -> list[int | None]:
    """See how much workspace calls need; None where one cannot be tried, or is too large to be."""
    able = {index: node for index, node in enumerate(nodes) if node and operands.runs_alone(node, in_place=True)}

    def is_small(node: fx.Node) -> bool:
        if effort.operation_bytes == math.inf:
            return True
        args, kwargs = values_of((node.args, node.kwargs))
        return moved_bytes(node.target, args, kwargs, node.meta["val"]) <= effort.operation_bytes

    def small(calls: list[int]) -> Iterator[int]:
        return (index for index in calls if is_small(able[index]))

    signatures = {index: operands.signature(node) for index, node in able.items()}
    seen = _seen(nodes, signatures, device, small)
    return [None if (one := seen.get(index)) is None else one.workspace_bytes for index in range(len(nodes))]


def _seen(
    nodes: Sequence[fx.Node | None],
    signatures: Mapping[int, str],
    device: torch.device,
    chosen: Callable[[list[int]], Iterable[int]],
) -> dict[int, Tried | None]:
    """Run what is chosen of the calls whose signatures are new; say what is known then of all that have a signature."""
    signed = {i: signatures[i] for i, node in enumerate(nodes) if node is not None and signatures.get(i)}
    known_as = {i: (device.type, torch.get_num_threads(), signature) for i, signature in signed.items()}
    first = {key: index for index, key in reversed(known_as.items()) if key not in _known}
    to_run = {index: node for index in chosen(sorted(first.values())) if (node := nodes[index])}
    if to_run:
        measured = _on_cuda if device.type == "cuda" else _on_cpu
        with operands.running_alone(device):
            _known.update((known_as[index], tried) for index, tried in measured(to_run, device))
    return {index: _known.get(key) for index, key in known_as.items()}


def _on_cpu(nodes: Mapping[int, fx.Node], device: torch.device) -> Iterator[tuple[int, Tried]]:
    if is_profiled():
        warnings.warn("a profiler is running, so hidden workspace cannot be measured: wrap before it", stacklevel=2)
        return
    made: dict[int, tuple[int, Run]] = {}
    with record() as recording:
        for index, node in nodes.items():
            try:
                args, kwargs = operands.arguments(node, device)
                with record_function(f"{_LABEL}{index}"):
                    result, run = timed(partial(_run, node, args, kwargs))
            except (RuntimeError, IndexError, ValueError):
                continue  # it does not run on ones and zeros, or does not fit here
            made[index] = _new_bytes(result, (args, kwargs)), run
            del args, kwargs, result
    for index, (output_bytes, run) in made.items():
        yield index, Tried(max(0, recording.peak_bytes(f"{_LABEL}{index}") - output_bytes), run)


def _on_cuda(nodes: Mapping[int, fx.Node], device: torch.device) -> Iterator[tuple[int, Tried]]:
    for index, node in nodes.items():
        try:
            args, kwargs = operands.arguments(node, device)
            _run(node, args, kwargs)  # what a library allocates once and for all
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before_bytes = _asked_for(device)["all"]["current"]
            begun = time.perf_counter()
            result = _run(node, args, kwargs)
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begun
        except (RuntimeError, IndexError, ValueError):
            continue  # it does not run on ones and zeros, or does not fit beside what is on the device
        pools = _asked_for(device)
        now, small = pools["all"], pools["small_pool"]
        kept_bytes = min(now["current"] - before_bytes, _new_bytes(result, (args, kwargs)))
        workspace_bytes = round_up(now["peak"] - before_bytes - kept_bytes, MIN_BLOCK_BYTES)
        small_bytes = round_up(small["peak"] - small["current"], MIN_BLOCK_BYTES)
        yield index, Tried(max(0, workspace_bytes), Run(seconds), small_bytes)
        del args, kwargs, result


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _asked_for(device: torch.device) -> dict[str, dict[str, int]]:
    """Return the bytes that each pool is asked for, now and at most: its blocks depend on what surrounds them."""
    return torch.cuda.memory_stats_as_nested_dict(device)["requested_bytes"]


def _new_bytes(result: Any, arguments: Any) -> int:
    return new_bytes(tensors_in(result), set(map(storage_id, tensors_in(arguments))))
