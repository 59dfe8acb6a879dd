"""Replace symbolic sizes in a captured joint graph by the sizes of a call.

What was computed from sizes becomes a number, and every operator runs once more on fake tensors of these sizes: so
layouts, copies and views are what its own rules say, and nothing is derived from formulas.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from planner.capture import operands
from planner.capture.common_subexpressions import eliminate_common_subexpressions
from planner.capture.fake_internals import python_code
from planner.capture.fake_kernels import eager_results
from planner.capture.in_place import update_in_place
from planner.capture.joint import SYMBOLIC_VALUE, JointGraph, fake_mode_of, is_tangent
from planner.capture.torch_internals import outside_autocast
from planner.errors import PlannerError

aten = torch.ops.aten

_SLICES = {aten.slice.Tensor: 2, aten.slice_backward.default: 3, aten.slice_scatter.default: 3}
"""Operators of slices, and after how many arguments these say where the slice begins."""

_NUMBER_IN = aten._local_scalar_dense.default

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class OtherProgramError(PlannerError):
    """Sizes for which another program would be captured; internal to the runtime."""


class SizedInt(int):
    """An integer that depends on sizes, and its node in the graph with symbols."""

    made_by: fx.Node


class SizedFloat(float):
    """A float that depends on sizes, likewise."""

    made_by: fx.Node


def _sized(number: Any, node: fx.Node) -> Any:
    kinds: dict[type, Any] = {int: SizedInt, float: SizedFloat}
    if type(number) not in kinds:
        return number
    made = kinds[type(number)](number)
    made.made_by = node
    return made


def is_symbolic(value: Any) -> bool:
    """Whether a recorded value is a symbolic number."""
    return isinstance(value, SYMBOLIC)


def is_number(placeholder: fx.Node) -> bool:
    """Whether a program is given a number there: a size, or one that changes, for which Dynamo passes a tensor."""
    recorded = placeholder.meta.get("val")
    if not isinstance(recorded, Tensor):
        return is_symbolic(recorded)
    if recorded.dim() or recorded.dtype != torch.float64 or not placeholder.users:
        return False
    return all(user.target is _NUMBER_IN and is_symbolic(user.meta.get("val")) for user in placeholder.users)


def computes_with_data(graph: fx.Graph) -> bool:
    """Whether an operation on tensors takes a number that the forward reads from a tensor of its own."""
    read: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_symbolic(node.meta.get("val")) or node.op == "placeholder":
            continue
        sources = node.all_input_nodes
        is_given = sources[0].op == "placeholder" and is_number(sources[0])
        if (node.target is _NUMBER_IN and not is_given) or not read.isdisjoint(sources):
            read.add(node)
    return any(user.meta.get("val") is not None for node in read for user in node.users if user not in read)


def symbols_of_sizes(graph: fx.Graph) -> set[Any]:
    """Return the symbols that decide how tensors are laid out."""
    tensors = [leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    sizes = (n for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset()))
    expressions = {expression_of(size) for size in sizes if isinstance(size, torch.SymInt)}
    return {symbol for expression in expressions for symbol in expression.free_symbols}


def at_sizes(joint: JointGraph, given: Sequence[Any]) -> JointGraph:
    """Return the joint graph for given inputs, with sizes and varying numbers as constants; O(nodes).

    The result has no placeholders for numbers, and no gradients for them. Raises OtherProgramError if the program does
    not run at these sizes.
    """
    numbers = bound(joint, given)
    # Gradients and casts are operations of the program already.
    with fake_mode_of(joint.graph), torch.no_grad(), outside_autocast(), eager_results(joint.elsewhere):
        try:
            graph = _AtSizes(joint, given, numbers).run()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise OtherProgramError(f"the captured program does not run at these sizes: {error}") from error
        graph = eliminate_common_subexpressions(graph)
    update_in_place(graph)
    return replace(
        joint,
        graph=graph,
        inputs=[x for x in given if isinstance(x, Tensor)],
        outside_bytes=tuple(number_of(size, numbers) for size in joint.outside_bytes),
        varies=False,
    )


def bound(joint: JointGraph, given: Sequence[Any]) -> Numbers:
    """Return the numbers that symbols stand for; OtherProgramError if one symbol stands for two."""
    numbers: Numbers = {}
    placeholders = joint.placeholders
    if len(placeholders) != len(given):
        raise OtherProgramError("the captured program takes other arguments than the call has")
    for node, value in zip(placeholders, given, strict=True):
        recorded = node.meta["val"]
        pairs = [(recorded, value)]
        if isinstance(value, Tensor):
            pairs = [*zip(recorded.shape, value.shape, strict=True)]
            pairs += zip(recorded.stride(), value.stride(), strict=True)
        for size, number in pairs:
            symbol = symbol_of(size)
            if symbol is not None and numbers.setdefault(symbol, number) != number:
                raise OtherProgramError(f"sizes that were equal when the program was captured are {number} and others")
    return numbers


class Sizes:
    """Values of a captured program's symbolic numbers for the sizes of a call."""

    def __init__(self, joint: JointGraph, given: Sequence[Any]) -> None:
        self.symbols = bound(joint, given)
        self._evaluated: dict[Any, Any] = {}
        self._known: dict[fx.Node, Any] = {
            node: value for node, value in zip(joint.placeholders, given, strict=True) if is_number(node)
        }

    def of(self, expression: Any) -> Any:
        """Return the value of an expression in symbols."""
        if expression not in self._evaluated:
            self._evaluated[expression] = evaluated(expression, self.symbols)
        return self._evaluated[expression]

    def number(self, node: fx.Node) -> Any:
        """Return a node's number, computed as Python computes it."""
        if node not in self._known:
            source = node.args[0] if node.target is _NUMBER_IN else None
            if isinstance(source, fx.Node) and source in self._known:
                self._known[node] = self._known[source]
            elif any(isinstance(source.meta.get("val"), Tensor) for source in node.all_input_nodes):
                self._known[node] = self.of(expression_of(node.meta["val"]))
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.number)
                self._known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._known[node]


class _AtSizes:
    """Copies a graph with symbolic numbers replaced by their values."""

    def __init__(self, joint: JointGraph, given: Sequence[Any], numbers: Numbers) -> None:
        self.joint, self.given, self.numbers = joint, given, numbers
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}
        """For each node its copy, or a number."""
        self.values: dict[fx.Node, Any] = {}
        """What that holds: a fake tensor, or the number."""

    def run(self) -> fx.Graph:
        self._take_inputs()
        for node in self.joint.graph.nodes:
            if node.op == "get_attr":
                self._adopt(node, self.graph.node_copy(node), node.meta.get("val"))
            elif node.op == "call_function":
                self._call(node)
        self._give_outputs()
        return self.graph

    def _take_inputs(self) -> None:
        like = operands.sharing(lambda t, elements: torch.empty(elements, dtype=t.dtype, device=t.device))
        given = iter(self.given)
        for node in self.joint.graph.find_nodes(op="placeholder"):
            recorded = node.meta["val"]
            value = self._tangent(recorded) if is_tangent(node) else next(given)
            if is_number(node):
                self._put(node, value)
                continue
            if isinstance(value, Tensor) and not is_tangent(node):
                value = like(value) if _is_dynamic(recorded) else recorded
            self._adopt(node, self.graph.node_copy(node), value)

    def _tangent(self, recorded: Any) -> Any:
        if not isinstance(recorded, Tensor):
            return number_of(recorded, self.numbers)
        if not _is_dynamic(recorded):
            return recorded
        sizes, strides = ([number_of(n, self.numbers) for n in each] for each in (recorded.shape, recorded.stride()))
        return torch.empty_strided(sizes, strides, dtype=recorded.dtype, device=recorded.device)

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.made.__getitem__)
        values, keywords = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if _takes_all(target, values):
            if target is not aten.slice.Tensor:
                position = 1 if target is aten.slice_scatter.default else 0
                self.made[node], self.values[node] = args[position], values[position]
                return
            target, args, values = aten.alias.default, args[:1], values[:1]
        if target is _NUMBER_IN and not isinstance(values[0], Tensor):
            self._put(node, values[0])
            return
        result = target(*values, **keywords)
        if is_symbolic(node.meta.get("val")) and not is_symbolic(result):  # data, not sizes, decide what still is one
            self._put(node, result)
        else:
            self._adopt(node, self.graph.call_function(target, args, kwargs), result)

    def _adopt(self, node: fx.Node, copy: fx.Node, value: Any) -> None:
        copy.meta = {**node.meta, "val": value, SYMBOLIC_VALUE: node.meta.get("val")}
        self.made[node], self.values[node] = copy, value

    def _put(self, node: fx.Node, number: Any) -> None:
        self.made[node], self.values[node] = _sized(number, node), number

    def _give_outputs(self) -> None:
        """Copy the graph's outputs, without gradients of sizes."""
        output = self.joint.graph.output_node()
        flat: Any = output.args[0]
        descriptors = output.meta.get("desc") or [None] * len(flat)
        forward = self.joint.num_forward_outputs
        sizes = {forward + at for at, node in enumerate(self.joint.placeholders) if is_number(node)}
        kept = [at for at in range(len(flat)) if at not in sizes]
        self.graph.output(fx.map_arg([flat[at] for at in kept], self.made.__getitem__))
        self.graph.output_node().meta = {**output.meta, "desc": [descriptors[at] for at in kept]}


def _takes_all(target: Any, args: Sequence[Any]) -> bool:
    """Whether a slice, or its backward, covers the whole dimension with an open end.

    With sizes that are numbers torch does not write these down.
    """
    if target not in _SLICES:
        return False
    given: list[Any] = [*args[_SLICES[target] :]]
    given += [None, None, 1][len(given) :]
    start, end, step = given
    return step == 1 and not start and (end is None or end == sys.maxsize)


def _is_dynamic(tensor: Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


_KEPT = 2**14
"""How many functions are kept: more than the programs of any training have expressions."""

Numbers = dict[Any, int]
"""What the symbols of symbolic sizes stand for."""


def expression_of(size: Any) -> Any:
    """Return what a number is in symbols; itself, if there are none in it."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def symbol_of(size: Any) -> Any:
    """Return the symbol that a symbolic size is; None for a number, or for what is computed from symbols."""
    expression = expression_of(size)
    return expression if getattr(expression, "is_Symbol", False) else None


def evaluated(expression: Any, numbers: Numbers) -> Any:
    """Return an expression's number for given symbols."""
    if not hasattr(expression, "xreplace"):
        return expression
    function = as_function(expression)
    if function is not None:
        with suppress(KeyError, NameError):  # a symbol that stands for nothing yet, a function that is not Python's
            return function(numbers)
    found = expression.xreplace(numbers)
    return int(found) if getattr(found, "is_integer", False) else float(found)


def number_of(size: Any, numbers: Numbers) -> Any:
    """Return a size, symbolic or not, for given symbols; no guard is made."""
    return evaluated(size.node.expr, numbers) if isinstance(size, torch.SymInt) else size


@lru_cache(_KEPT)
def as_function(expression: Any) -> Callable[[Numbers], int] | None:
    """Return a function of the symbols for an integer expression; None for any other.

    Putting numbers in for symbols takes sympy a tenth of a millisecond and more, and a step of a new size has many
    expressions.

    >>> import sympy
    >>> length = sympy.Symbol("length", integer=True)
    >>> as_function(4 * length**2 + 1)({length: 3})
    37
    >>> as_function(length / 2) is None
    True
    """
    symbols = tuple(expression.free_symbols)
    if not symbols or not getattr(expression, "is_integer", False):
        return None
    function = eval(f"lambda {', '.join(map(str, symbols))}: int({python_code(expression)})", {"math": math})
    return lambda numbers: function(*[numbers[symbol] for symbol in symbols])
