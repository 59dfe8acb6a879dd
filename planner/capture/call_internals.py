"""Planned graphs call operators by the shortest way from Python; private torch APIs, tried by tests/capture.

``torch.ops.aten.add.Tensor(x, y)`` looks up five names, runs a Python function, and matches its arguments against a
schema; ``torch.add(x, y)`` has a parser of its own that takes half as long, and a step of small tensors is as slow as
its calls. Which operator a binding runs depends on the kinds of its arguments. So it is called once on what was
recorded of them, and stands for an operator only where it arrives there with the same arguments. Any other operator is
called without the lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_BINDINGS = (torch, torch._C._nn, torch.Tensor)
_COMPILED = (type(torch.add), type(torch.Tensor.add))
"""Bindings are of these types; what torch wrote in Python comes to nothing shorter."""


class _Stopped(Exception):
    """Carries the operator that a call arrived at, and its arguments."""


class _Arrives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Stopped(function, args, kwargs or {})


class _Shortcut:
    """What stands in a graph for a function while its code is written: that names it as a global of its own."""

    __module__ = "shortcut"

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.__name__ = function, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


_known: dict[Any, Callable[..., Any]] = {}
"""By operators and the kinds of their arguments."""


def recompile_directly(graph_module: fx.GraphModule) -> None:
    """Write the code of a graph module with calls that take no detour; its graph stays as it is."""
    targets = {node: node.target for node in graph_module.graph.nodes if type(node.target) is OpOverload}
    shortcuts: dict[Any, _Shortcut] = {}
    with _disable_current_modes():
        for node, target in targets.items():
            function = _shortest(node)
            node.target = shortcuts.setdefault(function, _Shortcut(function, str(target).replace(".", "_")))
    try:
        graph_module.recompile()
    finally:
        for node, target in targets.items():
            node.target = target
    names = graph_module.forward.__func__.__globals__  # type: ignore[attr-defined]
    names.update({name: found.function for name, found in names.items() if isinstance(found, _Shortcut)})


def _shortest(node: fx.Node) -> Callable[..., Any]:
    """Return what to call for a node's operator."""
    target: Any = node.target
    key = target, _kind(node.args), _kind(node.kwargs)
    if key not in _known:
        _known[key] = next(_bindings(node), target._op)
    return _known[key]


def _kind(argument: Any) -> Any:
    """Return what a binding tells its arguments apart by: types, and of tensors how many dimensions and elements."""
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return (type(value), value.dim() == 0, value.dtype) if isinstance(value, torch.Tensor) else type(value)
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(map(_kind, argument))
    if isinstance(argument, dict):
        return tuple((name, _kind(value)) for name, value in argument.items())
    return type(argument)


def _bindings(node: fx.Node) -> Iterator[Callable[..., Any]]:
    target: Any = node.target
    leaves = tree_leaves(fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val")))
    # What makes tensors of none is looked at by contexts such as a default device.
    if target.namespace != "aten" or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return
    if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves):
        return
    for place in _BINDINGS:
        binding = getattr(place, target._schema.name.removeprefix("aten::"), None)
        if isinstance(binding, _COMPILED) and _arrives(binding, node):
            yield binding


def _arrives(binding: Any, node: fx.Node) -> bool:
    """Whether a binding that is called as a node's operator is runs that operator, with these arguments."""
    target: Any = node.target
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        with torch.no_grad(), _Arrives():  # type: ignore[no-untyped-call]
            binding(*args, **kwargs)
    except _Stopped as stopped:
        function, arrived, named = stopped.args
        return function is target and _alike(_by_name(target, args, kwargs), _by_name(target, arrived, named))
    except (TypeError, RuntimeError, ValueError, KeyError, IndexError):
        pass
    return False


def _by_name(operator: OpOverload, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what an operator is given, with what it takes where nothing is said."""
    arguments = operator._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False))
    return {**{each.name: each.default_value for each in arguments}, **given, **kwargs}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and one == other
