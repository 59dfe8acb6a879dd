"""Follows what eager PyTorch does around the blocks of a step: operations, storages, and when these are freed."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.eager_trace import tensors_in
from planner.engine_internals import next_number, number_at_work
from planner.engine_sums import EngineSums
from planner.layouts import as_kernel_gives
from planner.operands import storage_bytes
from planner.torch_internals import OpOverload, is_mutable, storage_id

RESIDENT = -1
"""Stands for a storage that is there before the step: a parameter, a buffer, an input."""


class Kind(Enum):
    """What an event of the step is."""

    OPERATION = "operation"
    FORWARD = "forward of a block"
    LOSS = "loss"
    BACKWARD = "backward of a block"


@dataclass
class Event:
    """Something that the step around the blocks does: an operation, or one way through a block.

    Parameters
    ----------
    kind : Kind
    module : str
        Path of the module; of the block, where it is one.
    derivative_of : str
        Path of the module whose derivative it is a part of.
    node : torch.fx.Node, optional
        An operation with its arguments, in a graph of its own.
    reads : list of int
        Storages read; for a block, one for each given placeholder or for each tangent.
    makes : dict of int to int
        Storages made; for a block from its own values to them.
    """

    kind: Kind
    module: str = ""
    derivative_of: str = ""
    node: fx.Node | None = None
    reads: list[int] = field(default_factory=list)
    makes: dict[int, int] = field(default_factory=dict)


@dataclass
class Storage:
    """What is made during the step: its bytes, and the event after which it is freed; None if it stays."""

    size_bytes: int
    last: int | None = None
    kind: str = "activation"


@dataclass
class Trace:
    """The step around the blocks."""

    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Records a step on fake tensors, under their mode.

    Parameters
    ----------
    resident : sequence of torch.Tensor
        What is there before the step.
    names : dict of torch.nn.Module to str
        Paths of modules.
    sums : EngineSums
        Made under the same mode.
    """

    def __init__(self, resident: Sequence[torch.Tensor], names: dict[nn.Module, str], sums: EngineSums) -> None:
        super().__init__()
        self.trace = Trace()
        self.names, self.sums = names, sums
        self._numbers = {storage_id(tensor): RESIDENT for tensor in resident}
        self._within: list[str] = []
        self._turns: list[int] = []
        self._at_work: list[str] = []
        """From the operation of each number on, in forward order, the module that is at work."""
        self._silent = False
        self._nodes = fx.Graph()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.sums.is_in_place(function, args):
            function = torch.ops.aten.add_.Tensor
        result = as_kernel_gives(function, args, kwargs, function(*args, **kwargs))
        if self._silent:
            return result
        made = [t for t in tensors_in(result) if storage_id(t) not in self._numbers]
        if made or (isinstance(function, OpOverload) and is_mutable(function)):
            reads = [n for t in tensors_in((args, kwargs)) if (n := self.number(t)) != RESIDENT]
            event = self.event(Kind.OPERATION, self._within[-1] if self._within else "", reads)
            event.derivative_of = self._differentiated()
            event.node = self._node(function, args, kwargs, result)
            for tensor in made:
                if storage_id(tensor) not in self._numbers:
                    number = event.makes[len(event.makes)] = self.follow(tensor)
                    self.trace.storages[number].size_bytes = storage_bytes(function, tensors_in((args, kwargs)), tensor)
        return result

    def event(self, kind: Kind, module: str = "", reads: Sequence[int] = ()) -> Event:
        """Begin an event: what is freed from now on is freed after it."""
        event = Event(kind, module, reads=list(dict.fromkeys(reads)))
        self.trace.events.append(event)
        return event

    def number(self, tensor: torch.Tensor) -> int:
        """Give the number of a tensor's storage; one that was never made here is resident."""
        return self._numbers.get(storage_id(tensor), RESIDENT)

    def size_bytes(self, tensor: torch.Tensor) -> int:
        """Give the bytes behind a tensor that was made here; 0 for what is resident."""
        number = self.number(tensor)
        return 0 if number == RESIDENT else self.trace.storages[number].size_bytes

    def follow(self, tensor: torch.Tensor, kind: str = "activation") -> int:
        """Give a new storage its number, and note when it is freed."""
        storage = tensor.untyped_storage()
        number = len(self.trace.storages)
        self.trace.storages.append(Storage(storage.nbytes(), kind=kind))
        self._numbers[id(storage)] = number
        weakref.finalize(storage, self._freed, id(storage), number)
        return number

    def mark(self, tensors: Sequence[torch.Tensor], kind: str) -> None:
        """Say what storages are."""
        for tensor in tensors:
            if (number := self.number(tensor)) != RESIDENT:
                self.trace.storages[number].kind = kind

    def finish(self) -> None:
        """Take what is there now as staying."""
        self._numbers = {}

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let operations pass unrecorded."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Note which module each operation of the forward is in."""

        def enter(module: nn.Module, _arguments: Any) -> None:
            self._within.append(self.names.get(module, ""))
            self._turn()

        def leave(_module: nn.Module, _arguments: Any, _result: Any) -> None:
            self._within.pop()
            self._turn()

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def caller(self) -> Iterator[None]:
        """Count the derivative of what runs to the module that calls the one at work."""
        *outside, inside = self._within
        self._within = outside
        self._turn()
        try:
            yield
        finally:
            self._within.append(inside)
            self._turn()

    def _turn(self) -> None:
        self._turns.append(next_number())
        self._at_work.append(self._within[-1] if self._within else "")

    def _differentiated(self) -> str:
        number = number_at_work()
        turn = 0 if number is None else bisect_right(self._turns, number)
        return self._at_work[turn - 1] if turn else ""

    def _freed(self, identity: int, number: int) -> None:
        if self._numbers.pop(identity, None) == number:
            self.trace.storages[number].last = len(self.trace.events) - 1

    def _node(self, function: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        """Write the operation down with tensors like its own, which hold none of the step's storages."""

        def like(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

        def argument(tensor: torch.Tensor) -> fx.Node:
            node = self._nodes.placeholder(f"tensor_{len(self._nodes.nodes)}")
            node.meta["val"] = like(tensor)
            return node

        arguments, keywords = pytree.tree_map_only(torch.Tensor, argument, (args, kwargs))
        node = self._nodes.call_function(function, tuple(arguments), keywords)
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, like, result)
        return node
