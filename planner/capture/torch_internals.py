"""Every touch of a private torch API, in one place.

A new torch release that moves one of them breaks this file, with one message: see
:func:`self_test`, which ``tests/capture/test_torch_internals.py`` runs on each supported version.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from traceback import walk_stack
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch import fx
from torch._C import DispatchKey
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._decomp import decompositions
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import mutation_guard
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException, Unsupported, UserError
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    SavedForBackwardsAOTOutput,
    TangentAOTInput,
)
from torch._functorch.compile_utils import fx_graph_cse
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx.graph import _BoxedCodeGen
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _disable_current_modes

from planner.errors import PlannerError

__all__ = [
    "CHECKPOINT",
    "GIVES_GRADIENTS_AWAY",
    "GUARDS_PARAMETERS",
    "BatchNorm",
    "Compiler",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "OpOverload",
    "SavedForBackwardsAOTOutput",
    "TangentAOTInput",
    "TorchDynamoException",
    "Unsupported",
    "aot_backend",
    "boxed",
    "call_implementation",
    "calling",
    "compile_isolated",
    "depends_on_data",
    "dynamic_ranges",
    "dynamo_settings",
    "eager_kernels",
    "eliminate_common_subexpressions",
    "has_full_backward_hooks",
    "has_onednn",
    "install_call",
    "installed_call",
    "is_marked_dynamic",
    "is_mutable",
    "min_cut_partition",
    "numbers_among",
    "outside_tracing",
    "profiler_is_running",
    "run_and_save_rng_state",
    "run_compiled",
    "run_with_rng_state",
    "self_test",
    "storage_id",
    "training_switches",
    "version_of",
    "without_dynamic_marks",
    "written_arguments",
]

CHECKPOINT = inspect.unwrap(getattr(checkpointing, "_checkpoint_impl", checkpointing.checkpoint)).__code__
"""What the interpreter runs for ``torch.utils.checkpoint.checkpoint``, however that was imported or wrapped.

From torch 2.15 on it is a decorator too, and both ways lead to one function.
"""

_NO_LIMIT = 2**31 - 1
_DYNAMIC_MARKS = {"_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices"}
_BESIDE_MARKS = {"_dynamo_dynamic_range", "_dynamo_hint_overrides", "_specialize_on", "_has_dynamo_dim_marking"}


class _Functions(set[Callable[..., Any]]):
    """A setting whose copies are empty.

    Torch 2.11 sorts a deep copy of its settings for a log; functions have no order, and a traceback follows.
    """

    def __deepcopy__(self, memo: Any) -> set[Callable[..., Any]]:
        return set()


_LOGGING = _Functions(method for method in vars(logging.Logger).values() if callable(method))

PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

Compiler = Callable[[PartitionFunction], Callable[..., Any]]
"""From our partition to a ``torch.compile`` backend that uses it."""


GIVES_GRADIENTS_AWAY = hasattr(torch.autograd.Function, "boxed_grads_call")
"""Whether AOTAutograd's backward is the only one to hold the gradients that it is given; else they stay to its end."""

GUARDS_PARAMETERS = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""Whether Dynamo captures anew when a parameter begins or ceases to train; 2.11 runs the graph that it has."""


def boxed(graph_module: fx.GraphModule, _example_inputs: Any = None) -> Callable[[list[Any]], Any]:
    """Make a graph module run with boxed code: every tensor is freed right after its last use."""
    graph_module.graph.set_codegen(_BoxedCodeGen())
    graph_module.recompile()
    forward = graph_module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_backend(partition: PartitionFunction) -> Callable[..., Any]:
    """Return a ``torch.compile`` backend that runs AOTAutograd with our partition and boxed code.

    Mutations of buffers stay in the graph: without that BatchNorm's statistics would be
    forward outputs, copied outside.
    """
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed,
        bw_compiler=boxed,
        inference_compiler=boxed,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend


def eliminate_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """Merge equal pure operations, as torch's own partitioner does before it partitions."""
    return fx_graph_cse(graph)


def storage_id(tensor: torch.Tensor) -> int:
    """Identify a tensor's storage, fake or real, for as long as the storage lives."""
    return id(tensor.untyped_storage())  # torch gives one Python object for each storage


def version_of(tensor: torch.Tensor) -> int:
    """Say how often a tensor's storage was written into in place, as autograd counts it."""
    return tensor._version


def compile_isolated(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function whole, with static shapes; ``function`` must own its code object.

    Dynamo caches by code object, so two functions that share one would share graphs and plans.
    """
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def run_compiled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the graph that a function was compiled to for such arguments, else the function itself; compile nothing.

    It is what ``torch._dynamo.run`` does, in less time: whoever calls is not inside a trace.
    """
    mutation_guard.GenerationTracker.generation += 1  # Inductor's CUDA graphs tell steps apart by it
    before = set_eval_frame(False)
    try:
        return function(*args, **kwargs)
    finally:
        set_eval_frame(before)


def install_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let ``module(...)`` run ``call``, as ``nn.Module.compile`` does, or its own call again."""
    module._compiled_call_impl = call


@contextmanager
def calling(module: torch.nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Let ``module(...)`` run ``call`` for as long as the context lasts."""
    before = installed_call(module)
    install_call(module, call)
    try:
        yield
    finally:
        install_call(module, before)


def install_untraced_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` run ``call``, and ``torch.compile(module)`` too: nothing in it is traced."""
    reason = "a model wrapped by planner.auto_wrap runs its own graphs"
    install_call(module, torch.compiler.disable(call, reason=reason))


def installed_call(module: torch.nn.Module) -> Any:
    """Return what was installed, or None."""
    return getattr(module, "_compiled_call_impl", None)


def untraced_call(module: torch.nn.Module) -> Any:
    """Return what :func:`install_untraced_call` was given, or None."""
    return getattr(installed_call(module), "_torchdynamo_orig_callable", None)


def depends_on_data(error: TorchDynamoException) -> bool:
    """Whether a capture failed because the program looks at values that it does not have."""
    return isinstance(error, UserError) and "data-dependent" in str(error)


def has_onednn() -> bool:
    """Whether CPU operators may use oneDNN."""
    return bool(torch._C._get_mkldnn_enabled()) and bool(torch.backends.mkldnn.is_available())


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Let what is run have data, and its own kernels, although a program is being traced."""
    with _disable_current_modes(), no_python_dispatcher():
        yield


def is_mutable(operator: OpOverload) -> bool:
    """Whether an operator writes into one of its arguments."""
    return bool(operator._schema.is_mutable)


def written_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes into, by the operator's schema."""
    if not is_mutable(operator):
        return []
    found = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in (value if isinstance(value, (list, tuple)) else [value]) if leaf is not None]
    return found


def numbers_among(operator: OpOverload, args: Sequence[Any]) -> int:
    """Count the numbers of Python that a call takes for tensors: eager torch makes a tensor of each."""
    expected = (argument.type for argument in operator._schema.arguments)
    return sum(
        isinstance(given, (bool, int, float, complex)) and isinstance(kind, torch.TensorType)
        for kind, given in zip(expected, args, strict=False)
    )


def profiler_is_running() -> bool:
    """Whether a torch profiler is on; another cannot be started inside it."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def training_switches(model: torch.nn.Module) -> tuple[bool, ...]:
    """Return the mode of every module and whether each parameter trains.

    It reads what ``modules()`` and ``parameters()`` read, in a tenth of their time.
    """
    found: list[bool] = []
    seen: set[torch.nn.Module] = set()
    pending: list[torch.nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        found.append(module.training)
        if module._parameters:
            found += [p is not None and p.requires_grad for p in module._parameters.values()]
        if module._modules:
            pending += module._modules.values()
    return tuple(found)


def has_full_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks wait for the gradients of a module's inputs and outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


# Their kernels for training are torch's own only in forms that tracing makes of them.
_DECOMPOSED = {
    "aten::native_batch_norm",
    "aten::dropout",
    "aten::lstm",
    "aten::gru",
    "aten::rnn_tanh",
    "aten::rnn_relu",
}
_COMPOSITE = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@cache
def _decomposed_by_tracing() -> list[OpOverload]:
    """Return the operators that tracing would replace by others, though eager training has a kernel for them."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    overloads = (getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in p.overloads())
    return [
        o for o in overloads if o._schema.name not in _DECOMPOSED and not o.py_kernels.keys().isdisjoint(_COMPOSITE)
    ]


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace operators as the kernels that eager training calls: upsampling as one operation, not as thirty."""
    operators = _decomposed_by_tracing()
    before = [dict(operator.py_kernels) for operator in operators]
    try:
        for operator in operators:
            for key in _COMPOSITE:
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in zip(operators, before, strict=True):
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


@contextmanager
def dynamo_settings() -> Iterator[None]:
    """Capture again whenever something differs, hooks too; log messages inside a model pass in silence."""
    settings = torch._dynamo.config.patch(
        recompile_limit=_NO_LIMIT,  # the limit is ours: see planner.runtimes.graph
        accumulated_recompile_limit=_NO_LIMIT,
        skip_nnmodule_hook_guards=False,  # a hook that is added later would not run, and nobody would know
        allow_rnn=True,
        ignore_logging_functions=_LOGGING,
        suppress_errors=False,
        record_runtime_overhead=False,  # it would tell the profiler, in every call, of what takes no time
        optimize_ddp=False,  # it would cut blocks that are compiled inside DDP at the borders of buckets
    )
    # oneDNN's LSTM is traced as one that will not train, and then keeps nothing for its backward.
    with settings, patch.object(decompositions, "mkldnn_one_layer_lstm", decompositions.one_layer_lstm):
        yield


def is_marked_dynamic(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries what ``torch._dynamo.mark_dynamic`` and its kin leave on it."""
    return not _DYNAMIC_MARKS.isdisjoint(vars(tensor))


@contextmanager
def without_dynamic_marks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the marks off tensors for as long as the context lasts."""
    taken = []
    for tensor in tensors:  # one that comes twice has none left the second time
        attributes = vars(tensor)
        names = attributes.keys() & (_DYNAMIC_MARKS | _BESIDE_MARKS)
        taken.append((attributes, {name: attributes.pop(name) for name in names}))
    try:
        yield
    finally:
        for attributes, marks in taken:
            attributes.update(marks)


def dynamic_ranges(tensor: torch.Tensor) -> dict[int, int | None]:
    """Return the dimensions that ``mark_dynamic`` marked, with the largest size where one was named."""
    return {r.dim: r.max for r in getattr(tensor, "_dynamo_dynamic_range", ())}


def call_implementation(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the module's own call: its hooks and its ``forward``."""
    implementation: Callable[..., Any] = module._call_impl
    return implementation


def call_with(model: torch.nn.Module, state: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call a model with other parameters and buffers, by their paths, and leave it as it was.

    Recurrent layers keep a list of the weights that they last ran with, which ``functional_call`` leaves behind.
    """
    layers = [part for part in model.modules() if isinstance(part, torch.nn.RNNBase)]
    kept = [
        (vars(layer), name, vars(layer)[name]) for layer in layers for name in ("_flat_weights", "_flat_weight_refs")
    ]
    for attributes, name, weights in kept:
        attributes[name] = list(weights)
    try:
        return functional_call(model, dict(state), args, kwargs)
    finally:
        for attributes, name, weights in kept:
            attributes[name] = weights


def min_cut_partition(
    joint: fx.GraphModule, ratio: float, num_forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Let PyTorch's partitioner split a joint graph under an ``activation_memory_budget``.

    Run time is estimated by FLOPs, since its usual way, running kernels on a GPU, needs one.
    """
    import torch._functorch.config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    settings = {
        "activation_memory_budget": ratio,
        "activation_memory_budget_solver": "dp",
        "activation_memory_budget_runtime_estimator": "flops",
    }
    with functorch_config.patch(settings):
        return min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_forward_outputs)


def self_test() -> None:
    """Try every private API once on a tiny model.

    Raises
    ------
    PlannerError
        Naming what this torch version does differently.
    """
    seen: dict[str, Any] = {}

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        from torch._functorch.partitioners import default_partition

        seen["descriptors"] = [n.meta.get("desc") for n in joint.graph.nodes if n.op == "placeholder"]
        joint.graph = eliminate_common_subexpressions(joint.graph)
        seen["halves"] = min_cut_partition(
            fx.GraphModule(joint, eliminate_common_subexpressions(joint.graph)), 0.5, num_fwd_outputs
        )
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
    x = torch.randn(2, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    install_call(model, compile_isolated(lambda y: call_implementation(model)(y), aot_backend(partition)))
    actual = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    install_call(model, None)
    problems = []

    def doubled(y: torch.Tensor) -> Any:
        return y * 2 if torch.compiler.is_dynamo_compiling() else None

    compile_isolated(doubled, lambda graph_module, _: graph_module)(x)
    if run_compiled(doubled, (x,), {}) is None or run_compiled(doubled, (x[:1],), {}) is not None:
        problems.append("compiled graphs are not run alone, or not only for what they were compiled for")

    def look_around(y: torch.Tensor) -> torch.Tensor:
        seen["around"] = [frame.f_code for frame, _ in walk_stack(inspect.currentframe())]
        return y

    written = torch.zeros(2)
    alias, version = written.detach(), version_of(written)
    if version_of(written.add_(1)) != version + 1 or version_of(alias) != version + 1:
        problems.append("writing in place is counted in another way")

    if [numbers_among(torch.ops.aten.mul.Tensor, (x, other)) for other in (2.0, x)] != [1, 0]:
        problems.append("numbers are told from tensors in another way")
    checkpointing.checkpoint(look_around, x, use_reentrant=False)
    if CHECKPOINT not in seen["around"]:
        problems.append("torch.utils.checkpoint runs what it checkpoints elsewhere")
    torch._dynamo.mark_dynamic(x, 0, max=8)
    if not is_marked_dynamic(x) or dynamic_ranges(x) != {0: 8}:
        problems.append("mark_dynamic leaves other marks on a tensor")
    if not any(isinstance(d, TangentAOTInput) for d in seen.get("descriptors", ())):
        problems.append("tangents of the joint graph carry no TangentAOTInput descriptor")
    if not all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)):
        problems.append("gradients of the partitioned graph differ from eager")
    if not all(isinstance(half, fx.GraphModule) for half in seen.get("halves", (None,))):
        problems.append("the min-cut partitioner gives no two graphs")
    if problems:
        raise PlannerError(f"torch {torch.__version__} is not supported: {'; '.join(problems)}")
