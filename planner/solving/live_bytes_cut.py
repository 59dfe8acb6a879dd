"""How many bytes wait beside a run, whatever a plan does, since what they are for cannot be made after it.

Some values are there at one moment. The maker of one of them ran last before it, and from then on that value stayed.
Operations that find no room beside it could not run any more. What the others of the set need of such operations had
been made before, and was there while that maker ran: on each way from such an operation to the set at least one value.
The least that such values come to is a minimum cut (Ford and Fulkerson, "Maximal flow through a network", Canadian
Journal of Mathematics 8, 1956), with bytes for capacities.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

import networkx as nx
from networkx.algorithms.flow import dinitz

from planner.ir.graph import TrainingGraph

_SOURCE, _SINK = "what is wanted", "what cannot run"
_BEFORE, _AFTER = False, True
"""The two nodes of a value: a way that passes it goes from the one to the other."""


@dataclass(frozen=True, slots=True)
class Behind:
    """What cannot run any more, and what cannot be made without it."""

    operations: Set[int]
    values: Set[int]


def behind(graph: TrainingGraph, operations: Set[int]) -> Behind:
    """Return what depends on operations. O(operations + reads)."""
    values = set[int]()
    for index, operation in enumerate(graph.operations):
        if index in operations or not values.isdisjoint(operation.inputs):
            values.update(operation.outputs)
    return Behind(operations, values)


def least_cut(
    graph: TrainingGraph, size_bytes: Sequence[int], free: Set[int], wanted: Collection[int], behind: Behind
) -> tuple[int, int]:
    """Return the least bytes of values without which nothing ``wanted`` depends on the operations; and the work.

    Values that are ``free``, or of no size, cost nothing. The work is how many values there are on the ways: a flow
    among them takes no more than their square times what they read (Dinitz, "Algorithm for solution of a problem of
    maximum flow in networks with power estimation", Soviet Mathematics Doklady 11, 1970), and mostly about as long as
    to walk over them a few times.
    """
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    left = [u for u in wanted if u in behind.values and u not in free]
    seen = set(left)
    network.add_edges_from((_SOURCE, (u, _BEFORE)) for u in left)
    while left:
        value = left.pop()
        maker = graph.producer[value]
        network.add_edge((value, _BEFORE), (value, _AFTER), capacity=size_bytes[value])
        if maker in behind.operations:
            network.add_edge((value, _AFTER), _SINK)
            continue
        for u in graph.operations[maker].inputs:
            if u in behind.values and u not in free:
                network.add_edge((value, _AFTER), (u, _BEFORE))
                if u not in seen:
                    seen.add(u)
                    left.append(u)
    return nx.minimum_cut_value(network, _SOURCE, _SINK, flow_func=dinitz), len(seen)
