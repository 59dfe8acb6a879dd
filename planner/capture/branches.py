"""Specialize a captured program on branches that depend on input values, which every call checks.

A traced program cannot look at data. While it is captured, the condition of such a branch is computed from the inputs
at hand, and the branch that eager would take is taken. Each call computes the conditions first: one in which another
branch is to be taken runs another program, captured for itself.

What whole numbers that the forward makes itself decide is the same in every call: it is computed once, on the host, and
no call looks at it again, for which it would wait for the device.

Only what follows from inputs and buffers can be known before the program runs. What depends on parameters, on random
numbers or on what was written in place is left alone: Dynamo refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from planner.capture.joint import sources
from planner.capture.state_restore import RandomStates, random_states_kept
from planner.capture.torch_internals import FakeTensor, version_of
from planner.capture.tracing_internals import deciding, given_to, kept_by_tracing
from planner.errors import PlannerError


class OtherBranchError(PlannerError):
    """A call takes another branch than the captured program; internal to the runtime."""


@kept_by_tracing
def branches(condition: Any, held: bool) -> None:
    """Check a branch in a captured program; raise OtherBranchError if its condition has changed."""
    if bool(condition) is not held:
        raise OtherBranchError("the call takes another branch than the captured step")


def branches_decided() -> AbstractContextManager[None]:
    """Take the branches that the inputs decide while a program is traced."""
    return deciding(_Conditions().held, branches)


@dataclass(frozen=True)
class Branches:
    """The branches that a captured program has taken."""

    conditions: fx.GraphModule
    """Computes their conditions, one after the other."""
    positions: tuple[int, ...]
    """Of what these are computed from, among the program's inputs."""
    taken: tuple[str, ...]
    """The inputs that decide each, and how."""

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise an OtherBranchError for inputs that ask for another branch, before anything has been run."""
        with torch.no_grad():
            self.conditions(*(inputs[at] for at in self.positions))


def take_out(graph_module: fx.GraphModule) -> Branches | None:
    """Remove the branch checks from a captured program, with what only they need; None if there are none."""
    graph = graph_module.graph
    calls = graph.find_nodes(op="call_function", target=branches)
    if not calls:
        return None
    placeholders = graph.find_nodes(op="placeholder")
    all_origins = list(map(_Origin, calls))
    removed = set().union(*(origin.nodes for origin in all_origins))
    checked = [(origin, call) for origin, call in zip(all_origins, calls, strict=True) if not origin.is_constant()]
    origins = [origin for origin, _ in checked]
    needed = set().union(*(origin.nodes for origin in origins))
    conditions = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in needed and (size := _size_of_input(node)):
            copies[node] = conditions.call_method("size", (copies[size[0]], size[1]))
        elif node in needed:
            copies[node] = conditions.node_copy(node, copies.__getitem__)
    conditions.output(None)
    taken = Branches(
        fx.GraphModule(graph_module, conditions),
        tuple(at for at, node in enumerate(placeholders) if node in needed),
        tuple(f"{_names(origin)}: {call.args[1]}" for origin, call in checked),
    )
    for node in reversed(graph.nodes):
        if node.target is branches or (node in removed and not node.users and node.op != "placeholder"):
            graph.erase_node(node)
    graph_module.recompile()
    return taken if checked else None


class _Conditions:
    """What a program that is being traced computes from its inputs alone."""

    def __init__(self) -> None:
        self._values: dict[fx.Node, Any] = {}

    def held(self, condition: fx.Node) -> bool | None:
        """Evaluate a condition for these inputs; None if only running the program can tell."""
        origin = _Origin(condition)
        if not origin.is_known() or (origin.has_floats() and any(map(_switches_types, condition.graph.nodes))):
            return None
        on_host = origin.is_constant()
        values = {} if on_host else self._values
        with random_states_kept(), torch.no_grad():
            before = RandomStates()
            try:
                for node in condition.graph.nodes:
                    if node in origin.nodes and node not in values:
                        values[node] = _computed(node, values, on_host=on_host)
                held = bool(values[condition])
            except Exception:  # eager will say what is wrong
                return None
            return held if before == RandomStates() else None


def _computed(node: fx.Node, values: Mapping[fx.Node, Any], *, on_host: bool) -> Any:
    if node.op == "placeholder":
        return given_to(node)
    if size := _size_of_input(node):
        return values[size[0]].shape[size[1]]
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if on_host and "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


class _Origin:
    """A condition and all that it is computed from."""

    def __init__(self, condition: fx.Node) -> None:
        self.nodes = sources([condition], inputs_of=_read_by)
        self.given = [node for node in self.nodes if node.op == "placeholder"]

    def is_known(self) -> bool:
        """Whether it can be computed before the program runs, from what is neither a parameter nor without data."""
        given = map(given_to, self.given)
        if any(x is None or isinstance(x, (FakeTensor, nn.Parameter)) for x in given):
            return False
        return all(map(_is_as_made, self.nodes))

    def is_constant(self) -> bool:
        """Whether the condition depends only on integers that the program itself creates."""
        named = (node for node in self.nodes if any(isinstance(x, torch.device) for x in node.args))
        return not self.given and not any(named) and not self.has_floats()

    def has_floats(self) -> bool:
        """Whether any of it is of a type that autocast changes."""
        values = (value for node in self.nodes if (value := example_of(node)) is not None)
        return any(value.is_floating_point() or value.is_complex() for value in values)


def _is_as_made(node: fx.Node) -> bool:
    """Whether a node is an input or a call, has no gradient, and nothing was written into it."""
    value = example_of(node)
    if value is not None and (value.requires_grad or value.is_inference() or version_of(value)):
        return False
    return node.op in ("placeholder", "call_function", "call_method")


def _size_of_input(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return an input and a dimension of it that is as long as a size that varies; None if there is none.

    A size says nothing of data, whatever tensor it is asked of: that of an embedding is that of the tokens.
    """
    size = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(size, torch.SymInt):
        return None
    for given in node.graph.find_nodes(op="placeholder"):
        for dimension, other in enumerate(getattr(example_of(given), "shape", ())):
            is_same = isinstance(other, torch.SymInt) and other.node.expr == size.node.expr
            if is_same and not isinstance(given_to(given), nn.Parameter):
                return given, dimension
    return None


def _read_by(node: fx.Node) -> list[fx.Node]:
    size = _size_of_input(node)
    return [size[0]] if size else node.all_input_nodes


def _names(origin: _Origin) -> str:
    """Return the user's names of the inputs that a condition depends on."""
    read = [given for given in origin.given if example_of(given) is not None]  # not the sizes, which vary
    names = (str(given.target).strip("_").removeprefix("L_").removeprefix("kwargs_") for given in read or origin.given)
    return "+".join(sorted(names))


def example_of(node: Any) -> torch.Tensor | None:
    """Return the tensor that Dynamo traced a node with, if it is a node and that is a tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _switches_types(node: fx.Node) -> bool:
    """Whether a node enters or leaves autocast, under which a condition would get other types."""
    return getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast")
