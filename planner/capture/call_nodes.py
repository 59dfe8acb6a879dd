"""Calls written down as fx nodes, so that they can be run alone later, when their tensors are gone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from planner.capture.torch_internals import storage_id, strided_parts
from planner.capture.trees import sparse_in


class CallNodes:
    """Describes calls in the mode ``fakes``, by tensors that hold no memory of theirs, and share as theirs do."""

    def __init__(self, fakes: Any) -> None:
        self.fakes = fakes
        self._graph = fx.Graph()
        self._stand_ins: dict[Any, torch.Tensor] = {}

    def node(self, function: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        """Return a node that says what was called with what, and what it gave."""
        numbers: dict[tuple[int, torch.dtype], int] = {}
        parts = {tensor: strided_parts(tensor) for tensor in sparse_in((args, kwargs, result))}

        def like(tensor: torch.Tensor) -> torch.Tensor:
            number = numbers.setdefault((storage_id(tensor), tensor.dtype), len(numbers))
            return self._stand_in(tensor, number)

        def described(tensor: torch.Tensor) -> Any:
            return like(tensor) if tensor.layout is torch.strided else list(map(like, parts[tensor]))

        def operand(tensor: torch.Tensor) -> fx.Node:
            node = self._graph.placeholder("operand")
            node.meta["val"] = described(tensor)
            return node

        with self.fakes, torch.no_grad():
            node = self._graph.call_function(function, *tree_map_only(torch.Tensor, operand, (args, kwargs)))
            node.meta["val"] = tree_map_only(torch.Tensor, described, result)
        return node

    def _stand_in(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Return a tensor laid out like another, in the so-many-th memory of a call; calls alike have it in common."""
        storage_bytes = tensor.untyped_storage().nbytes()
        memory = number, storage_bytes, tensor.dtype, tensor.device
        layout = (*memory, tensor.shape, tensor.stride(), tensor.storage_offset())
        if layout not in self._stand_ins:
            if memory not in self._stand_ins:
                elements = storage_bytes // tensor.element_size()
                self._stand_ins[memory] = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
            flat = self._stand_ins[memory]
            self._stand_ins[layout] = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self._stand_ins[layout]
