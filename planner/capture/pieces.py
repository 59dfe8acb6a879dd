"""Graphs that ``torch.compile`` hands to a backend, prepared to be captured again.

They are captured anew outside of Dynamo, on tensors without data, as often as they are planned.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from planner.capture.fake_internals import fake_mode
from planner.capture.torch_internals import uncompiled


def model_of(tensors: Iterable[Any]) -> nn.Module | None:
    """Return the outermost module that is being called and has one of these tensors; None if there is none.

    A program knows the parameters that it reads. What else is resident, its model knows.
    """
    given = set(map(id, tensors))
    found: nn.Module | None = None
    frame = inspect.currentframe()
    frame = frame and frame.f_back  # one that looked at its own variables would be kept, with all that called it
    while frame is not None:
        module = _self_of(frame)
        if isinstance(module, nn.Module) and any(id(parameter) in given for parameter in module.parameters()):
            found = module
        frame = frame.f_back
    return None if found is None else uncompiled(found)


def _self_of(frame: FrameType) -> Any:
    """Return what ``self`` is in a frame.

    Before Python 3.13 a running frame keeps the copy of its variables that it once gave, and so all tensors in them.
    """
    variables = frame.f_locals
    found = variables.get("self")
    if isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()
    return found


@dataclass(frozen=True)
class Piece:
    """A program for certain sizes, with all that it takes to capture it again."""

    program: fx.GraphModule
    inputs: list[Any]
    """What it takes: parameters and buffers of its model, and in place of all else tensors without data."""
    positions: list[int]
    """Of these among what the program was called with; the others are numbers."""
    casts: tuple[tuple[str, torch.dtype, bool], ...]
    """Autocast around it, by kind of device."""

    @classmethod
    def of(cls, program: fx.GraphModule, given: Sequence[Any], model: nn.Module) -> Piece:
        """Take a program for what it is called with."""
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        positions = [at for at, value in enumerate(given) if isinstance(value, torch.Tensor)]
        mode = fake_mode()
        with torch.enable_grad():
            inputs = [given[at] if id(given[at]) in own else mode.from_tensor(given[at]) for at in positions]
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        casts = tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
        return cls(with_numbers(program, given), inputs, positions, casts)

    def surroundings(self) -> AbstractContextManager[Any]:
        """Return the contexts of a capture: gradients on, and the caller's autocast."""
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        for kind, dtype, is_enabled in self.casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
        return stack


def numbers_among(program: fx.GraphModule) -> list[int]:
    """Return the positions of inputs that are tensors to Dynamo, and numbers to the program."""
    inputs = program.graph.find_nodes(op="placeholder")
    return [at for at, node in enumerate(inputs) if any(user.target == "item" for user in node.users)]


def with_numbers(program: fx.GraphModule, given: Sequence[Any]) -> fx.GraphModule:
    """Return a program with symbolic inputs, and numbers computed from them, replaced by constants."""
    graph = fx.Graph()
    values = dict(zip(program.graph.find_nodes(op="placeholder"), given, strict=True))
    known: dict[fx.Node, Any] = {node: x for node, x in values.items() if not isinstance(x, torch.Tensor)}
    for node in program.graph.nodes:
        if node in known:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        if node.target == "item" and node.args[0] in values:
            known[node] = values[node.args[0]].item()
        elif node.op == "call_function" and known_alone(node, args, kwargs):
            known[node] = node.target(*args, **kwargs)
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
    made = fx.GraphModule(program, graph)
    made.meta = program.meta
    return made


def known_alone(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether a call computes a number from numbers."""
    value = node.meta.get("example_value")
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    nodes: list[fx.Node] = []
    fx.map_arg((args, kwargs), nodes.append)
    return not nodes
