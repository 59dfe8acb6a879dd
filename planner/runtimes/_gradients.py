"""Autograd around a planned graph: outputs whose gradients are missing or unexpected, and double backward.

A planned backward is traced for the outputs that a loss is expected to use. This module handles the rest: if an
expected gradient is missing, parameters that only it reaches keep ``None``, as in eager; an unexpected gradient and a
double backward are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from planner.capture.joint import JointGraph, Reach, reach_of
from planner.errors import PlannerError, RuntimeUnsupportedError


def watched(
    run: Callable[..., Any], _graph_module: fx.GraphModule, differentiable: Sequence[int], joint: JointGraph | None
) -> Callable[..., Any]:
    """Wrap a planned graph, all of whose outputs are expected to get gradients, to watch its backward."""
    reach = None if joint is None else reach_of(joint)

    def finished(*inputs: Any) -> Any:
        outputs = run(*inputs)
        watch_backward([outputs[position] for position in differentiable], reach)
        return outputs

    return finished


def watch_backward(outputs: Sequence[torch.Tensor], reach: Reach | None) -> None:
    """Put hooks on the backward of one call, given its outputs that require gradients.

    Without a ``reach`` gradients are passed on unchanged.
    """
    node = planned_node(outputs)
    if node is None:
        return
    node.register_prehook(_refuse_double_backward)
    if reach is not None:
        node.register_prehook(partial(_see_what_arrives, reach, weakref.ref(node), []))


def _refuse_double_backward(_gradients: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeUnsupportedError(
            "a planned model cannot be differentiated twice: call backward() without create_graph=True, or wrap the "
            "model with runtime='modules', which allows it"
        )


def _see_what_arrives(
    reach: Reach, node: Callable[[], Any], earlier: list[RemovableHandle], arrived: tuple[Any, ...]
) -> None:
    """If some expected gradients are missing, register a hook that drops the zeros computed for them.

    Only then: a hook makes autograd hold gradients for longer. Hooks of an ``earlier`` backward through the same node
    (``retain_graph``) are removed.
    """
    while earlier:
        earlier.pop().remove()
    raw_outputs, _ = reach
    present = frozenset(tangent for tangent, raw in enumerate(raw_outputs) if arrived[raw] is not None)
    watched = node()
    if watched is not None and len(present) < len(raw_outputs):
        earlier.append(watched.register_hook(partial(_without_unreached, reach, present)))


def _without_unreached(
    reach: Reach, present: frozenset[int], gradients: tuple[Any, ...], _arrived: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Replace by None the gradients that depend on no gradient that arrived."""
    _, depends = reach
    if len(gradients) != len(depends):
        raise PlannerError(f"{len(gradients)} gradients, planned are {len(depends)}; please report this as a bug")
    return tuple(
        None if needed and needed.isdisjoint(present) else gradient
        for gradient, needed in zip(gradients, depends, strict=True)
    )


def planned_node(outputs: Sequence[torch.Tensor]) -> Any:
    """Return the autograd node of the planned graph behind these outputs, or None."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    for _ in range(4):
        for node in pending:
            if node.name().startswith("CompiledFunction"):
                return node
        pending = [following for node in pending for following, _ in node.next_functions if following is not None]
    return None


def refusing_gradients(outputs: Sequence[torch.Tensor], inputs: Sequence[Any], refused: Callable[[], object]) -> Any:
    """Return detached outputs that the plan took for unused, attached to an input: a gradient for one is refused.

    ``refused`` is called then: in eager that gradient would count, and the plan has no backward for it.
    """
    attached_to = next(x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad)
    return _Refusing.apply(refused, attached_to, *outputs)


class _Refusing(torch.autograd.Function):
    """Identity on outputs of which no gradient is expected."""

    @staticmethod
    def forward(ctx: Any, refused: Callable[[], object], _attached_to: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.refused = refused
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if any(gradient is not None for gradient in gradients):
            ctx.refused()
            raise RuntimeUnsupportedError(
                "a gradient arrived for an output that the plan took for unused. Pass loss_fn to auto_wrap: it says "
                "which outputs count. Or run the step again: from now on it is planned with this output"
            )
        return (None, None, *gradients)
