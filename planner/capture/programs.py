"""Run one captured program by planned forwards and backwards: one for each set of sizes, and for each plan.

AOTAutograd wraps the program once, whatever its sizes and its plan: views, gradients and autocast are its business.
What it takes for the compiled forward and backward looks up those of the sizes at hand, under the plan in force. The
forward saves a number by which the backward finds its other half. So another plan takes no other capture.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture import torch_internals as internals
from planner.capture.joint import JointGraph, fake_mode_of, is_tangent
from planner.capture.symbolic import at_sizes, computes_with_data, is_number, symbol_of, symbols_of_sizes
from planner.errors import RuntimeUnsupportedError, UnsupportedModelError

_KEPT = 4096
"""How many programs are kept, those that differ in nothing but a number among them."""

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}

Halves = tuple[fx.GraphModule, fx.GraphModule]


ON_HOST = "is the place of an offloaded value"
"""In a node's meta."""


@dataclass
class Program:
    """Boxed forward and backward for certain sizes."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    enter: Callable[[], bool | None] = lambda: True
    """Is called before each run; False if another plan is in force by now, so that another program must be made."""
    at: Callable[[Sequence[Any]], Program] | None = None
    """Returns what runs at the same sizes where other numbers change."""
    halves: Halves | None = None
    """What the two run, if that is in graphs of its own."""
    _under_hooks: Any = None
    """Both as :meth:`under_hooks` returns them, once they were needed."""

    def under_hooks(self, first_saved: int) -> tuple[Callable[[list[Any]], Any], Callable[[list[Any]], Any]] | None:
        """Return both as they run under hooks that a user has put around a call; None if there are no graphs.

        As in eager, what is saved is packed after its last use in the forward. The backward takes functions in place of
        saved tensors, and calls each where it is first read.
        """
        if self.halves is not None and self._under_hooks is None:
            forward, backward = (_copied(half.graph) for half in self.halves)
            end: Any = forward.output_node()
            results = list(end.args[0])
            packed = {node: _packed_in(forward, node) for node in dict.fromkeys(results[first_saved:])}
            end.args = ([*results[:first_saved], *map(packed.__getitem__, results[first_saved:])],)
            for saved in backward.find_nodes(op="placeholder"):
                if saved.users and not is_tangent(saved):
                    with backward.inserting_before(min(saved.users)):
                        unpacked = backward.call_function(_call, (saved,))
                    unpacked.meta = saved.meta
                    saved.replace_all_uses_with(unpacked, delete_user_cb=lambda user: user.target is not _call)
            graphs = zip(self.halves, (forward, backward), strict=True)
            self._under_hooks = tuple(internals.boxed(fx.GraphModule(half, graph)) for half, graph in graphs)
        return self._under_hooks


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _packed_in(graph: fx.Graph, saved: fx.Node) -> fx.Node:
    """Let a graph pack a value after its last use, or after all inputs; what is an output too would hold itself.

    The place of an offloaded value is not packed: what a hook made of it would not be that place.
    """
    others = [user for user in saved.users if user.op != "output"]
    last = max([saved, *others, *graph.find_nodes(op="placeholder")])
    is_output = saved.op != "placeholder" and len(others) < len(saved.users)
    with graph.inserting_after(last):
        return graph.call_function(_kept if ON_HOST in saved.meta else _pack, (saved, is_output))


def _pack(saved: Any, is_output: bool) -> Callable[[], Any]:
    """Return what unpacks what hooks make of a value."""
    hooks = internals.default_saved_tensors_hooks()
    assert hooks is not None
    with torch.no_grad():
        return partial(hooks[1], hooks[0](saved.detach() if is_output else saved))


def _kept(saved: Any, _: bool) -> Callable[[], Any]:
    return lambda: saved


def _call(unpack: Callable[[], Any]) -> Any:
    return unpack()


class _Packed(int):
    """The number of a program, with what unpacks each value that it saves under hooks around a call."""

    saved: list[Callable[[], Any]]

    @classmethod
    def of(cls, number: int, saved: list[Callable[[], Any]]) -> _Packed:
        """Join what is saved to a number."""
        packed = cls(number)
        packed.saved = saved
        return packed

    def taken(self) -> list[Callable[[], Any]]:
        """Return what unpacks each; nothing is held on to unless the backward keeps its graph."""
        saved = self.saved
        if not internals.keeps_graph():
            self.saved = []
        return saved


MakeProgram = Callable[[JointGraph, Sequence[Any]], Program]
"""From a joint graph with symbols, and what it is given at the sizes of a call, to what runs there."""


def plainly(partition: Callable[[JointGraph], Halves], joint: JointGraph, given: Sequence[Any]) -> Program:
    """Return the program of a partition function, for which symbols are first replaced by the sizes of the call."""
    forward, backward = partition(at_sizes(joint, given))
    return Program(internals.boxed(forward), internals.boxed(backward), halves=(forward, backward))


class Programs:
    """The forwards and backwards of one captured program.

    ``make`` is asked for them whenever there are none for the sizes of a call, or only those of an earlier plan, before
    anything of it has run. For the same sizes and another of the numbers that decide none there is nothing to make.
    """

    def __init__(self, make: MakeProgram, *, is_sized: bool) -> None:
        self._make, self._is_sized = make, is_sized
        self._joint: Any = None
        """What was captured; None if nothing requires gradients."""
        self._given = 0
        self._tensors: list[int] = []
        """Positions of the program's inputs that are no numbers."""
        self._changing: list[int] = []
        """Positions of those that are, and decide no size."""
        self._made: dict[tuple[int, ...], Program] = {}
        self._numbers: dict[tuple[Any, Any], int] = {}
        """By sizes and what changes, the number of the program that runs there."""
        self._programs: dict[int, Program] = {}
        self._count = itertools.count()
        self._reads_numbers = False
        """Whether the program computes with numbers that it reads from tensors, so that it may save some."""
        self._num_saved: dict[int, int] = {}
        """By the number of a program, how many numbers it saves."""
        self._current = 0

    def compiled(self, partition: internals.PartitionFunction, program: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Return a function that runs a captured program at any sizes that its guards allow."""
        self._given = len(inputs)
        with internals.symbolic_kernels() if self._is_sized else nullcontext():
            run = internals.aot_backend(partition, self.forward, self.backward)(program, inputs)

        def chosen(*given: Any) -> Any:
            self.choose(given)
            return run(*given)

        return chosen

    def captured(self, joint: JointGraph) -> Halves:
        """Remember the joint graph, and return what stands for a partition of it."""
        self._joint = joint if self._is_sized else replace(joint, inputs=[])
        self._reads_numbers = computes_with_data(joint.graph)
        if not self._is_sized:
            return _stand_in(joint)
        placeholders = list(enumerate(joint.placeholders))
        if len(joint.arguments) != self._given:
            raise UnsupportedModelError(
                "its sizes vary, and an input is a subclass made of several tensors, or it runs operators with side "
                "effects"
            )
        if self._reads_numbers:
            raise UnsupportedModelError("its sizes or numbers vary, and it computes with a number read from a tensor")
        self._tensors = [at for at, node in placeholders if not is_number(node)]
        deciding = symbols_of_sizes(joint.graph)
        self._changing = [at for at, n in placeholders if is_number(n) and symbol_of(n.meta["val"]) not in deciding]
        return _stand_in(joint)

    def choose(self, given: Sequence[Any]) -> None:
        """Choose the program for these inputs, which the next call runs."""
        if self._joint is None:
            return
        key: Any = (), ()
        if self._is_sized:
            key, given = self._key(given)
        known = self._programs.get(self._numbers.get(key, -1))
        if known is None or known.enter() is False:
            if known is not None:
                self._made.pop(key[0], None)
            known = self._remember(key, self._program(key[0], given))
            known.enter()
        self._current = self._numbers[key]

    def _key(self, given: Sequence[Any]) -> tuple[tuple[Any, Any], Sequence[Any]]:
        """Return what decides the program for these inputs, and the inputs with numbers in place of tensors."""
        numbers = {at: x.item() if isinstance(x := given[at], torch.Tensor) else x for at in self._changing}
        given = [numbers.get(at, value) for at, value in enumerate(given)]
        sizes = tuple(x for at, x in enumerate(given) if at not in numbers and not isinstance(x, torch.Tensor))
        return (sizes, tuple(numbers.values())), given

    def _program(self, sizes: tuple[int, ...], given: Sequence[Any]) -> Program:
        made = self._made.get(sizes)
        if made is not None and made.at is not None:
            return made.at(given)
        joint = self._joint
        if not self._is_sized:
            joint = replace(joint, inputs=[x for x in given if isinstance(x, torch.Tensor)])
        self._made[sizes] = self._make(joint, given)
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
        number, first = self._current, self._joint.num_forward_outputs
        if self._is_sized:
            arguments[:] = [arguments[at] for at in self._tensors]
        program, hooks = self._programs[number], internals.default_saved_tensors_hooks()
        halves = program.under_hooks(first) if hooks is not None and not self._reads_numbers else None
        if hooks is not None and halves is not None:
            results = halves[0](arguments)
            return [*results[:first], _Packed.of(number, results[first:])]
        results = list(program.forward(arguments))
        if self._reads_numbers:  # what it saves of these comes last, and AOTAutograd knows of one number alone
            tensors = [x for x in results[first:] if isinstance(x, torch.Tensor)]
            self._num_saved[number] = len(results) - first - len(tensors)
            saved = results[first + len(tensors) :]
            results[first:] = [*(torch.tensor(x, dtype=_DTYPES[type(x)]) for x in saved), *tensors]
        return [*results, number]

    def backward(self, arguments: list[Any]) -> list[Any]:
        """Run the backward whose number was saved; numbers have no gradients."""
        number = arguments.pop(0)
        if number not in self._programs:
            raise RuntimeUnsupportedError(f"over {_KEPT} forwards, each with another number, wait for their backwards")
        program = self._programs[number]
        backward = program.backward
        if isinstance(number, _Packed):
            halves = program.under_hooks(self._joint.num_forward_outputs)
            assert halves is not None
            backward, arguments[:0] = halves[1], number.taken()
        if self._reads_numbers:
            arguments[: self._num_saved[number]] = [x.item() for x in arguments[: self._num_saved[number]]]
        found = backward(arguments)
        if not self._is_sized:
            return found
        gradients = [None] * len(self._joint.placeholders)
        for at, gradient in zip(self._tensors, found, strict=True):
            gradients[at] = gradient
        return gradients


def _stand_in(joint: JointGraph) -> Halves:
    """Return two graph modules with the outputs of a forward and of a backward, and one saved number."""
    forward_outputs, backward_outputs = joint.outputs
    number = fx.Graph().placeholder("number")
    number.meta["val"] = internals.some_number(fake_mode_of(joint.graph))
    forward = _outline(joint, joint.arguments, [*forward_outputs, number])
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
