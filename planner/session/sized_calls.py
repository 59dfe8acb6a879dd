"""Single calls of a step with tensors of other sizes, to be run alone: what their kernels need there is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from planner.capture.expressions import expression_of
from planner.capture.fake_internals import without_data
from planner.capture.joint import fake_mode_of
from planner.capture.symbolic import SYMBOLIC_VALUE, SizedFloat, SizedInt, Sizes
from planner.capture.torch_internals import FakeTensorMode, storage_id

Memories = dict[tuple[int, torch.dtype], Tensor]
"""What tensors of one call look at, flat, by storage and type."""


class UnknownSizeError(Exception):
    """A formula that was not found: the step is then made plain for each size."""


class SizedCalls:
    """Calls like those of nodes of a step that was made plain, at any sizes.

    How their tensors follow from sizes is found once; UnknownSizeError if some do not.
    """

    def __init__(self, nodes: Iterable[fx.Node], known: Sizes) -> None:
        self._calls = [_Call(node, known) for node in nodes]

    def at(self, sizes: Sizes) -> Iterator[fx.Node]:
        """Return the calls at some sizes, as nodes that the next sizes change; UnknownSizeError as above."""
        return (call.at(sizes) for call in self._calls)


class _Call:
    def __init__(self, node: fx.Node, known: Sizes) -> None:
        mode, graph = fake_mode_of(node.graph), fx.Graph()
        self._values: list[tuple[fx.Node, Any]] = []
        copies: dict[fx.Node, fx.Node] = {}

        def copied(source: fx.Node) -> fx.Node:
            if source not in copies:
                copies[source] = graph.placeholder(source.name)
                self._values.append((copies[source], _sized(source, known, mode)))
            return copies[source]

        self._arguments = fx.map_arg((node.args, node.kwargs), copied)
        self._node = graph.call_function(node.target, *self._arguments)  # type: ignore[arg-type]
        self._values.append((self._node, _sized(node, known, mode)))
        self._share_memory()

    def _share_memory(self) -> None:
        """Let tensors look at one memory that did when the step was made plain, or at a part of one."""
        layouts = [one for _, value in self._values for one in tree_leaves(value) if isinstance(one, _Layout)]
        readers = Counter(storage_id(layout.plain) for layout in layouts)
        for layout in layouts:
            layout.is_alone = readers[storage_id(layout.plain)] == 1 and layout.is_whole

    def at(self, sizes: Sizes) -> fx.Node:
        def number(argument: Any) -> Any:
            return sizes.number(argument.made_by) if isinstance(argument, (SizedInt, SizedFloat)) else argument

        memories: Memories = {}
        for node, value in self._values:
            node.meta["val"] = map_aggregate(
                value, lambda one: one.at(sizes, memories) if isinstance(one, _Layout) else one
            )
        self._node.args, self._node.kwargs = map_aggregate(self._arguments, number)
        return self._node


def _sized(node: fx.Node, known: Sizes, mode: FakeTensorMode) -> Any:
    """Return what a node holds, with layouts in place of tensors."""

    def layouts(plain: Any, symbolic: Any) -> Any:
        if isinstance(plain, (list, tuple)):
            return type(plain)(layouts(a, b) for a, b in zip(plain, symbolic, strict=True))
        return _Layout.of(plain, symbolic, known, mode) if isinstance(plain, Tensor) else plain

    return layouts(node.meta["val"], node.meta.get(SYMBOLIC_VALUE))


@dataclass(eq=False)
class _Layout:
    """How a tensor is laid out at any sizes."""

    plain: Tensor
    shape: tuple[Any, ...]
    """In symbols."""
    strides: tuple[Any, ...]
    """Likewise; None along what is one element long, for the one from which the next dimension goes on."""
    offset: Any
    """Likewise."""
    memory_bytes: Any
    """Likewise; None where nothing is known of the memory behind it."""
    mode: FakeTensorMode
    is_alone: bool = True
    """Whether no other tensor of the call looks at its memory, nor is there more of that."""

    @classmethod
    def of(cls, plain: Tensor, symbolic: Any, known: Sizes, mode: FakeTensorMode) -> _Layout:
        """Find the layout of a tensor that is there at known sizes.

        Along a dimension of one element, kernels may choose another stride than tracing with symbols does: the one from
        which the next dimension goes on, or none if a number was expanded. Elsewhere a stride that differs means that
        nothing is known.
        """
        if not isinstance(symbolic, Tensor):
            raise UnknownSizeError("a kernel lays its result out in its own way")
        shape = tuple(map(expression_of, symbolic.shape))
        if [*map(known.of, shape)] != [*plain.shape]:
            raise UnknownSizeError("a kernel gives a result of a size of its own")
        strides = []
        for d, (made, stride) in enumerate(zip(plain.stride(), map(expression_of, symbolic.stride()), strict=True)):
            if known.of(stride) == made:
                strides.append(stride)
            elif plain.shape[d] == 1 and made == _whole(plain.shape, plain.stride(), d + 1):
                strides.append(None)
            elif shape[d] == 1 and made == 0:
                strides.append(0)
            else:
                raise UnknownSizeError("a kernel lays its result out in its own way")
        offset = expression_of(symbolic.storage_offset())
        memory_bytes = expression_of(symbolic.untyped_storage().nbytes())
        is_known = (known.of(offset), known.of(memory_bytes)) == (plain.storage_offset(), _memory_bytes(plain))
        return cls(plain, shape, tuple(strides), offset, memory_bytes if is_known else None, mode)

    @property
    def is_whole(self) -> bool:
        """Whether it is all that there is in its memory."""
        return self.memory_bytes is None or self.plain.nbytes == _memory_bytes(self.plain)

    def at(self, sizes: Sizes, memories: Memories) -> Tensor:
        """Return such a tensor without data, on memory that is shared as it was."""
        plain, shape = self.plain, [*map(sizes.of, self.shape)]
        strides = [0] * len(shape)
        for d in reversed(range(len(shape))):
            if self.strides[d] is not None:
                strides[d] = sizes.of(self.strides[d])
            elif shape[d] == 1:
                strides[d] = _whole(shape, strides, d + 1)
            else:
                raise UnknownSizeError("a kernel lays its result out in its own way")
        if self.is_alone or self.memory_bytes is None:
            if shape == [*plain.shape] and strides == [*plain.stride()]:
                return plain
            return without_data(self.mode, shape, strides, plain.dtype, plain.device)
        key = storage_id(plain), plain.dtype
        if key not in memories:
            elements = sizes.of(self.memory_bytes) // plain.element_size()
            memories[key] = torch.empty(elements, dtype=plain.dtype, device="meta")
        offset = sizes.of(self.offset)
        return without_data(self.mode, shape, strides, plain.dtype, plain.device, memories[key], offset)


def _memory_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _whole(shape: Sequence[int], strides: Sequence[int], dimension: int) -> int:
    """Return over how much memory a dimension goes; 1 beyond the last."""
    return shape[dimension] * strides[dimension] if dimension < len(shape) else 1
