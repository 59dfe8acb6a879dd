"""Planned graphs run below autograd; private torch APIs, tried by tests/capture.

A planned graph runs inside of one autograd function, and nothing of it is recorded. Torch would still send every
operator through the kernels of autograd, and then through others that note what is a view of what and count what is
written over. In a step of small tensors that is up to a sixth of its time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from networkx.utils import UnionFind
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

Below = Callable[[], AbstractContextManager[Any]]

_below_autograd: Below = torch._C._AutoDispatchBelowAutograd
_below_views: Below = torch._C._AutoDispatchBelowADInplaceOrView


def below_autograd(graph: fx.Graph) -> Below:
    """Return what makes the context in which a graph is to run.

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
    """Whether no two tensors that a graph takes or gives share memory because of it, and it writes over none it takes.

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
    """Return the arguments that a node writes over, and those whose memory its results may have."""
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return [], [source] if _is_one_storage(source) else []
    if isinstance(target, HigherOrderOperator):
        return [], []
    if not isinstance(target, OpOverload):
        return [], node.all_input_nodes
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
