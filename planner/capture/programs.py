"""One captured program with symbolic sizes, and for each sizes that it was called with a forward and a backward.

AOTAutograd wraps the program once, whatever its sizes: views, gradients and autocast are its business. What it takes
for the compiled forward and backward looks up those of the sizes at hand. The forward saves a number by which the
backward finds its other half.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.capture.joint import JointGraph
from planner.capture.symbolic import at_sizes, is_symbolic
from planner.capture.torch_internals import PartitionFunction, aot_backend, boxed, symbolic_kernels

Halves = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Program:
    """What runs at certain sizes; both take their arguments out of a list."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    entered: Callable[[], None] | None = None
    """Is called before each run."""


MakeProgram = Callable[[JointGraph, Sequence[Any]], Program]
"""From a joint graph with symbols, and what it is given at the sizes of a call, to what runs there."""


def plainly(partition: Callable[[JointGraph], Halves]) -> MakeProgram:
    """Return what makes the joint graph plain, and asks for a partition of it."""

    def made(joint: JointGraph, given: Sequence[Any]) -> Program:
        forward, backward = partition(at_sizes(joint, given))
        return Program(boxed(forward), boxed(backward))

    return made


class ProgramsBySize:
    """The forwards and backwards of one captured program.

    ``make`` is asked for them whenever there are none for the sizes of a call, before anything of it has run.
    """

    def __init__(self, make: MakeProgram) -> None:
        self._make = make
        self._joint: JointGraph | None = None
        self._tensors: list[int] = []
        """Positions of the program's inputs that are no sizes."""
        self._numbers: dict[tuple[int, ...], int] = {}
        """By sizes, the number of the program that runs there."""
        self._programs: list[Program] = []
        self._current = 0

    def compiled(self, partition: PartitionFunction, program: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Return what runs a program, as Dynamo captured it, at any sizes that its guards allow."""
        with symbolic_kernels():
            run = aot_backend(partition, self.forward, self.backward)(program, inputs)

        def chosen(*given: Any) -> Any:
            self.choose(given)
            return run(*given)

        return chosen

    def captured(self, joint: JointGraph) -> Halves:
        """Remember the joint graph, and return what stands for a partition of it."""
        self._joint = joint
        self._tensors = [at for at, node in enumerate(joint.placeholders) if not is_symbolic(node.meta["val"])]
        return _stand_in(joint)

    def choose(self, given: Sequence[Any]) -> None:
        """Let what runs next be the program for these inputs."""
        if self._joint is None:
            return  # nothing requires gradients
        sizes = tuple(value for value in given if not isinstance(value, torch.Tensor))
        if sizes not in self._numbers:
            self._programs.append(self._make(self._joint, given))
            self._numbers[sizes] = len(self._programs) - 1
        self._current = self._numbers[sizes]
        entered = self._programs[self._current].entered
        if entered is not None:
            entered()

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward that was chosen; beside what it saves, save its number."""
        number, tensors = self._current, [arguments[at] for at in self._tensors]
        arguments.clear()
        return [*self._programs[number].forward(tensors), number]

    def backward(self, arguments: list[Any]) -> list[Any]:
        """Run the backward whose number was saved; sizes have no gradients."""
        number, *tensors = arguments
        arguments.clear()
        assert self._joint is not None
        gradients = [None] * len(self._joint.placeholders)
        for at, gradient in zip(self._tensors, self._programs[number].backward(tensors), strict=True):
            gradients[at] = gradient
        return gradients


def _stand_in(joint: JointGraph) -> Halves:
    """Return two graph modules with the outputs of a forward and of a backward, and one saved number."""
    forward_outputs, backward_outputs = joint.outputs
    number = next(node for node in joint.placeholders if is_symbolic(node.meta["val"]))
    forward = _outline(joint, joint.placeholders, [*forward_outputs, number])
    return forward, _outline(joint, [number, *joint.tangents], backward_outputs)


def _outline(joint: JointGraph, taken: Sequence[fx.Node], given: Sequence[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[Any, Any] = {}
    for node in taken:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    everything = graph.call_function(_runs_elsewhere, tuple(copies.values()))
    for position, node in enumerate(given):
        if isinstance(node, fx.Node) and node not in copies:
            copies[node] = graph.call_function(operator.getitem, (everything, position))
            copies[node].meta = dict(node.meta)
    graph.output(tuple(copies.get(node, node) if isinstance(node, fx.Node) else node for node in given))
    return fx.GraphModule(joint.module, graph)


def _runs_elsewhere(*_: Any) -> Any:
    raise AssertionError("only the programs for certain sizes run")
