"""Autograd around a planned graph: outputs whose gradients are missing or unexpected, and double backward.

A planned backward is traced for the outputs that a loss is expected to use. This module handles the rest: if an
expected gradient is missing, parameters that only it reaches keep ``None``, as in eager; an unexpected gradient is
computed by a second, unplanned run of the captured program; a double backward is refused.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from planner.capture.joint import JointGraph, Reach, is_random, mutates, reach_of
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


class LateGradients:
    """The backward of outputs that the plan detached, in case a gradient arrives for one after all.

    The captured program is run again from its inputs and its initial random state, and differentiated, as a checkpoint
    around the whole model would. That is correct and slow, so ``replan`` makes the next call plan for these outputs.
    """

    def __init__(
        self, graph_module: fx.GraphModule, joint: JointGraph, positions: Sequence[int], replan: Callable[[], None]
    ) -> None:
        self.graph_module, self.positions, self.replan = graph_module, positions, replan
        nodes = [n for n in joint.graph.nodes if n.op == "call_function"]
        self.random = any(is_random(node) for node in nodes)
        written = {n.args[0] for n in nodes if mutates(n)}
        self.repeatable = not any(_reads_to_compute(node, written) for node in nodes)

    def state(self) -> Any:
        """Return the random and autocast state that a second run must start from."""
        # Copies of generators, not state tensors: those would be allocated on the device, beside the plan.
        generators = [g.clone_state() for g in _generators()] if self.random else None
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return generators, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def attach(self, state: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the detached outputs, attached to the inputs by :class:`_Late`."""
        return _Late.apply(self, state, [outputs[p] for p in self.positions], *inputs)

    def gradients(self, state: Any, inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Run the captured program once more and differentiate it."""
        if not self.repeatable:
            self.replan()
            raise RuntimeUnsupportedError(
                "a gradient arrived for an output that the plan treats as unused, and the model overwrites a buffer "
                "that a second run would need: repeat the step; the plan now includes this output"
            )
        warnings.warn(
            "a gradient arrived for an output that the plan treats as unused: the model was run a second time, "
            "outside the budget; from the next call on the plan includes this output",
            stacklevel=2,
        )
        self.replan()
        generators, (kind, dtype, enabled) = state
        copies = [_own(x) for x in inputs]
        wanted = [x for x in copies if _is_wanted(x)]
        arrived = [(p, g) for p, g in zip(self.positions, gradients, strict=True) if g is not None]
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        with torch.enable_grad(), torch.random.fork_rng(devices), torch.autocast(kind, dtype=dtype, enabled=enabled):
            for generator, then in zip(_generators(), generators or (), strict=False):
                generator.set_state(then.get_state())
            again = self.graph_module(*copies)
            outputs, given = [again[p] for p, _ in arrived], [g for _, g in arrived]
            result = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
        return [next(result) if _is_wanted(x) else None for x in copies]


def _generators() -> list[torch.Generator]:
    on_cuda = list(torch.cuda.default_generators) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.default_generator, *on_cuda]


def _is_wanted(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _own(argument: Any) -> Any:
    """Return an input that the second run may overwrite or differentiate without affecting the first."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach().requires_grad_() if argument.requires_grad else argument.clone()


class _Late(torch.autograd.Function):
    """Identity on detached outputs; its backward is :meth:`LateGradients.gradients`."""

    @staticmethod
    def forward(ctx: Any, late: LateGradients, state: Any, outputs: list[torch.Tensor], *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.late, ctx.state = late, state
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs))
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None, None, None, *(None for _ in ctx.others))
        inputs = [x if saved is None else saved for saved, x in zip(ctx.saved_tensors, ctx.others, strict=True)]
        return (None, None, None, *ctx.late.gradients(ctx.state, inputs, gradients))


def _reads_to_compute(node: fx.Node, written: set[Any]) -> bool:
    """Whether a node reads an overwritten input for anything but its update."""
    if mutates(node) or "batch_norm" in str(node.target):
        return False
    if not any(source in written for source in node.all_input_nodes):
        return False
    return not all(mutates(user) for user in node.users)
