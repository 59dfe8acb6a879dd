"""Where a step can be computed in chunks: what is around its largest values and keeps rows apart."""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
from torch import fx

from planner.capture.joint import JointGraph, storages_of, tensors_of
from planner.capture.lowering import LoweredGraph
from planner.ir.graph import OperationCost
from planner.ir.problem import Problem
from planner.ir.simulator import lifetimes
from planner.solving.peak_bounds import first_run_bytes, lowest_schedule
from planner.transforms.chunk_rules import Form, Split, lead_of, split_of

_LARGEST = 8
"""So many of the values at the peak are tried."""

_AS_WIDE, _CARRIED_BY = 0.5, 1
"""What has half as many elements for each row as the value at the peak is followed, and so are statistics: what has
one. Everything in between ends a region, for it is cheap to hold whole."""

_WORTH = 0.5
"""What is put together again must be less than this part of what exists only in chunks."""


@dataclass(frozen=True)
class ChunkRegion:
    """Calls that are computed in chunks of ``rows``."""

    rows: int
    splits: dict[fx.Node, Split]
    """Each call, in the graph's order, and how it is computed for some of the rows."""
    forms: dict[fx.Node, Form]
    """What each of them gives; of a call with several outputs what it gives as a whole, in chunks."""
    parts: dict[fx.Node, int]
    """The number of the connected part that each call is in."""

    def passes(self, source: fx.Node, reader: fx.Node) -> bool:
        """Say :func:`passes` of this region."""
        return passes(self.splits, self.forms, source, reader)


def passes(splits: dict[fx.Node, Split], forms: dict[fx.Node, Form], source: fx.Node, reader: fx.Node) -> bool:
    """Whether a call reads another chunk by chunk."""
    both = source in splits and reader in splits
    return both and splits[reader].takes.get(source) is forms[source] is not Form.SUM


def find_region(lowered: LoweredGraph) -> ChunkRegion | None:
    """Find what can be computed in chunks to lower a peak that recompute cannot lower further.

    The region is around the largest value for which there is one, and everything else that is built alike. It does not
    depend on what operations cost, nor on time, so that a plan's region is found again. About a millisecond for each
    operation.
    """
    graph = lowered.graph
    costs = (OperationCost(seconds=1.0),) * len(graph.operations)
    problem = Problem(graph=graph, costs=costs, budget_bytes=max(first_run_bytes(graph, costs), default=0))
    schedule = lowest_schedule(problem)
    peak = problem.evaluate(schedule).peak_position
    alive = {copy.value for copy in lifetimes(graph, schedule) if copy.born <= peak <= copy.died}
    # The caller is given outputs whole, whether it holds them or not.
    free = [u for u in alive if not graph.values[u].retained and graph.values[u].kind != "output"]
    free.sort(key=lambda value: (-graph.values[value].size_bytes, value))
    for value in free[:_LARGEST]:
        node = lowered.value_nodes[value]
        if node is not None and node.op == "call_function":
            found = [region for rows in _rows_of(node) if (region := region_around(lowered.joint, node, rows))]
            if found:
                return max(found, key=lambda region: sum(map(_chunked_bytes, region.splits)))
    return None


def _rows_of(node: fx.Node) -> Iterator[int]:
    """Return the numbers of rows that a value may have: what its leading dimensions come to."""
    for tensor in tensors_of(node)[:1]:
        numbers = (math.prod(tensor.shape[:dims]) for dims in range(tensor.dim() - 1, 0, -1))
        yield from (rows for rows in dict.fromkeys(numbers) if rows > 1)


def region_around(joint: JointGraph, seed: fx.Node, rows: int) -> ChunkRegion | None:
    """Return all calls that can be computed for some of so many rows, and are built like one or around such."""
    for joins_wide in (False, True):  # what is wide is put together only where there is no region otherwise
        grown = _Growth(joint, seed, rows, joins_wide)
        grown.grow()
        grown.take_back()
        if (region := grown.region()) is not None:
            return region
    return None


class _Growth:
    def __init__(self, joint: JointGraph, seed: fx.Node, rows: int, joins_wide: bool) -> None:
        self.joint, self.seed, self.rows, self.joins_wide = joint, seed, rows, joins_wide
        (tensor,) = tensors_of(seed)[:1]
        self.width = tensor.numel() // rows
        self.splits: dict[fx.Node, Split] = {}
        self.forms: dict[fx.Node, Form] = {}

    def grow(self) -> None:
        """Follow rows from everything like the seed, as far as values are wide."""
        alike = [node for node in self.joint.graph.nodes if _like(node, self.seed)]
        self.forms.update(dict.fromkeys(alike, Form.ROWS))
        pending = deque(alike)
        while pending:
            node = pending.popleft()
            maker = node.args[0] if node.target is operator.getitem else node
            for neighbour in (maker, *node.users):
                if isinstance(neighbour, fx.Node) and neighbour.op == "call_function" and neighbour not in self.splits:
                    pending.extend(self._join(neighbour))

    def _join(self, node: fx.Node) -> Iterator[fx.Node]:
        """Add a call to the region, and return the values to follow from it."""
        split = split_of(node, self.rows, self.forms)
        if split is None:
            return
        elements = [user for user in node.users if user.target is operator.getitem]
        several = isinstance(node.meta["val"], (list, tuple))
        made = {element: split.gives[element.args[1]] for element in elements} if several else {node: split.gives[0]}  # type: ignore[index]
        if any(self.forms.get(made_node, form) is not form for made_node, form in made.items()):
            return
        self.splits[node] = split
        self.forms[node] = Form.ROWS
        if several:
            self.splits.update((element, Split((form,), {node: Form.ROWS})) for element, form in made.items())
        self.forms.update(made)
        for source, form in split.takes.items():
            if source.op == "call_function" and self.forms.setdefault(source, form) is form and self._leads_on(source):
                yield source
        yield from (made_node for made_node, form in made.items() if form is not Form.SUM and self._leads_on(made_node))

    def take_back(self) -> None:
        """Remove calls whose whole output is needed and would be assembled from large chunks, or cannot be."""
        pending = deque(self.splits)
        while pending:
            node = pending.popleft()
            if node in self.splits and not self._stays(node):
                del self.splits[node]
                around = [*node.all_input_nodes, *node.users]
                elements = [user for other in around for user in other.users if user.target is operator.getitem]
                pending.extend(other for other in (*around, *elements) if other in self.splits)

    def _stays(self, node: fx.Node) -> bool:
        if not all(self._can_take(source, form) for source, form in self.splits[node].takes.items()):
            return False
        if isinstance(node.meta["val"], (list, tuple)):
            return all(user in self.splits for user in node.users)
        if node.target is operator.getitem and node.args[0] not in self.splits:
            return False
        if all(passes(self.splits, self.forms, node, user) for user in node.users):
            return True
        (tensor,) = tensors_of(node)
        if _is_alias(node) or not tensor.is_contiguous():
            return False
        may_be_joined = self.joins_wide or not self._is_wide(node)
        return self.forms[node] is Form.SUM or (self.forms[node] is Form.ROWS and may_be_joined)

    def _can_take(self, source: fx.Node, form: Form) -> bool:
        """Whether chunks of a value exist or are views of it: its leading dimensions are contiguous."""
        if form is Form.COLUMNS or (source in self.splits and self.forms[source] is form):
            return True
        tensor = tensors_of(source)[0]
        lead = lead_of(tensor.shape, self.rows)
        assert lead is not None
        return all(tensor.stride(dim) == tensor.stride(dim + 1) * tensor.shape[dim + 1] for dim in range(lead.dims - 1))

    def region(self) -> ChunkRegion | None:
        parts = self._parts()
        joined: Counter[int] = Counter()
        chunked: Counter[int] = Counter()
        for node in self.splits:
            if self.forms[node] is not Form.ROWS or _is_alias(node) or isinstance(node.meta["val"], (list, tuple)):
                continue
            whole = not all(passes(self.splits, self.forms, node, user) for user in node.users)
            (joined if whole else chunked)[parts[node]] += _chunked_bytes(node)
        worth = {part for part, size_bytes in chunked.items() if joined[part] < _WORTH * size_bytes}
        if parts.get(self.seed) not in worth:
            return None
        kept = [node for node in self.joint.graph.nodes if node in self.splits and parts[node] in worth]
        return ChunkRegion(
            rows=self.rows,
            splits={node: self.splits[node] for node in kept},
            forms={node: self.forms[node] for node in kept},
            parts={node: parts[node] for node in kept},
        )

    def _parts(self) -> dict[fx.Node, int]:
        """Return the number of the connected part that each call is in."""
        graph = nx.Graph()
        graph.add_nodes_from(self.splits)
        for reader in self.splits:
            sources = (n for n in reader.all_input_nodes if passes(self.splits, self.forms, n, reader))
            graph.add_edges_from((source, reader) for source in sources)
        return {node: number for number, part in enumerate(nx.connected_components(graph)) for node in part}

    def _leads_on(self, node: fx.Node) -> bool:
        return self._is_wide(node) or (self._elements(node) == _CARRIED_BY and tensors_of(node)[0].is_floating_point())

    def _is_wide(self, node: fx.Node) -> bool:
        return self._elements(node) >= _AS_WIDE * self.width

    def _elements(self, node: fx.Node) -> float:
        return max((tensor.numel() for tensor in tensors_of(node)), default=0) / self.rows


def _like(node: fx.Node, seed: fx.Node) -> bool:
    """Whether a call is the same operator as another, with an output of the same shape and type."""
    if node.op != "call_function" or node.target is not seed.target or len(tensors_of(node)) != 1:
        return False
    (own,), (other,) = tensors_of(node), tensors_of(seed)
    return (own.shape, own.dtype) == (other.shape, other.dtype)


def _is_alias(node: fx.Node) -> bool:
    """Whether a call is a view."""
    if node.target is operator.getitem:
        return _is_alias(node.args[0])  # type: ignore[arg-type]
    read = storages_of(node.all_input_nodes)
    return bool(read) and storages_of([node]) <= read


def _chunked_bytes(node: fx.Node) -> int:
    """Return the bytes of a call's outputs over all chunks; views count nothing."""
    return 0 if _is_alias(node) else sum(tensor.nbytes for tensor in tensors_of(node))
