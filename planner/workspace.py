"""What kernels allocate beyond their outputs, seen by running each distinct one once.

This is the one thing that a graph does not show: a convolution packs its weights, dropout on a CPU
draws integers before it has a mask. Without it ResNet-50's peak comes out 1% too low.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from planner import operands
from planner.graph import OperationCost
from planner.lowering import LoweredGraph
from planner.memory import record
from planner.torch_internals import profiler_is_running, storage_id

SECONDS_FOR_ONE = 1.0
"""An operation that a roofline puts above this is not run: its own time dwarfs its workspace's worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much may be spent; an operation that is not run counts as needing no workspace.

    Parameters
    ----------
    seconds : float
        No operation is started after this.
    operation_bytes : int
        Operations that read and write more are not run.
    """

    seconds: float
    operation_bytes: int


TO_RUN = Effort(seconds=10.0, operation_bytes=1 << 62)
"""For a model that is about to run here: what its step can hold, one of its operations can."""

TO_PLAN = Effort(seconds=2.0, operation_bytes=256 << 20)
"""For a model on fake tensors, which may be far larger than this machine."""

_LABEL = "workspace of operation "

_known: dict[Hashable, int] = {}
"""Bytes by signature; a deep model costs what one of its layers costs, and planning again costs nothing."""


def measure(
    lowered: LoweredGraph, costs: tuple[OperationCost, ...], device: torch.device, effort: Effort
) -> tuple[OperationCost, ...]:
    """Complete costs with the workspace that each operation is seen to need.

    Parameters
    ----------
    lowered : LoweredGraph
    costs : tuple of OperationCost
        With the seconds of one run, which decide what is too long to be tried.
    device : torch.device
        Where to run: the device that the plan is for.
    effort : Effort

    Returns
    -------
    tuple of OperationCost

    Notes
    -----
    Each distinct (operator, shapes, strides, dtypes, other arguments) runs once, one at a time, on
    ones and zeros; the random state is left as it was.
    """
    where = (device.type, torch.get_num_threads())
    signatures: dict[int, Hashable] = {}
    new: dict[Hashable, int] = {}
    for index, operation in enumerate(lowered.graph.operations):
        if not operation.signature:
            continue
        signatures[index] = signature = (where, operation.signature)
        too_much = costs[index].seconds > SECONDS_FOR_ONE or operation.moved_bytes > effort.operation_bytes
        if signature not in _known and signature not in new and not too_much:
            new[signature] = index
    if new:
        nodes = {index: node for index in new.values() if (node := lowered.operation_nodes[index]) is not None}
        measured = _on_cuda if device.type == "cuda" else _on_cpu
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            for index, workspace_bytes in measured(nodes, device, effort.seconds):
                _known[signatures[index]] = workspace_bytes
    return tuple(
        OperationCost(seconds=cost.seconds, workspace_bytes=_known.get(signatures.get(index), cost.workspace_bytes))
        for index, cost in enumerate(costs)
    )


def _on_cpu(nodes: dict[int, fx.Node], device: torch.device, seconds: float) -> Iterator[tuple[int, int]]:
    if profiler_is_running():
        warnings.warn(
            "a profiler is running, so hidden kernel workspace cannot be measured: wrap before it", stacklevel=2
        )
        return
    begun = time.perf_counter()
    outputs_bytes: dict[int, int] = {}
    with record() as recording:
        for index, node in nodes.items():
            if time.perf_counter() - begun > seconds:
                break
            args, kwargs = operands.arguments(node, device)
            try:
                with record_function(f"{_LABEL}{index}"):
                    result = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, IndexError, ValueError):
                continue  # it does not run on ones and zeros
            outputs_bytes[index] = _new_bytes(result, (args, kwargs))
            del args, kwargs, result
    times_ns = [at_ns for at_ns, _ in recording.changes]
    for index, output_bytes in outputs_bytes.items():
        begin_ns, end_ns = recording.windows[f"{_LABEL}{index}"]
        live_bytes = peak_bytes = 0
        for _, change_bytes in recording.changes[bisect_left(times_ns, begin_ns) : bisect_right(times_ns, end_ns)]:
            live_bytes += change_bytes
            peak_bytes = max(peak_bytes, live_bytes)
        yield index, max(0, peak_bytes - output_bytes)


def _on_cuda(nodes: dict[int, fx.Node], device: torch.device, seconds: float) -> Iterator[tuple[int, int]]:
    begun = time.perf_counter()
    for index, node in nodes.items():
        if time.perf_counter() - begun > seconds:
            break
        try:
            args, kwargs = operands.arguments(node, device)
            node.target(*args, **kwargs)  # type: ignore[operator]  # what a library allocates once and for all
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before_bytes = torch.cuda.memory_allocated(device)
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            torch.cuda.synchronize(device)
        except (RuntimeError, IndexError, ValueError):
            continue  # it does not run on ones and zeros, or does not fit beside what is on the device
        after_bytes = torch.cuda.memory_allocated(device)
        kept_bytes = min(after_bytes - before_bytes, _new_bytes(result, (args, kwargs), alignment_bytes=512))
        yield index, max(0, torch.cuda.max_memory_allocated(device) - before_bytes - kept_bytes)
        del args, kwargs, result


def _new_bytes(result: Any, arguments: Any, alignment_bytes: int = 1) -> int:
    known = {storage_id(t) for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)}
    total = 0
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and storage_id(tensor) not in known:
            known.add(storage_id(tensor))
            total += -(-tensor.untyped_storage().nbytes() // alignment_bytes) * alignment_bytes
    return total
