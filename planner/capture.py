"""From a model and example inputs to one joint graph of forward and backward.

There is one way in, for planning and for running: Dynamo captures the call, AOTAutograd traces
forward and backward, and our partition function receives the joint graph. Planning stops there
(:func:`capture`); running goes on with the graphs that ``planner.rewrite`` writes.
"""

from __future__ import annotations

import itertools
import logging
import re
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch.utils import _pytree as pytree

from planner.errors import CaptureError, PlannerError, RuntimeUnsupportedError, UsageError
from planner.lowering import JointGraph
from planner.provenance import is_library
from planner.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDynamoException,
    Unsupported,
    aot_backend,
    call_implementation,
    compile_isolated,
    eliminate_common_subexpressions,
    storage_id,
)

Partition = Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule]]

MAXIMUM_SHAPES = 64
"""How many sets of input shapes one wrapped model may have graphs for."""

_LOGGING = {method for method in vars(logging.Logger).values() if callable(method)}
_counter = itertools.count()
_RAISED = re.compile(r"(?:got|raised exception) (?P<kind>\w+)\((?P<quote>['\"])(?P<message>.*?)(?P=quote)\)")


@dataclass(frozen=True)
class Inputs:
    """Positional and keyword arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None) -> Inputs:
        """Read example inputs as people write them: a tensor, a tuple or list of arguments, a dict of keywords.

        Raises
        ------
        UsageError
            If they are nothing of the kind, or hold no tensor.
        """
        kwargs = dict(example_kwargs or {})
        if isinstance(example_inputs, Inputs):
            return example_inputs
        if isinstance(example_inputs, torch.Tensor):
            args: tuple[Any, ...] = (example_inputs,)
        elif isinstance(example_inputs, Mapping):
            args, kwargs = (), {**example_inputs, **kwargs}
        elif isinstance(example_inputs, (tuple, list)):
            args = tuple(example_inputs)
        elif example_inputs is None and kwargs:
            args = ()
        else:
            raise UsageError(
                f"example inputs must be a tensor, a tuple of arguments or a dict of keywords, "
                f"not {type(example_inputs).__name__}"
            )
        inputs = cls(args, kwargs)
        if not inputs.tensors():
            raise UsageError("the example inputs hold no tensor: pass what one training step passes to the model")
        return inputs

    def tensors(self) -> list[torch.Tensor]:
        """Give the tensors among the arguments, nested ones too."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """Give the same arguments with every tensor replaced."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, function, (self.args, self.kwargs))
        return Inputs(args, kwargs)


class _Captured(BaseException):
    """Carries the joint graph out of the compiler; no ``except Exception`` in between stops it."""

    def __init__(self, joint: JointGraph) -> None:
        super().__init__()
        self.joint = joint


def fake_mode() -> FakeTensorMode:
    """Give a mode in which models and inputs are built without memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def capture(model: nn.Module, inputs: Inputs) -> JointGraph:
    """Capture forward and backward of one call as a joint graph; nothing is run.

    Parameters
    ----------
    model : torch.nn.Module
        Real or built under :func:`fake_mode`. It is left as it was.
    inputs : Inputs

    Returns
    -------
    JointGraph

    Raises
    ------
    CaptureError
        If the model cannot be captured whole; names the line and the cause.

    Notes
    -----
    Time is linear in the number of operations: about 1 ms for each fx node.
    """

    def stop(joint: JointGraph) -> Any:
        raise _Captured(joint)

    check_capturable(model, inputs)
    call = isolated_call(model, stop)
    try:
        with dynamo_settings(), explain_failures(model), torch.enable_grad():
            call(*inputs.args, **inputs.kwargs)
    except _Captured as captured:
        return captured.joint
    except PlannerError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"the forward of {type(model).__name__} fails: {type(error).__name__}: {first}{_raised_at(error)}"
        ) from error
    raise CaptureError(
        f"{type(model).__name__} needs no backward: no parameter and no input that requires gradients "
        "leads to an output (is everything frozen?)"
    )


def isolated_call(model: nn.Module, partition: Partition, **options: Any) -> Callable[..., Any]:
    """Compile a model's call with a :class:`Backend`, sharing no cache with any other model."""
    implementation = call_implementation(model)

    def planned(*args: Any, **kwargs: Any) -> Any:
        return implementation(*args, **kwargs)

    # Dynamo keeps its graphs by code object: each wrapped model gets one of its own.
    code = planned.__code__.replace(co_name=f"planned_{next(_counter)}")
    own = types.FunctionType(code, planned.__globals__, code.co_name, closure=planned.__closure__)
    return compile_isolated(own, Backend(partition, **options))


class Backend:
    """A ``torch.compile`` backend around a partition function.

    Outputs that carry no loss are detached before AOTAutograd traces: otherwise their gradients,
    all zeros, would be allocated and computed with. ``planner.runtimes.graph`` gives them a way
    back for the step in which a gradient does arrive.

    Parameters
    ----------
    partition : callable
        From a :class:`~planner.lowering.JointGraph` to forward and backward graph modules.
    choose_outputs : callable
        From Dynamo's graph module to the positions of the outputs that a backward starts from.
    finish : callable, optional
        ``finish(run, graph_module, differentiable)`` wraps what AOTAutograd returns.
    """

    def __init__(
        self,
        partition: Partition,
        *,
        choose_outputs: Callable[[fx.GraphModule], list[int]] | None = None,
        finish: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        self.partition = partition
        self.choose_outputs = choose_outputs or expected_losses
        self.finish = finish

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile what Dynamo captured."""
        differentiable = self.choose_outputs(graph_module)

        def partition(
            joint: fx.GraphModule, _joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            graph = eliminate_common_subexpressions(joint.graph)
            tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
            return self.partition(JointGraph(joint, graph, num_fwd_outputs, tensors))

        narrowed = detach_others(graph_module, differentiable)
        run: Callable[..., Any] = aot_backend(partition)(narrowed, example_inputs)
        return self.finish(run, graph_module, differentiable) if self.finish else run


def differentiable_outputs(graph_module: fx.GraphModule) -> list[int]:
    """Give the positions of the outputs that require gradients."""
    outputs = graph_module.graph.output_node().args[0]
    return [i for i, node in enumerate(outputs) if (v := _value(node)) is not None and v.requires_grad]  # type: ignore[arg-type]


def expected_losses(graph_module: fx.GraphModule) -> list[int]:
    """Guess which outputs a backward starts from.

    Returns
    -------
    list of int
        Positions of the scalar outputs that require gradients if there are any (a Hugging Face model
        with labels gives its loss beside its logits), else of every output that requires gradients.
    """
    outputs: Any = graph_module.graph.output_node().args[0]
    differentiable = differentiable_outputs(graph_module)
    return [i for i in differentiable if outputs[i].meta["example_value"].dim() == 0] or differentiable


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def detach_others(graph_module: fx.GraphModule, differentiable: Sequence[int]) -> fx.GraphModule:
    """Give the graph module with all outputs detached but the named ones."""
    outputs = list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(graph_module.graph, copied)
    flat = list(result)  # type: ignore[arg-type]
    for position, node in enumerate(outputs):
        value = _value(node)
        if position not in differentiable and value is not None and value.requires_grad:
            flat[position] = graph.call_method("detach", (flat[position],))
            flat[position].meta = {"example_value": value.detach()}
    graph.output(tuple(flat))
    graph.output_node().meta = dict(graph_module.graph.output_node().meta)
    narrowed = fx.GraphModule(graph_module, graph)
    narrowed.meta = graph_module.meta
    return narrowed


@contextmanager
def dynamo_settings() -> Iterator[None]:
    """Let a planned model have graphs for many shapes, and let log messages inside it pass in silence."""
    with torch._dynamo.config.patch(
        recompile_limit=MAXIMUM_SHAPES, ignore_logging_functions=_LOGGING, suppress_errors=False
    ):
        yield


def check_capturable(model: nn.Module, inputs: Inputs) -> None:
    """Refuse at once what would fail deep inside torch.

    Raises
    ------
    UsageError
        If the inputs are not on the model's device.
    RuntimeUnsupportedError
        If a module has full backward hooks.
    """
    devices = {p.device for p in itertools.chain(model.parameters(), model.buffers())}
    for tensor in inputs.tensors():
        if len(devices) == 1 and tensor.device not in devices:
            raise UsageError(
                f"an example input is on {tensor.device} and the model on {next(iter(devices))}: move one of them"
            )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise RuntimeUnsupportedError(
                f"module {name or type(model).__name__!r} has full backward hooks, which a captured graph cannot call: "
                "remove them, or use tensor hooks on the output"
            )


@contextmanager
def explain_failures(model: nn.Module) -> Iterator[None]:
    """Turn what Dynamo and AOTAutograd raise into a :class:`CaptureError` of one line."""
    try:
        yield
    except TorchDynamoException as error:
        cause = error.__cause__ or getattr(error, "inner_exception", None)
        if isinstance(cause, PlannerError):
            raise cause from error
        name, where = type(model).__name__, _user_line(error)
        if raised := _RAISED.search(f"{error} {cause}"):
            raise CaptureError(f"the forward of {name} fails: {raised['kind']}: {raised['message']}{where}") from error
        reason = str(error).strip().splitlines()[0]
        if isinstance(error, Unsupported):
            raise CaptureError(f"{name} cannot be captured as one graph: {reason}{where}") from error
        raise CaptureError(f"the forward of {name} fails: {reason}{where}") from error


def _user_line(error: BaseException) -> str:
    stack = getattr(error, "real_stack", None)
    frames = [f for f in stack or () if not is_library(f.filename)]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else _raised_at(error)


def _raised_at(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def static_bytes(model: nn.Module, inputs: Sequence[torch.Tensor], *, alignment_bytes: int) -> dict[str, int]:
    """Count what is resident before the step, each storage once.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : sequence of torch.Tensor
        What the step is given; parameters and buffers among them are not counted again.
    alignment_bytes : int

    Returns
    -------
    dict of str to int
        Bytes of ``parameters``, ``buffers`` and ``inputs``.
    """
    seen: set[int] = set()
    counted: dict[str, int] = {}
    groups = {"parameters": model.parameters(), "buffers": model.buffers(), "inputs": iter(inputs)}
    for kind, tensors in groups.items():
        total = 0
        for tensor in tensors:
            if (storage := storage_id(tensor)) not in seen:
                seen.add(storage)
                total += -(-tensor.untyped_storage().nbytes() // alignment_bytes) * alignment_bytes
        counted[kind] = total
    return counted


def is_fake(model: nn.Module) -> bool:
    """Whether a model was built under a fake mode."""
    return any(isinstance(t, FakeTensor) for t in itertools.chain(model.parameters(), model.buffers()))
