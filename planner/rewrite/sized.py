"""Graphs that serve many sizes: the numbers that sizes decide are inputs of theirs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from planner.capture.symbolic import SizedFloat, SizedInt, Sizes
from planner.capture.torch_internals import boxed


@dataclass(frozen=True)
class SizedGraph:
    """A graph, and what the numbers are that it is given first."""

    module: fx.GraphModule
    run: Callable[[list[Any]], Any]
    numbers: tuple[fx.Node, ...]
    """By what makes them in the graph with symbols."""

    @classmethod
    def of(cls, module: fx.GraphModule) -> SizedGraph:
        """Let the sized numbers that a graph calls with, or gives, come from a list of numbers; it is changed."""
        graph = module.graph
        taken: dict[fx.Node, fx.Node] = {}
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            given = graph.placeholder("numbers_of_sizes")
        after = next((node for node in graph.nodes if node.op != "placeholder"), None)

        def replaced(number: Any) -> Any:
            if not isinstance(number, (SizedInt, SizedFloat)):
                return number
            if number.made_by not in taken:
                with graph.inserting_before(after):
                    taken[number.made_by] = made = graph.call_function(operator.getitem, (given, len(taken)))
                    made.meta["val"] = int(number) if isinstance(number, int) else float(number)
            return taken[number.made_by]

        for node in list(graph.nodes):
            if node.op in ("call_function", "output") and node.args[:1] != (given,):
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), replaced)
        return cls(module, boxed(module), tuple(taken))

    @property
    def text(self) -> str:
        """What the graph runs, whatever the sizes."""
        return f"{self.numbers}\n{self.module.code}"

    def at(self, sizes: Sizes) -> Callable[[list[Any]], Any]:
        """Return what runs the graph at given sizes."""
        numbers = [sizes.number(node) for node in self.numbers]

        def run(arguments: list[Any]) -> Any:
            arguments.insert(0, numbers)
            return self.run(arguments)

        return run


def sized(halves: Sequence[fx.GraphModule]) -> tuple[SizedGraph, SizedGraph]:
    """Return forward and backward that serve many sizes."""
    forward, backward = halves
    return SizedGraph.of(forward), SizedGraph.of(backward)
