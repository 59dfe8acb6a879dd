"""Backwards whose gradients of weights are computed when a pipeline asks for them, and not before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from planner.capture.torch_internals import boxed
from planner.rewrite.in_two_parts import in_two_parts


class LaterWeights:
    """What the last backward of a module has left for later: the gradients of its parameters."""

    def __init__(self) -> None:
        self._left: Callable[[], None] | None = None

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
        parts = in_two_parts(backward)
        (results,) = backward.graph.output_node().args
        self._results = len(results)  # type: ignore[arg-type]
        # Tokens of operators with effects stand before what has gradients.
        begins = len(forward.graph.find_nodes(op="placeholder")) - self._results
        self._places = [begins + at for at in parts.positions]
        self._forward, self._first, self._rest = boxed(forward), boxed(parts.first), boxed(parts.rest)
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
