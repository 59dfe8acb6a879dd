"""Layouts as kernels give them, where fake tensors trace others.

Some elementwise operators are traced through a decomposition whose result is laid out in another way than the
kernel's (``elu_backward`` of a transposed gradient, say), and so is BatchNorm of a transposed input on a CPU. What
follows may then copy, and that would go unseen; or it was traced as a view of what can only be copied, and fails.
The order of dimensions in memory does not depend on sizes, so the kernel is asked on a handful of elements.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from planner.capture import operands
from planner.capture.inputs import tensors_in
from planner.capture.joint import mutates, run_on_recorded, tensors_of, values_of
from planner.capture.torch_internals import FakeTensor, OpOverload, is_mutable, outside_tracing, storage_id

aten = torch.ops.aten

_NORMS = {
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm_backward.default,
}
"""Not elementwise, yet as many elements come out as go in. A GPU's kernels lay them out as fake tensors do."""


_VIEWS = {aten.view.default, aten._unsafe_view.default}


def as_kernel_gives(function: Any, arguments: Any, keywords: Any, result: Any) -> Any:
    """Return the fake result of a call the strides of its kernel: of views, elementwise operators and BatchNorm."""
    if not isinstance(function, OpOverload) or is_mutable(function):
        return result
    if function in _VIEWS:
        return _as_kernels_view(arguments[0], result)
    if all(tensor.is_contiguous() for tensor in tensors_in((arguments, keywords))):
        return result
    return _laid_out(function, arguments, keywords, result)


def _as_kernels_view(source: torch.Tensor, result: Any) -> Any:
    """Return a fake view the strides that the kernel gives it.

    Along a dimension of one element they may differ: they do not matter there, but kernels look at them to tell
    whether channels come last, and lay out their own results after that.
    """
    if not isinstance(result, FakeTensor) or 1 not in result.shape:
        return result
    with outside_tracing():
        strides = torch.empty_strided(source.shape, source.stride(), device="meta").view(result.shape).stride()
    if strides == result.stride():
        return result
    with result.fake_mode, torch.no_grad():
        return result.as_strided(result.shape, strides, result.storage_offset())


def correct_layouts(graph: fx.Graph) -> None:
    """Return the recorded results of elementwise operators, and of BatchNorm, the strides that their kernels give them.

    Values of nodes are changed in place; storages that are shared stay shared. Where a view is no longer possible a
    copy is put in before it, as eager makes one. Only operators that read something not laid out in the usual way are
    run.
    """
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        affected = not changed.isdisjoint(node.all_input_nodes)
        traced = result = node.meta["val"]
        if node.target is operator.getitem:
            if affected:
                result = node.args[0].meta["val"][node.args[1]]
        elif isinstance(node.target, OpOverload) and not mutates(node):
            if affected:
                result = _traced_again(node)
            result = as_kernel_gives(node.target, values_of(node.args), values_of(node.kwargs), result)
        leaves = zip(pytree.tree_leaves(result), pytree.tree_leaves(traced), strict=True)
        if any(new is not old for new, old in leaves):
            node.meta["val"] = result
            changed.add(node)


def _traced_again(node: fx.Node) -> Any:
    """Say what a node gives now that it reads another layout: of a copy, from now on, if that cannot be viewed."""
    before, recorded = tensors_of(node), node.meta["val"]
    if not before:
        return recorded
    with before[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        try:
            result = run_on_recorded(node)
        except (RuntimeError, ValueError):
            if node.target is not aten.view.default:
                return recorded
            (source,) = node.all_input_nodes
            with node.graph.inserting_before(node):
                copy = node.graph.call_function(
                    aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
            copy.meta = {**node.meta, "val": run_on_recorded(copy)}
            node.replace_input_with(source, copy)
            return run_on_recorded(node)
    after = tensors_in(result)
    looks_at = {storage_id(tensor) for source in node.all_input_nodes for tensor in tensors_of(source)}
    is_view = not looks_at.isdisjoint(map(storage_id, after))
    is_other = [tensor.stride() for tensor in after] != [tensor.stride() for tensor in before]
    return result if is_view or is_other else recorded


def _laid_out(function: Any, arguments: Any, keywords: Any, result: Any) -> Any:
    """Return the results of a call the strides of its kernel; themselves, where they have them or nobody knows."""
    read, outputs = tensors_in((arguments, keywords)), tensors_in(result)
    if not outputs or not all(isinstance(output, FakeTensor) for output in outputs):
        return result
    if not {storage_id(t) for t in outputs}.isdisjoint(map(storage_id, read)):
        return result
    if function in _NORMS:
        if outputs[0].device.type != "cpu":
            return result
    elif len({output.shape for output in outputs}) != 1 or not all(_goes_with(tensor, outputs[0]) for tensor in read):
        return result
    try:
        with operands.running_alone(torch.device("cpu")):
            arguments, keywords = pytree.tree_map_only(torch.Tensor, _small, (arguments, keywords))
            found = function(*arguments, **keywords)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return result  # it takes no sizes but its own
    if isinstance(result, torch.Tensor):
        return _like(result, found)
    return type(result)(map(_like, result, found))


def _like(traced: Any, found: Any) -> Any:
    """Return what was traced with the strides of what the kernel gave."""
    if not isinstance(traced, FakeTensor) or not isinstance(found, torch.Tensor):
        return traced
    if found.dim() != traced.dim() or found.stride() == _small(traced).stride():
        return traced
    with traced.fake_mode:
        return torch.empty_permuted(traced.shape, _order(found), dtype=traced.dtype, device=traced.device)


def _goes_with(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a tensor is of the result's sizes, or is broadcast to them."""
    sizes = zip(reversed(tensor.shape), reversed(output.shape), strict=False)
    return tensor.dim() <= output.dim() and all(own in (1, made) for own, made in sizes)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in the order of their strides, the largest first."""
    strides = list(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda d: -strides[d])


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros, laid out alike, with two elements along each dimension that has several."""
    made = torch.empty_permuted([min(size, 2) for size in tensor.shape], _order(tensor), dtype=tensor.dtype).zero_()
    return made.as_strided(made.shape, [s if tensor.stride(d) else 0 for d, s in enumerate(made.stride())])
