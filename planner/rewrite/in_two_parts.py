"""A backward in two graphs: one gives the gradients of inputs, the other, later, those of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from planner.transforms.weights_last import REST, is_rest


class Parts(NamedTuple):
    """The two graphs of a backward."""

    first: fx.GraphModule
    """Takes what the backward takes. Gives what the backward gives, None in place of what the rest gives, and then what
    the rest takes."""
    rest: fx.GraphModule
    """Gives what the first leaves out."""
    positions: tuple[int, ...]
    """Of what the rest gives, among the results of the backward."""


def in_two_parts(backward: fx.GraphModule) -> Parts:
    """Cut a backward whose last part is marked; see :mod:`planner.transforms.weights_last`. O(nodes)."""
    results: Sequence[Any] = backward.graph.output_node().args[0]  # type: ignore[assignment]
    nodes = [node for node in backward.graph.nodes if node.op != "output"]
    late = {node for node in nodes if is_rest(node)}
    positions: tuple[int, ...] = backward.graph.output_node().meta[REST]
    given = [results[at] for at in positions]
    read = dict.fromkeys(source for node in nodes if node in late for source in node.all_input_nodes)
    # Gradients of weights that the first part makes, with one of an input, wait for the others.
    passed = [node for node in dict.fromkeys((*read, *given)) if node not in late]

    first = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in late:
            copies[node] = first.node_copy(node, copies.__getitem__)
    own = [None if at in positions or result is None else copies[result] for at, result in enumerate(results)]
    first.output((*own, *(copies[node] for node in passed)))

    rest = fx.Graph()
    copies = {}
    for node in passed:
        if node.op == "get_attr":
            copies[node] = rest.node_copy(node)
        else:
            copies[node] = rest.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in nodes:
        if node in late:
            copies[node] = rest.node_copy(node, copies.__getitem__)
    rest.output(tuple(copies[node] for node in given))
    return Parts(
        fx.GraphModule(backward, first, "PlannedBackward"), fx.GraphModule(backward, rest, "PlannedWeights"), positions
    )
