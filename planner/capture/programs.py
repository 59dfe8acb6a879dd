"""Run one captured program with symbolic sizes, by a forward and a backward for each set of sizes.

AOTAutograd wraps the program once, whatever its sizes: views, gradients and autocast are its business. What it takes
for the compiled forward and backward looks up those of the sizes at hand. The forward saves a number by which the
backward finds its other half.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.capture.joint import JointGraph
from planner.capture.symbolic import at_sizes, computes_with_data, is_number, is_symbolic, symbol_of, symbols_of_sizes
from planner.capture.torch_internals import PartitionFunction, aot_backend, boxed, symbolic_kernels
from planner.errors import RuntimeUnsupportedError, UnsupportedModelError

_KEPT = 4096
"""How many programs are kept, those that differ in nothing but a number among them."""

Halves = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Program:
    """Boxed forward and backward for certain sizes."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    entered: Callable[[], None] | None = None
    """Is called before each run."""
    at: Callable[[Sequence[Any]], Program] | None = None
    """Returns what runs at the same sizes where other numbers change."""


MakeProgram = Callable[[JointGraph, Sequence[Any]], Program]
"""From a joint graph with symbols, and what it is given at the sizes of a call, to what runs there."""


def plainly(partition: Callable[[JointGraph], Halves]) -> MakeProgram:
    """Return a partition function that first replaces symbols by the sizes of the call."""

    def made(joint: JointGraph, given: Sequence[Any]) -> Program:
        forward, backward = partition(at_sizes(joint, given))
        return Program(boxed(forward), boxed(backward))

    return made


class ProgramsBySize:
    """The forwards and backwards of one captured program.

    ``make`` is asked for them whenever there are none for the sizes of a call, before anything of it has run. For the
    same sizes and another of the numbers that decide none there is nothing to make.
    """

    def __init__(self, make: MakeProgram) -> None:
        self._make = make
        self._joint: JointGraph | None = None
        self._given = 0
        self._tensors: list[int] = []
        """Positions of the program's inputs that are no numbers."""
        self._changing: list[int] = []
        """Positions of those that are, and decide no size."""
        self._saves_tensor = False
        """Whether the number of a program is saved as a tensor, since none that the program is given is an integer."""
        self._made: dict[tuple[int, ...], Program] = {}
        self._numbers: dict[tuple[Any, Any], int] = {}
        """By sizes and what changes, the number of the program that runs there."""
        self._programs: dict[int, Program] = {}
        self._count = itertools.count()
        self._current = 0

    def compiled(self, partition: PartitionFunction, program: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Return a function that runs a captured program at any sizes that its guards allow."""
        self._given = len(inputs)
        with symbolic_kernels():
            run = aot_backend(partition, self.forward, self.backward)(program, inputs)

        def chosen(*given: Any) -> Any:
            self.choose(given)
            return run(*given)

        return chosen

    def captured(self, joint: JointGraph) -> Halves:
        """Remember the joint graph, and return what stands for a partition of it."""
        self._joint = joint
        placeholders = list(enumerate(joint.placeholders))
        if len(joint.arguments) != self._given:
            raise UnsupportedModelError(
                "its sizes vary, and it is given tensors that are made of several (of a subclass), or runs operators "
                "with effects"
            )
        if computes_with_data(joint.graph):  # what is saved is one number, that of the program
            raise UnsupportedModelError(
                "its sizes or numbers vary, and it computes with a number that it reads from a tensor"
            )
        self._tensors = [at for at, node in placeholders if not is_number(node)]
        deciding = symbols_of_sizes(joint.graph)
        self._changing = [at for at, n in placeholders if is_number(n) and symbol_of(n.meta["val"]) not in deciding]
        self._saves_tensor = not any(is_symbolic(node.meta["val"]) for node in joint.placeholders)
        return _stand_in(joint)

    def choose(self, given: Sequence[Any]) -> None:
        """Choose the program for these inputs, which the next call runs."""
        if self._joint is None:
            return  # nothing requires gradients
        numbers = {at: x.item() if isinstance(x := given[at], torch.Tensor) else x for at in self._changing}
        given = [numbers.get(at, value) for at, value in enumerate(given)]
        sizes = tuple(x for at, x in enumerate(given) if at not in numbers and not isinstance(x, torch.Tensor))
        key = sizes, tuple(numbers.values())
        known = self._programs.get(self._numbers.get(key, -1))
        if known is None:
            known = self._remember(key, self._program(sizes, given))
        self._current = self._numbers[key]
        if known.entered is not None:
            known.entered()

    def _program(self, sizes: tuple[int, ...], given: Sequence[Any]) -> Program:
        assert self._joint is not None
        made = self._made.get(sizes)
        if made is not None and made.at is not None:
            return made.at(given)
        self._made[sizes] = self._make(self._joint, given)
        return self._made[sizes]

    def _remember(self, key: tuple[Any, Any], program: Program) -> Program:
        """Give a program a number; the oldest is forgotten, where numbers change in every call."""
        if len(self._programs) >= _KEPT:
            del self._programs[next(iter(self._programs))]
        if len(self._numbers) >= 2 * _KEPT:
            self._numbers = {key: number for key, number in self._numbers.items() if number in self._programs}
        number = self._numbers[key] = next(self._count)
        self._programs[number] = program
        return program

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward that was chosen; beside what it saves, save its number."""
        number, tensors = self._current, [arguments[at] for at in self._tensors]
        arguments.clear()
        results = list(self._programs[number].forward(tensors))
        if self._saves_tensor:  # tensors are saved before integers
            assert self._joint is not None
            results.insert(self._joint.num_forward_outputs, torch.tensor(number, dtype=torch.float64))
            return results
        return [*results, number]

    def backward(self, arguments: list[Any]) -> list[Any]:
        """Run the backward whose number was saved; numbers have no gradients."""
        number, *tensors = arguments
        arguments.clear()
        assert self._joint is not None
        if int(number) not in self._programs:
            raise RuntimeUnsupportedError(f"over {_KEPT} forwards, each with another number, wait for their backwards")
        gradients = [None] * len(self._joint.placeholders)
        for at, gradient in zip(self._tensors, self._programs[int(number)].backward(tensors), strict=True):
            gradients[at] = gradient
        return gradients


def _stand_in(joint: JointGraph) -> Halves:
    """Return two graph modules with the outputs of a forward and of a backward, and one saved number."""
    forward_outputs, backward_outputs = joint.outputs
    number = next(node for held in (is_symbolic, may_stand_in) for node in joint.placeholders if held(node.meta["val"]))
    forward = _outline(joint, joint.placeholders, [*forward_outputs, number])
    return forward, _outline(joint, [number, *joint.tangents], backward_outputs)


def may_stand_in(held: Any) -> bool:
    """Whether this may be a number that changes, for which Dynamo passes a tensor: tracing may have pinned it."""
    return isinstance(held, torch.Tensor) and not held.dim() and held.dtype == torch.float64


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
