"""Model how autograd accumulates gradients: sums made in place, and gradients copied at the end.

Where a value is used several times, autograd's engine adds the gradients that come from its uses. It adds into the
first where nobody else holds that (``can_accumulate_inplace`` of torch's ``input_buffer.cpp``), and never while a
dispatch mode watches. So a recorded step would show a new tensor for each such sum, that a step of its own lacks.
Likewise a parameter takes over a sparse gradient that nobody else holds (``accumulate_grad.h``), and gets a copy where
a dispatch mode watches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import fx
from torch.autograd import set_detect_anomaly
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.joint import JointGraph, is_backward, sources, storages_of
from planner.capture.torch_internals import (
    accumulates_gradient,
    is_called_by_engine,
    is_dense,
    references,
    storage_id,
    strided_parts,
    takes_boxed_gradients,
    uses,
)

aten = torch.ops.aten


_BLOCK = 60
"""Rows and columns that ``copy_transpose_valid`` of ATen's ``Copy.cpp`` turns at a time, in a block of its own."""


_ZEROS = (aten.new_zeros.default, aten.zeros_like.default)

_INTO_ZEROS = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.put.default: aten.put_.default,
}
"""What derivatives write into zeros that they just made: in place, but beside them for tensors of a subclass
(``areAnyTensorSubclassLike`` of ATen's ``FunctionsManual.cpp``), as fake ones are."""


@dataclass(frozen=True)
class GradientCopies:
    """Which gradients autograd copies at the end, by their positions."""

    beside: tuple[int, ...]
    """Their own memory is somebody else's, and stays."""
    instead: tuple[int, ...]
    """The copy has another layout, and their own memory, which is as large, is freed once it is made."""
    working_bytes: int
    """What is there beside gradients and copies while one of the latter is made, at most."""


def gradient_copies(
    given: Sequence[tuple[torch.Tensor, torch.Tensor] | None], taken: Collection[int]
) -> GradientCopies:
    """Find the gradients that are copied: their storage is ``taken`` or shared, or their layout differs.

    ``given`` are what gradients are of, and the gradients, or None. The engine copies one after the other, so of what
    copies take the place of only one is there beside its copy.
    """
    uses = Counter(storage_id(pair[1]) for pair in given if pair is not None)
    seen = set(taken)
    beside: list[int] = []
    instead: list[int] = []
    working_bytes = 0
    for position, pair in enumerate(given):
        if pair is None:
            continue
        of, gradient = pair
        storage = storage_id(gradient)
        if storage in seen:
            beside.append(position)
        elif of.stride() != gradient.stride() and min(of.numel(), gradient.numel()) > 1:
            is_alone = uses[storage] == 1 and gradient.untyped_storage().nbytes() == of.nbytes
            (instead if is_alone else beside).append(position)
            working_bytes = max(working_bytes, is_alone * of.nbytes + _block_bytes(of, gradient))
        seen.add(storage)
    return GradientCopies(tuple(beside), tuple(instead), working_bytes)


def _block_bytes(of: torch.Tensor, gradient: torch.Tensor) -> int:
    """Return what a CPU's kernel takes to turn a matrix."""
    is_turned = of.dim() == 2 and of.is_contiguous() and gradient.t().is_contiguous() and of.numel() >= _BLOCK**2
    return _BLOCK**2 * of.element_size() if is_turned and of.device.type == "cpu" else 0


class EngineSums:
    """Tells, during a backward, the engine's gradient sums from sums within a derivative."""

    def __init__(self, device: torch.device) -> None:
        """Probe how often summands are referenced; call it in the mode of the step, before recording."""
        self._is_between = False
        self._zeros: int | None = None
        """The storage of the zeros that the derivative at work made last."""
        self._alone = _references_alone(device)
        """How often a tensor and its storage are referred to that the engine alone holds."""

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Follow the backward of some outputs."""
        made_by: list[Any] = [output.grad_fn for output in outputs]
        for node in filter(None, sources(made_by, lambda of: [each for each, _ in of.next_functions] if of else ())):
            if takes_boxed_gradients(node):
                # A hook would hold the gradients while it runs. What it runs is called by Python, so it is between.
                self._is_between = True
            else:
                node.register_prehook(partial(self._note, False))
                node.register_hook(partial(self._note, True))

    def unrecorded(self, function: Any, args: Sequence[Any]) -> Any:
        """Return what would be called if nothing were recorded: sums, and what is written into zeros, in place.

        To be asked by ``__torch_dispatch__`` itself: who called that says whether it was the engine.
        """
        is_sum = self._is_between and function is aten.add.Tensor
        if not (is_sum or function in _INTO_ZEROS) or not is_called_by_engine(2):
            return function
        if not is_sum:
            return _INTO_ZEROS[function] if storage_id(args[0]) == self._zeros else function
        held, added = args
        is_alike = (held.shape, held.dtype) == (added.shape, added.dtype)
        return aten.add_.Tensor if is_alike and is_dense(held) and references(held) == self._alone else function

    def made(self, function: Any, result: Any) -> None:
        """Hear what a call returned."""
        if function in _ZEROS:
            self._zeros = storage_id(result)

    def is_taken_over(self, function: Any, args: Sequence[Any]) -> bool:
        """Whether a dispatched call copies a sparse gradient that its parameter would steal if it were not recorded."""
        if function is not aten.clone.default or args[0].layout is not torch.sparse_coo or not accumulates_gradient():
            return False
        # Beside the engine our hook on the node holds it; in Python the arguments, the tensor itself, and the question.
        is_alone = self._alone is not None and uses(args[0]) == self._alone[0] + 1 and getrefcount(args[0]) <= 3
        return is_alone and all(part.is_contiguous() for part in strided_parts(args[0]))

    def _note(self, is_between: bool, *_gradients: Any) -> None:
        self._is_between, self._zeros = is_between, None


class _Probe(TorchDispatchMode):
    """Notes how often the first summand is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[int, int] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.add.Tensor and is_called_by_engine(1):
            self.seen = references(args[0])
        return function(*args, **(kwargs or {}))


def _references_alone(device: torch.device) -> tuple[int, int] | None:
    """Sum two gradients that nobody else holds, and see how often the first is referred to."""
    x = torch.ones(2, 2, device=device, requires_grad=True)
    # Hooks of its own: those around this, of a checkpoint say, are not to see what is saved here.
    own_hooks, probe = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), _Probe()
    with torch.enable_grad(), own_hooks, set_detect_anomaly(False), probe:
        value = x * 2
        torch.autograd.backward([(value.sin() * value.cos()).sum()])
    return probe.seen


def sum_in_place(joint: JointGraph) -> None:
    """Make sums of a parameter's gradients in place where nothing else reads the first summand.

    Autograd adds gradients of one tensor in place; tracing makes a new tensor of every sum. Written are only gradients
    that the step gives back, which no plan drops, so nothing is recomputed that was written to. The numbers are those
    of the sum made anew: adding is done element by element. O(nodes).
    """
    pending = [_origin(node) for node in joint.outputs[1] if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        first = node.args[0]
        if not isinstance(first, fx.Node) or not is_backward(node) or not _is_free(first, node):
            continue
        node.target = aten.add_.Tensor
        look_at(node, node.meta["val"], first.meta["val"])
        pending.append(_origin(first))


def _is_free(summand: fx.Node, total: fx.Node) -> bool:
    """Whether a sum may overwrite a summand: fresh memory of the same layout, which only the sum reads."""
    value, result = summand.meta.get("val"), total.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    same = (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
    whole = value.untyped_storage().nbytes() == value.nbytes
    return same and whole and _has_one_reader(summand)


def _origin(node: fx.Node) -> fx.Node:
    """Return the node that allocates the memory of a node's output."""
    while node.op == "call_function" and (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    storages = storages_of([node])
    return next((source for source in node.all_input_nodes if not storages.isdisjoint(storages_of([source]))), None)


def _has_one_reader(node: fx.Node) -> bool:
    """Whether a node's output has one reader, and so has every tensor that it is a view of."""
    while node.op == "call_function" and len(node.users) == 1 and is_backward(node):
        if (source := _viewed(node)) is None:
            return True
        node = source
    return False


def look_at(node: fx.Node, before: torch.Tensor, after: torch.Tensor) -> None:
    """Record that a node's output, and every view of it, now share other memory."""
    storage = storage_id(before)
    node.meta["val"] = after
    pending = list(node.users)
    while pending:
        user = pending.pop()
        value = user.meta.get("val")
        if user.op == "call_function" and isinstance(value, torch.Tensor) and storage_id(value) == storage:
            user.meta["val"] = after.as_strided(value.shape, value.stride(), value.storage_offset())
            pending.extend(user.users)
