"""Keep Inductor from moving computation to where it would hold more memory than planned.

Inductor writes an elementwise operation into whatever reads it, and makes one call of a product and a sum that reads
it. Both move what is computed to its reader. Where the plan has library calls in between, all that it reads waits
meanwhile, and its result is not there: that is allowed where it holds no more.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from itertools import accumulate

import torch
from torch import fx

from planner.capture.torch_internals import OpOverload
from planner.capture.trees import tensors_in

_PLACES_AND_CONSTANTS = {
    getattr(torch.ops.aten, name)
    for name in (
        "arange", "cat", "constant_pad_nd", "copy", "embedding", "empty", "expand", "full", "gather", "index",
        "scalar_tensor", "select_scatter", "slice_scatter",
    )
}  # fmt: skip
"""What torch tags neither as elementwise nor as a reduction, and Inductor writes as it does those."""

_INDEXED = "_unsafe_index_put _unsafe_masked_index_put_accumulate index_put scatter scatter_add scatter_reduce"
_INTO_A_COPY = {getattr(torch.ops.aten, name) for name in _INDEXED.split()}
"""What Inductor writes into a copy of the first input, or in its place if nothing else reads that."""

HOST_COPIES = "planner"
"""The namespace of operators that move values to the host and back."""

_LITTLE = 8
"""What a node is made of is little if the node is so many times as large."""


def is_in_a_kernel_of_inductors(node: fx.Node) -> bool:
    """Whether Inductor writes what a node computes itself, so that the kernel that eager has for it never runs."""
    from torch._inductor import lowering

    target = node.target
    if not isinstance(target, OpOverload):
        return False
    is_tagged = target.namespace == "prims" or {torch.Tag.pointwise, torch.Tag.reduction}.intersection(target.tags)
    if not is_tagged and target.overloadpacket not in _PLACES_AND_CONSTANTS | _INTO_A_COPY:
        return False
    is_written = target in lowering.lowerings and target not in lowering.fallbacks
    return is_written and not lowering.fallback_node_due_to_unsupported_type(node)


def writes_into_a_copy(node: fx.Node) -> bool:
    """Whether what Inductor writes for a node is in memory, whoever reads it, since it is written by index."""
    return getattr(node.target, "overloadpacket", None) in _INTO_A_COPY


def moves_values(node: fx.Node) -> bool:
    """Whether a node begins a copy to the host or back, or waits for one."""
    return getattr(node.target, "namespace", "") == HOST_COPIES


def must_stay_apart(product: fx.Node, total: fx.Node) -> bool:
    """Whether a product that is computed in one call with the sum that reads it would hold more until then."""
    between = product.next
    while between is not total and not _calls_a_library(between):
        between = between.next
    if between is total:
        return False
    read = dict.fromkeys(map(_owner, product.all_input_nodes))  # a product reads what is in memory
    waiting = [node for node in read if not _is_resident(node) and all(reader < total for reader in _readers(node))]
    return _size_bytes(product) < sum(map(_size_bytes, waiting))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Return the readers of a node's memory, also through views."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


class Placement:
    """Which elementwise nodes of a graph that Inductor compiles are to be in memory where it has them, and which not.

    Found in O(nodes + reads).
    """

    def __init__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        self._at = {node: position for position, node in enumerate(nodes)}
        self._calls = [0, *accumulate(map(_calls_a_library, nodes))]
        self._readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        for node in nodes:
            if not _is_view(node):
                for source in node.all_input_nodes:
                    self._readers[_owner(source)].append(node)
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.stored: set[fx.Node] = set()
        """What they are made of would be in memory till the last of their readers, and is more; or they are offloaded,
        and each copy to the host would be of a copy."""
        self.inlined: set[fx.Node] = set()
        """They are made of little: each reader computes them itself."""
        for node in nodes:
            if not _is_view(node):
                self._place(node)

    def _waiting_bytes(self, sources: Collection[fx.Node], last: fx.Node) -> int:
        """Return the bytes that would be held for this reader alone."""
        waiting = (s for s in sources if all(self._at[reader] < self._at[last] for reader in self._readers[s]))
        return sum(_size_bytes(source) for source in waiting if not _is_resident(source))

    def _place(self, node: fx.Node) -> None:
        """Note from which memory a node is computed, and whether its own is to be part of that."""
        readers = self._readers[node]
        own = frozenset([node])
        self._sources[node] = own
        if any(map(moves_values, readers)):
            self.stored.add(node)
        if (
            not is_in_a_kernel_of_inductors(node)
            or torch.Tag.reduction in getattr(node.target, "tags", ())
            or writes_into_a_copy(node)
            or not all(map(is_in_a_kernel_of_inductors, readers))
        ):
            return  # it is in memory anyway
        sources = frozenset[fx.Node]().union(*(self._sources[_owner(source)] for source in node.all_input_nodes))
        size_bytes = _size_bytes(node)
        last = max(readers, key=self._at.__getitem__, default=node)
        is_far = self._calls[self._at[last]] > self._calls[self._at[node] + 1]  # library calls lie between
        if is_far and size_bytes < self._waiting_bytes(sources, last):
            self.stored.add(node)
            return
        if _LITTLE * sum(map(_size_bytes, sources)) <= size_bytes:
            self.inlined.add(node)
        self._sources[node] = sources


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that makes the memory that a node looks at."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view and bool(node.all_input_nodes)


def _is_resident(node: fx.Node) -> bool:
    """Whether memory is the caller's: AOTAutograd calls what a step is given so, in forward and backward."""
    return node.op == "get_attr" or (node.op == "placeholder" and node.name.startswith("primals"))


def _calls_a_library(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not _is_view(node) and not is_in_a_kernel_of_inductors(node)


def _size_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's output; outputs without a fixed size, such as random states, count as none."""
    sizes = (tensor.nbytes for tensor in tensors_in(node.meta.get("val")))
    return sum(size for size in sizes if isinstance(size, int))
