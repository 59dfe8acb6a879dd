"""Which operations of a captured step must keep their order though no value passes between them.

They draw random numbers, talk to other processes, are not torch's own, or write into memory that others read or write:
parameters, buffers and inputs among it, which are no values. Or what passes between them is a number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from planner.capture.joint import is_collective, is_random, mutates, tensors_of, writes_statistics
from planner.capture.lowering import LoweredGraph
from planner.capture.operands import is_opaque
from planner.capture.torch_internals import OpOverload, storage_id

_PURE = ("aten", "prims")
"""Whose operators do nothing but what their schemas and tags say."""


def runs_after(lowered: LoweredGraph) -> dict[int, tuple[int, ...]]:
    """Return, for operations by index, earlier ones that must stay before them; O(nodes + arguments).

    What follows from others is left out: of three that draw, the third names the second.
    """
    index_of = {node: index for index, node in enumerate(lowered.operation_nodes) if node is not None}
    after: defaultdict[int, set[int]] = defaultdict(set)
    chained: int | None = None
    wrote: dict[int, int] = {}
    read_since: defaultdict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(lowered.operation_nodes):
        if node is None:
            # Autograd runs it: once all is there, or between forward and backward, which is where it stays anyway.
            after[index].update(range(index))
            continue
        after[index].update(_sources_of_numbers(lowered, node, index_of))
        if _is_chained(node):
            if chained is not None:
                after[index].add(chained)
            chained = index
        written = _storages(_written(node))
        for storage in _storages(node.all_input_nodes):
            if storage in wrote:
                after[index].add(wrote[storage])
            if storage in written:
                after[index].update(read_since.pop(storage, ()))
                wrote[storage] = index
            else:
                read_since[storage].append(index)
    return {index: tuple(sorted(earlier)) for index, earlier in after.items() if earlier}


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node may write into."""
    if mutates(node):
        return node.all_input_nodes
    statistics = node.args[3:5] if writes_statistics(node) else ()
    return [argument for argument in statistics if isinstance(argument, fx.Node)]


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_id(tensor) for node in nodes for tensor in tensors_of(node)}


def _is_chained(node: fx.Node) -> bool:
    """Whether an operation does more than its results and what it writes into tell."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in _PURE or is_opaque(target):
        return True
    return is_random(node) or is_collective(node)


def _sources_of_numbers(lowered: LoweredGraph, node: fx.Node, index_of: dict[fx.Node, int]) -> set[int]:
    """Return the operations that make what a node is called with and that is no tensor of the step."""
    found: set[int] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in index_of and not lowered.storage_of.get(source):
            found.add(index_of[source])
        elif source in lowered.alias_nodes:
            stack.extend(source.all_input_nodes)
    return found
