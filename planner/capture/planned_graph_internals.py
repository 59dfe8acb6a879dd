"""Run planned graphs with little overhead: below autograd, by torch's own bindings; private torch APIs.

A planned graph runs inside of one autograd function, and nothing of it is recorded. Torch would still send every
operator through the kernels of autograd, and then through others that note what is a view of what and count what is
written over. In a step of small tensors that is up to a sixth of its time.

``torch.ops.aten.add.Tensor(x, y)`` looks up five names, runs a Python function, and matches its arguments against a
schema; ``torch.add(x, y)`` has a parser of its own that takes half as long. Which operator a binding runs depends on
the kinds of its arguments. So it is called once on what was recorded of them, and stands for an operator only where it
arrives there with the same arguments. Any other operator is called without the lookups.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from networkx.utils import UnionFind
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Below = Callable[[], AbstractContextManager[Any]]

_below_autograd: Below = torch._C._AutoDispatchBelowAutograd
_below_views: Below = torch._C._AutoDispatchBelowADInplaceOrView


def below_autograd(graph: fx.Graph) -> Below:
    """Return a factory of the context in which a graph runs.

    Operators that are not torch's own may count on autograd inside, so a graph that has one runs as ever. What leaves
    a graph is to share its memory with nothing else where views are not noted: torch tells by them, and by counts of
    writes, that a saved tensor was changed.
    """
    if not all(map(_is_known, graph.nodes)):
        return nullcontext
    return _below_views if _keeps_to_itself(graph) else _below_autograd


def _is_known(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target.namespace in ("aten", "prims")
    if isinstance(target, HigherOrderOperator):  # draws, from a state that is kept
        return all(arg.namespace == "aten" for arg in node.args if isinstance(arg, OpOverload))
    return target is operator.getitem or getattr(target, "__module__", "").startswith("planner.")


def _keeps_to_itself(graph: fx.Graph) -> bool:
    """Whether a graph aliases none of its inputs and outputs, and writes into no input.

    Of functions that are no operators nothing is said: they count as giving what they take.
    """
    memory = UnionFind()
    taken = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    written: list[fx.Node] = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            writes, shown = written_and_shown(node)
            written += writes
            memory.union(node, *shown)
    outside = {*taken, *graph.output_node().all_input_nodes}
    is_apart = len({memory[node] for node in outside}) == len(outside)
    return is_apart and {memory[node] for node in written}.isdisjoint(memory[node] for node in taken)


def written_and_shown(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments that a node writes into, and those that its results may alias.

    Functions of ``planner.rewrite`` (copies to the host, dropout from a saved state) return memory of their own. When
    they counted as aliases, the host took 1.2 times as long for an offloading step of a ViT-B.
    """
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return [], [source] if _is_one_storage(source) else []
    if isinstance(target, HigherOrderOperator):
        return [], []
    if not isinstance(target, OpOverload):
        return [], [] if getattr(target, "__module__", "").startswith("planner.rewrite.") else node.all_input_nodes
    schema = target._schema
    shows = any(result.alias_info is not None for result in schema.returns)
    written: list[fx.Node] = []
    shown: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        nodes: list[fx.Node] = []
        fx.map_arg(value, nodes.append)
        written += nodes if argument.alias_info.is_write else []
        shown += nodes if shows else []
    return written, shown


def _is_one_storage(source: fx.Node) -> bool:
    """Whether the elements of a tuple or list are views of one tensor."""
    target: Any = source.target
    if isinstance(target, OpOverload):
        return any(result.alias_info is not None for result in target._schema.returns)
    return not isinstance(target, HigherOrderOperator)


# Calls of operators.

_BINDINGS = (torch, torch._C._nn, torch.Tensor)
_COMPILED = (type(torch.add), type(torch.Tensor.add))
"""Bindings are of these types; what torch wrote in Python comes to nothing shorter."""


class _Stopped(Exception):
    """Carries the operator that a call arrived at, and its arguments."""


class _Arrives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Stopped(function, args, kwargs or {})


class _Shortcut:
    """Stands for a function while a graph's code is generated, under a global name of its own."""

    __module__ = "shortcut"

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.__name__ = function, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


_known: dict[Any, Callable[..., Any]] = {}
"""By operators and the kinds of their arguments."""


def recompile_directly(graph_module: fx.GraphModule) -> None:
    """Regenerate a graph module's code with direct calls; its graph is unchanged."""
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
