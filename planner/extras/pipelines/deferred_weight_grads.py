"""Backwards in two parts: gradients of inputs first, those of weights when a zero-bubble schedule asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from planner.capture.joint import DEFERRED, JointGraph, ancestors, is_deferred, mutates, needed_by_forward
from planner.capture.torch_internals import boxed


class LaterWeights:
    """What the last backward of a module has left for later: the gradients of its parameters."""

    def __init__(self) -> None:
        self._left: Callable[[], None] | None = None

    def mark(self, joint: JointGraph, model: nn.Module) -> None:
        """Move what only gradients of a model's parameters need to the end of the backward, and mark it."""
        weights_last(joint, {id(parameter) for parameter in model.parameters()})

    def step(self) -> LaterHalves:
        """Return what runs the halves of a program."""
        return LaterHalves(self)

    def leave(self, rest: Callable[[], None] | None) -> None:
        """Note what the backward that has just run leaves."""
        self._left = rest

    def take(self) -> Callable[..., None]:
        """Return what computes them, as torch's ``dw_builder`` does: asked right after each backward."""
        left, self._left = self._left, None
        return left or (lambda: None)


class LaterHalves:
    """The forward and backward of one program; the backward gives nothing for parameters."""

    def __init__(self, later: LaterWeights) -> None:
        self._later = later

    def take(self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
        """Take the halves; the forward gives so many outputs, and then what it saves."""
        first, rest, positions = in_two_parts(backward)
        (results,) = backward.graph.output_node().args
        self._results = len(results)  # type: ignore[arg-type]
        # Tokens of operators with effects stand before what has gradients.
        begins = len(forward.graph.find_nodes(op="placeholder")) - self._results
        self._places = [begins + at for at in positions]
        self._forward, self._first, self._rest = boxed(forward), boxed(first), boxed(rest)
        self._parameters: list[weakref.ref[nn.Parameter]] = []

    def forward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the forward, on the parameters whose gradients come later."""
        self._later.leave(None)  # of a backward that nobody asked for the rest of
        self._parameters = [weakref.ref(arguments[place]) for place in self._places]
        results: Sequence[Any] = self._forward(arguments)
        return results

    def backward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the first part of the backward, and leave the other for later."""
        results = list(self._first(arguments))
        self._later.leave(partial(self._add_up, results[self._results :]))
        return results[: self._results]

    def _add_up(self, passed: list[Any]) -> None:
        made = list(self._rest(passed))
        with torch.no_grad():
            for reference in reversed(self._parameters):
                parameter, gradient = reference(), made.pop()
                if parameter is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
                del gradient


def in_two_parts(backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule, tuple[int, ...]]:
    """Cut a backward whose last part is marked; see :func:`weights_last`. O(nodes).

    The first graph takes what the backward takes. It gives what the backward gives, None in place of what the rest
    gives, and then what the rest takes. The positions of what the rest gives, among the results, come last.
    """
    results: Sequence[Any] = backward.graph.output_node().args[0]  # type: ignore[assignment]
    nodes = [node for node in backward.graph.nodes if node.op != "output"]
    late = {node for node in nodes if is_deferred(node)}
    positions: tuple[int, ...] = backward.graph.output_node().meta[DEFERRED]
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
    made = fx.GraphModule(backward, first, "PlannedBackward"), fx.GraphModule(backward, rest, "PlannedWeights")
    return *made, positions


def weights_last(joint: JointGraph, parameters: Collection[int]) -> None:
    """Move what only gradients of ``parameters``, given by their identity, need behind all else of the backward.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023: other stages wait for gradients of inputs alone. What
    reads the gradient of an input is of the first part too: that is sent away when the first part is over. O(nodes).
    """
    forward, nodes = needed_by_forward(joint), list(joint.graph.nodes)
    gradients = list(zip(joint.inputs, joint.outputs[1], strict=True))
    sent = [node for tensor, node in gradients if isinstance(node, fx.Node) and id(tensor) not in parameters]
    first = {*forward, *ancestors(sent, nodes)}
    end = joint.graph.output_node()
    reads_sent = {reader for node in sent for reader in node.users if reader is not end}
    first.update(ancestors([node for node in nodes if node in reads_sent or mutates(node)], nodes))
    for node in nodes:
        if node.op == "call_function" and node not in first:
            node.meta[DEFERRED] = True
            end.prepend(node)
    end.meta[DEFERRED] = tuple(
        at for at, (tensor, node) in enumerate(gradients) if isinstance(node, fx.Node) and id(tensor) in parameters
    )
