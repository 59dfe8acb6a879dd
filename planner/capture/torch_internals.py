"""Private torch APIs except Inductor's, in one place.

A new torch release that moves one of them breaks this file: ``tests/capture/test_torch_internals.py`` and
``test_engine_sums.py`` try them on each supported version. What is imported under its own name is for others.
"""

from __future__ import annotations

import gc
import inspect
import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch._dynamo
from torch import fx, nn
from torch._C import DispatchKey, _DisableAutocast
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code, set_eval_frame
from torch._C._profiler import RecordScope
from torch._decomp import decomposition_table, decompositions
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import guards, mutation_guard
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.exc import UserError
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.variables import TensorVariable, builder
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.descriptors import ForwardTokenAOTInput as ForwardTokenAOTInput
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput as InputMutationAOTOutput
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch._functorch._aot_autograd.descriptors import TangentAOTInput as TangentAOTInput
from torch._inductor import config as inductor_config
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state as run_and_save_rng_state
from torch._prims.rng_prims import run_with_rng_state as run_with_rng_state
from torch._prims_common import is_channels_last_contiguous_or_false, is_non_overlapping_and_dense_or_false
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
from torch.fx.graph import _BoxedCodeGen
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _python_dispatch
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from planner.capture.planned_graph_internals import below_autograd, recompile_directly

CHECKPOINT = inspect.unwrap(getattr(checkpointing, "_checkpoint_impl", checkpointing.checkpoint)).__code__
"""What the interpreter runs for ``torch.utils.checkpoint.checkpoint``, however that was imported or wrapped.

From torch 2.15 on it is a decorator too, and both ways lead to one function.
"""

_NO_LIMIT = 2**31 - 1
_DYNAMIC_MARKS = {"_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices"}
_BESIDE_MARKS = {"_dynamo_dynamic_range", "_dynamo_hint_overrides", "_specialize_on", "_has_dynamo_dim_marking"}

BatchNorm = _BatchNorm
"""The batch norms of every dimension."""

SavedOutput = SavedForBackwardsAOTOutput
"""Says of an output of a forward that it is saved."""

NormWithStatistics = _NormBase
"""Batch norms and instance norms of every dimension."""


class _Functions(set[Callable[..., Any]]):
    """A setting whose copies are empty: torch 2.11 sorts one of its settings for a log, and functions have no order."""

    def __deepcopy__(self, memo: Any) -> set[Callable[..., Any]]:
        return set()


CallT = TypeVar("CallT", bound=Callable[..., Any])

ValueT = TypeVar("ValueT")

PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

Compiler = Callable[..., Callable[..., Any]]
"""From our partition to a ``torch.compile`` backend that uses it; AOTAutograd's also takes what runs its halves."""

GIVES_GRADIENTS_AWAY = hasattr(torch.autograd.Function, "boxed_grads_call")
"""Whether AOTAutograd's backward is the only one to hold the gradients that it is given; else they stay to its end."""

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of torch."""

GUARDS_PARAMETERS = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""Whether Dynamo captures anew when a parameter begins or ceases to train; 2.11 runs the graph that it has."""


def boxed(graph_module: fx.GraphModule, _example_inputs: Any = None) -> Callable[[list[Any]], Any]:
    """Make a graph module run with boxed code, on its device: every tensor is freed right after its last use.

    It runs without gradients, and below what autograd does around every operator.
    """
    graph_module.graph.set_codegen(_BoxedCodeGen())
    recompile_directly(graph_module)
    forward = graph_module.forward
    values = (node.meta.get("val") for node in graph_module.graph.nodes)
    on_cuda = (value.device for value in values if isinstance(value, torch.Tensor) and value.device.type == "cuda")
    device = next(on_cuda, torch.device("cpu"))
    below = below_autograd(graph_module.graph)

    def run(arguments: list[Any]) -> Any:
        with entered(device), below():  # a backward may be called from anywhere
            return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def holding(variable: ContextVar[ValueT], value: ValueT) -> Iterator[None]:
    """Let a context variable have a value within the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def entered(device: torch.device) -> AbstractContextManager[Any]:
    """Let a device be CUDA's current one: whatever draws, measures or waits without naming a device means this one."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # tensors without data need none
        return nullcontext()
    is_current = torch.cuda.current_device() == device.index  # asked in every step, and mostly so
    return nullcontext() if is_current else torch.cuda.device(device)


OUTSIDE_AUTOCAST = {"backward_pass_autocast": "off"}
"""A setting of AOTAutograd: autocast around the forward is not around the backward."""

outside_autocast = _DisableAutocast

_MOST_SAVED = 2**14
"""More tensors than any step saves."""


def aot_backend(
    partition: PartitionFunction,
    forward: Callable[[list[Any]], Any] | None = None,
    backward: Callable[[list[Any]], Any] | None = None,
) -> Callable[..., Any]:
    """Return a ``torch.compile`` backend that runs AOTAutograd with our partition and boxed code.

    Mutations of buffers stay in the graph: without that BatchNorm's statistics would be
    forward outputs, copied outside. What the forward saves is not given away to the first backward,
    which would forbid every later step to keep its graph for a second one. ``forward`` and ``backward`` run in place of
    the halves that the partition gives.
    """
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed if forward is None else _always(forward),
        bw_compiler=boxed if backward is None else _always(backward),
        inference_compiler=boxed,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )

    def compiled(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        # The switch for it, ``donated_buffer``, is asked when a backward runs too, and would have to be off then.
        with (
            functorch_config.patch(OUTSIDE_AUTOCAST),
            patch.object(graph_compile, "collect_bw_donated_buffer_idxs", partial(_donates_nothing, forward)),
            # Numbers that sizes decide stay numbers: as tensors they would be rounded in other places.
            patch.object(graph_compile, "_apply_tensorify_python_scalars", lambda _: None),
        ):
            return backend(graph_module, example_inputs)

    return compiled


def _donates_nothing(
    forward: Callable[[list[Any]], Any] | None, _forward: Any, _backward: Any, metadata: Any
) -> list[int]:
    """Donate no saved tensor: from torch 2.14 on they are listed before the planned graphs replace the traced ones."""
    listed = getattr(metadata, "saved_tensor_is_graph_input", None)
    if forward is not None and listed is not None:
        listed.extend([False] * _MOST_SAVED)
    return []


def _always(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """Return a compiler that always returns one boxed function."""
    run: Any = partial(function)
    run._boxed_call = True
    return lambda _graph_module, _example_inputs: run


def some_number(mode: FakeTensorMode) -> torch.SymInt:
    """Return a whole number that nobody knows before a program runs."""
    shapes = mode.shape_env
    assert shapes is not None
    with shapes.ignore_fresh_unbacked_symbols():
        return shapes.create_unbacked_symint()


def is_drawn(number: Any) -> bool:
    """Whether a number of a traced program is unbacked: drawn, or read from data."""
    return isinstance(number, torch.SymInt) and not number.node.has_hint()


def hint_of(size: Any) -> Any:
    """Return what a size, symbolic or not, was when the program was captured; no guard is made."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage, fake or real: torch gives one Python object for each, for as long as it lives."""
    return in_memory(tensor).untyped_storage()


default_saved_tensors_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
"""Return how what is saved now is packed and unpacked, if somebody has put hooks around it."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that is under way keeps its graph."""


def storages_on_cpu() -> list[torch.UntypedStorage]:
    """Return the storages on the CPU of the tensors that Python holds; what is in C++ alone is not among them."""
    tensors = (each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))
    real = (t for t in tensors if t.device.type == "cpu" and torch._C._has_storage(t))
    return [*{id(storage): storage for storage in map(storage_of, real)}.values()]


def storage_id(tensor: torch.Tensor) -> int:
    """Identify a tensor's storage, fake or real, for as long as the storage lives."""
    return id(storage_of(tensor))


def is_spread(kind: type) -> bool:
    """Whether tensors of a kind are spread over ranks: a DTensor, or what a collective has not yet delivered.

    Their operators are computed with those of the part that this rank has.
    """
    return kind.__module__.startswith("torch.distributed.") and hasattr(kind, "__tensor_flatten__")


def taken_apart(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return this rank's part of a tensor, and a function that makes such a tensor from another part."""
    kind: Any = type(tensor)
    if not is_spread(kind):
        return tensor, lambda part: part
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inside = {name: getattr(tensor, name) for name in names}
    local, made_of = taken_apart(inside[names[0]])  # beside it there may be the mesh of devices
    size, stride = tensor.shape, tensor.stride()
    return local, lambda part: kind.__tensor_unflatten__({**inside, names[0]: made_of(part)}, context, size, stride)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, for most the tensor itself."""
    return taken_apart(tensor)[0] if is_spread(type(tensor)) else tensor


_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor consists of: itself, or what a sparse one keeps its data in.

    A NotImplementedError says that it has no data: then nothing knows how many elements it has.
    """
    parts = _SPARSE_PARTS.get(tensor.layout)
    if parts is None:
        return [tensor]
    if isinstance(tensor, FakeTensor):
        raise NotImplementedError("how large a sparse tensor is depends on data")
    with torch.no_grad():
        return [getattr(tensor, part)() for part in parts]


def channels_come_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether kernels that keep the order of dimensions give a tensor like this back with channels last."""
    with outside_tracing():
        like = torch.empty_strided(sizes, strides, device="meta")
        return suggest_memory_format(like) in (torch.channels_last, torch.channels_last_3d)


def version_of(tensor: torch.Tensor) -> int:
    """Say how often a tensor's storage was written into in place, as autograd counts it."""
    return tensor._version


class OwnedFunction:
    """A function that Dynamo compiles whole; its cache entries are freed with this object.

    Dynamo keeps graphs by code object, and names what it compiles among the function's globals: both are its own. For
    every long-lived object that guards look at, a class say, a finalizer holds the guards.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        assert isinstance(function, FunctionType)
        code, names = function.__code__.replace(co_name=name), dict(function.__globals__)
        self._function = FunctionType(code, names, name, closure=function.__closure__)
        self._finalizers: list[weakref.finalize[..., Any]] = []
        weakref.finalize(self, _forget, code, names, self._finalizers)

    def compiled(self, backend: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph for such arguments; compile it if there is none."""
        finalizers = self._finalizers

        def finalize(*arguments: Any, **named: Any) -> Any:
            finalizers.append(weakref.finalize(*arguments, **named))
            return finalizers[-1]

        with patch.object(guards, "weakref", SimpleNamespace(**{**vars(weakref), "finalize": finalize})):
            return torch.compile(self._function, backend=backend, fullgraph=True)(*args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph for such arguments, else the function itself; compile nothing.

        It is what ``torch._dynamo.run`` does, in less time: whoever calls is not inside a trace.
        """
        mutation_guard.GenerationTracker.generation += 1  # Inductor's CUDA graphs tell steps apart by it
        before = set_eval_frame(False)
        try:
            return self._function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    def difference(self, given: Mapping[str, Any]) -> str:
        """Return the guard of the newest graph that named arguments fail; ``""`` if none fails."""
        newest = next(iter(_debug_get_cache_entry_list(self._function.__code__)), None)
        failed = newest.guard_manager.check_verbose(dict(given)).verbose_code_parts if newest is not None else ()
        return next(iter(failed), "")


def _forget(code: CodeType, names: dict[str, Any], finalizers: list[weakref.finalize[..., Any]]) -> None:
    reset_code(code)
    names.update(dict.fromkeys(names))  # Dynamo takes its names away later, and expects them to be there
    for finalizer in finalizers:
        finalizer.detach()


def install_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let ``module(...)`` run ``call``, as ``nn.Module.compile`` does, or its own call again."""
    module._compiled_call_impl = call


def installed_call(module: nn.Module) -> Any:
    """Return what was installed, or None."""
    return getattr(module, "_compiled_call_impl", None)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` made a module of, or the module itself."""
    return getattr(module, "_orig_mod", module)


def not_compiled_alone(function: CallT) -> CallT:
    """Keep Dynamo from compiling a function by itself; inside another it is traced as usual."""
    skip_code(function.__code__)
    return function


def at_end_of_backward(outputs: Sequence[torch.Tensor], call: Callable[[], None]) -> None:
    """Call a function at the end of the backward through these outputs."""
    engine = torch.autograd.Variable._execution_engine
    for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
        node.register_prehook(lambda _gradients: engine.queue_callback(call))


def autocast_dtype(kind: str) -> torch.dtype | bool:
    """Return the type that operations on a kind of device are cast to, or False."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


def is_in_backward() -> bool:
    """Whether this thread is inside a backward, as in a hook."""
    return torch._C._current_graph_task_id() >= 0


def depends_on_data(error: BaseException | None) -> bool:
    """Whether a capture failed because the program looks at values that it does not have."""
    if isinstance(error, GuardOnDataDependentSymNode) or PendingUnbackedSymbolNotFound.__name__ in str(error):
        return True
    return isinstance(error, UserError) and "data-dependent" in str(error)


@cache
def form_in_place(operator: OpOverload, is_first: bool) -> tuple[OpOverload, str] | None:
    """Return the operator that writes over an argument, and the keyword that names it; ``""`` if it is the first."""
    expected = list(declared_arguments(operator))
    packet = operator.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        out = [argument.name for argument in form._schema.arguments if argument.is_out]
        # Forms that torch generates compute the result first, and copy it.
        if len(out) == 1 and list(declared_arguments(form)) == expected and _has_kernel(form, "CPU"):
            return form, out[0]
    packet = getattr(torch.ops.aten, f"{packet.__name__}_", None) if is_first else None
    # On a CPU mul_.Scalar rounds the number to the 16 bits of the tensor first: gradients of erf lost their bits.
    name = "Tensor" if operator is torch.ops.aten.mul.Scalar else operator._overloadname
    form = getattr(packet, name, None)
    if form is not None and (_has_kernel(form, "CPU") or _has_kernel(form, "CompositeExplicitAutograd")):
        return form, ""
    return None


def _has_kernel(operator: OpOverload, backend: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), backend))


def declared_arguments(operator: OpOverload) -> Iterator[tuple[str, str]]:
    """Return names and types of what an operator takes."""
    return ((a.name, str(a.type)) for a in operator._schema.arguments if not a.is_out)


def has_onednn(dtype: torch.dtype = torch.float32) -> bool:
    """Whether CPU operators may use oneDNN for an element type: for bfloat16 not every processor can."""
    able = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(able and torch._C._get_mkldnn_enabled() and torch.backends.mkldnn.is_available())


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Run real kernels with data while a program is being traced."""
    with _disable_current_modes(), no_python_dispatcher():
        yield


def is_mutable(operator: OpOverload) -> bool:
    """Whether an operator writes into one of its arguments; those of ``c10d`` do, and declare nothing."""
    return bool(operator._schema.is_mutable) or operator.namespace == "c10d"


def written_arguments(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[Any] = torch.Tensor
) -> list[Any]:
    """Return what a call writes into, by the operator's schema; all tensors that it takes if that is silent.

    ``kind`` is what stands for tensors among the arguments.
    """
    if not is_mutable(operator):
        return []
    if not operator._schema.is_mutable:
        return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, kind)]
    expected = operator._schema.arguments
    named = {**dict(zip((argument.name for argument in expected), args, strict=False)), **kwargs}
    written = [named.get(a.name) for a in expected if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if leaf is not None]


def called(function: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator, on fake tensors too where torch refuses those: grouped products run in float32 on CPUs.

    What waits for a collective gives back the tensor that it is given, as it does where there is data.
    """
    if function is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
        return args[0]
    if function is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        given = dict(zip(("self", "mat2", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
        return _create_grouped_mm_output_tensor(given["self"], given["mat2"], given.get("offs"), given.get("out_dtype"))
    return function(*args, **kwargs)


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


def memory_alone() -> AbstractContextManager[Any]:
    """Let profilers that start in this context record what is allocated, and no calls.

    A ``record_function`` that begins under one profiler and ends under the next writes into what the first has freed:
    the heap is corrupt from then on (torch 2.11 to 2.14). Under Lightning ``Optimizer.step`` is around each step.
    """
    module: Any = torch.autograd.profiler
    only = partial(module._enable_profiler, scopes={RecordScope.LITE_INTERPRETER})  # which has no part in training
    return patch.object(module, "_enable_profiler", only)


def dispatch_keys_kept() -> AbstractContextManager[None]:
    """Return a context that ends with the dispatch keys that it begins with.

    An error that leaves a transform of ``torch.func`` inside a capture may leave autograd's excluded: nothing would
    require gradients from then on (torch 2.13).
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def history_is_on() -> bool:
    """Whether CUDA's allocator keeps a history, as for a user's memory snapshot."""
    return bool(torch._C._cuda_isHistoryEnabled())


def start_history(device: torch.device) -> list[int]:
    """Have CUDA's allocator keep a history, without stacks, and return the sizes that were asked for before."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 20, clear_history=True)
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == (device.index or 0))
    return [b["requested_size"] for segment in segments for b in segment["blocks"] if b["state"] != "inactive"]


def stop_history(device: torch.device) -> list[tuple[int, int]]:
    """Stop the history and return time in nanoseconds and bytes of what was allocated (positive) and freed."""
    snapshot = torch.cuda.memory._snapshot(device)
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    traces = snapshot["device_traces"][device.index or 0]
    return [(e["time_us"] * 1000, signs[e["action"]] * e["size"]) for e in traces if e["action"] in signs]


def is_watched() -> bool:
    """Whether a user's dispatch mode is on, such as ``FlopCounterMode``: Dynamo then compiles nothing."""
    return bool(_python_dispatch.any_torch_dispatch_mode_on_stack())


def is_transformed() -> bool:
    """Whether other code is tracing, exporting or transforming (``torch.func``) the current call."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting() or is_in_torch_func()  # type: ignore[attr-defined]


def is_in_torch_func() -> bool:
    """Whether a transform of ``torch.func`` is at work, such as ``grad``, ``vmap`` or ``jvp``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# Its kernels for training are torch's own only in forms that tracing makes of it.
_DECOMPOSED = {"aten::native_batch_norm"}
_COMPOSITE = {DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd}


@cache
def _decomposed_by_tracing() -> list[OpOverload]:
    """Return the operators that tracing would replace by others, though eager training has a kernel for them."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    overloads = (getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in p.overloads())
    return [o for o in overloads if o._schema.name not in _DECOMPOSED and not _COMPOSITE.isdisjoint(o.py_kernels)]


def _upsampled_from(gradient: torch.Tensor, _output_size: Any, input_size: Sequence[int], *_: Any) -> torch.Tensor:
    """Return what the gradient of upsampling gives, on tensors without data."""
    made: torch.Tensor = gradient.new_empty(input_size)
    is_last = gradient.dim() == 4 and is_channels_last_contiguous_or_false(gradient)
    return made.to(memory_format=torch.channels_last) if is_last else made


def _upsampled(operator: OpOverload, x: torch.Tensor, output_size: Any, *more: Any) -> torch.Tensor:
    """Upsample to a size, or by factors, as torch's C++ does, which reads sizes as numbers."""
    *corners, factors = more
    size = decompositions.upsample_compute_output_size(x.size(), output_size, factors)
    return operator(x, size, *corners, *(factors or [None] * (x.dim() - 2)))


@contextmanager
def _traced_as(kernels: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Let operators be traced by functions in place of what torch makes of them; as themselves where that is None."""
    with ExitStack() as stack:
        for operator, kernel in kernels.items():
            others = {key: other for key, other in operator.py_kernels.items() if key not in _COMPOSITE}
            own = {} if kernel is None else dict.fromkeys(_COMPOSITE, kernel)
            stack.callback(operator._dispatch_cache.clear)
            stack.enter_context(patch.dict(operator.py_kernels, others | own, clear=True))
            operator._dispatch_cache.clear()
        yield


@contextmanager
def symbolic_kernels() -> Iterator[None]:
    """Let operators of eager training be traced with symbolic sizes, where torch reads these as numbers."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith("upsample_")]
    rules = {packet.default: _upsampled_from for packet in packets if packet.__name__.endswith("_backward")}
    upsampling = {packet.vec: partial(_upsampled, packet.default) for packet in packets if "vec" in packet.overloads()}
    with _traced_as(upsampling), patch.dict(decomposition_table, {**rules, **decomposition_table}):
        yield


@contextmanager
def eager_kernels(dropout: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Trace operators as the kernels that eager training calls: upsampling as one operation, not as thirty.

    What draws random numbers stays, also where nobody reads the result: what is drawn after it would differ.
    """
    kernels = {**dict.fromkeys(_decomposed_by_tracing()), torch.ops.aten.dropout.default: dropout}
    with _traced_as(kernels), inductor_config.patch(fallback_random=True):  # asked for by what eliminates dead code
        yield


_RETURNED_LEAVES = "_check_requires_grad_intermediate_outputs"
_check_returned_leaves = getattr(OutputGraph, _RETURNED_LEAVES, None)
"""Dynamo has it where it follows ``requires_grad_()`` of what a forward computes."""


@contextmanager
def dynamo_settings() -> Iterator[None]:
    """Dynamo's settings for captures: guards on everything, hooks included, fixed sizes, no log messages."""
    settings = torch._dynamo.config.patch(
        recompile_limit=_NO_LIMIT,  # the limit is ours: see planner.runtimes.graph
        accumulated_recompile_limit=_NO_LIMIT,
        skip_nnmodule_hook_guards=False,  # a hook that is added later would not run, and nobody would know
        allow_rnn=True,  # what says better why they are refused is ours
        assume_static_by_default=True,
        automatic_dynamic_shapes=True,  # but by _has_changed: of numbers, not of sizes
        allow_unspec_int_on_nn_module=True,
        trace_autograd_ops=True,  # what a forward differentiates (penalties, force fields) is part of the step
        # The methods of loggers; libraries add theirs when they are imported.
        ignore_logging_functions=_Functions(method for method in vars(logging.Logger).values() if callable(method)),
        suppress_errors=False,
        use_numpy_random_stream=True,  # traced draws would come from torch's stream: such a forward is refused
        record_runtime_overhead=False,  # it would tell the profiler, in every call, of what takes no time
        optimize_ddp=False,  # it would cut blocks that are compiled inside DDP at the borders of buckets
    )
    with (
        settings,
        warnings.catch_warnings(),
        patch.object(builder, "process_automatic_dynamic", _has_changed),
        # Numbers of Python's random state would come in another precision: what draws them has no graph.
        patch.object(UserDefinedObjectVariable, "_supported_random_functions", staticmethod(frozenset)),
        patch.object(guards, "profile_guard_manager", lambda *_: 0.0),  # it would empty the processor's caches
        patch.object(OutputGraph, _RETURNED_LEAVES, _returned_leaves) if _check_returned_leaves else nullcontext(),
    ):
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace")  # a CaptureError says so
        warnings.filterwarnings("ignore", "Error detected in")  # likewise, of a backward that cannot be traced
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # it runs as written
        yield


def _returned_leaves(graph: OutputGraph, returned: list[Any], tracer: Any) -> None:
    """Let Dynamo refuse outputs made leaves in the forward, but not tensors computed from these.

    It refuses both: AOTAutograd gives back no gradient of such a leaf. Nobody can ask for it who does not hold it.
    """
    leaves = {v.as_proxy().node for v in graph.leaf_var_creation_order if isinstance(v, TensorVariable)}
    are_leaves = [v for v in returned if isinstance(v, TensorVariable) and v.as_proxy().node in leaves]
    assert _check_returned_leaves is not None
    _check_returned_leaves(graph, are_leaves, tracer)


def is_marked_dynamic(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries what ``torch._dynamo.mark_dynamic`` and its kin leave on it."""
    return not _DYNAMIC_MARKS.isdisjoint(vars(tensor))


@contextmanager
def without_dynamic_marks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the marks off tensors for as long as the context lasts; those that they get meanwhile go with it."""
    with ExitStack() as stack:
        for attributes in map(vars, tensors):
            others = {name: value for name, value in attributes.items() if name not in _DYNAMIC_MARKS | _BESIDE_MARKS}
            stack.enter_context(patch.dict(attributes, others, clear=True))
        yield


@contextmanager
def with_symbolic_sizes(varying: Iterable[tuple[torch.Tensor, Iterable[int]]]) -> Iterator[None]:
    """Capture sizes as symbols, a separate one for each dimension, where the program allows it."""
    varying = list(varying)
    # What happens to be equal now need not be so next time.
    with (
        without_dynamic_marks(tensor for tensor, _ in varying),
        patch.object(symbolic_shapes_config, "use_duck_shape", False),
        patch.object(logging.getLogger(fake_tensor.__name__), "disabled", True),  # what fails is captured in numbers
    ):
        for tensor, dimensions in varying:
            torch._dynamo.maybe_mark_dynamic(tensor, list(dimensions))
        yield


_numbers_seen: ContextVar[dict[str, float]] = ContextVar("numbers of earlier captures")


def varying_numbers(seen: dict[str, float]) -> AbstractContextManager[None]:
    """Make numbers that changed since an earlier capture inputs of the captured program.

    ``seen`` is what each number was, by Dynamo's name: it is kept from capture to capture.
    """
    return holding(_numbers_seen, seen)


def _has_changed(_tracer: Any, name: str, entry: Any, **_: Any) -> Any:
    """Tell Dynamo which numbers are inputs; its own record is lost with the code object and makes sizes dynamic."""
    seen = _numbers_seen.get(None)
    if seen is None or type(entry.scalar) not in (int, float):
        return entry
    if seen.setdefault(name, entry.scalar) != entry.scalar:
        seen[name] = math.nan  # unlike any number from now on
    return replace(entry, scalar=auto_dynamic) if math.isnan(seen[name]) else entry


def dynamic_dimensions(tensor: torch.Tensor) -> set[int]:
    """Return the dimensions that ``mark_dynamic`` or one of its kin marked."""
    return set().union(*(vars(tensor).get(name, ()) for name in _DYNAMIC_MARKS))


def call_implementation(module: nn.Module) -> Callable[..., Any]:
    """Return the module's own call: its hooks and its ``forward``."""
    return module._call_impl


@contextmanager
def other_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace parameters and buffers of a model, by their paths, within the context.

    Recurrent layers keep a list of the weights that they last ran with. ``torch.func.functional_call`` does not put
    that back, nor the parameters of a module that has several paths.
    """
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    others = {id(tensor): state[path] for path, tensor in every if path in state}
    with ExitStack() as stack:
        for part in model.modules():
            for table in (part._parameters, part._buffers):
                swapped = {name: others[id(tensor)] for name, tensor in table.items() if id(tensor) in others}
                stack.enter_context(patch.dict(table, swapped) if swapped else nullcontext())
            if isinstance(part, nn.RNNBase):
                weights = {name: list(vars(part)[name]) for name in ("_flat_weights", "_flat_weight_refs")}
                stack.enter_context(patch.dict(vars(part), weights))
        yield


_DISPATCHERS = ("torch._dynamo.", "torch._compile", "torch.utils._python_dispatch")
"""Modules of torch whose frames stand between an operator's caller and ``__torch_dispatch__``."""


def is_called_by_engine(above: int) -> bool:
    """Whether a function (1: the one that calls this, 2: the one that calls that) was called by autograd's engine."""
    frame: FrameType | None = sys._getframe(above + 1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_DISPATCHERS):
        frame = frame.f_back
    return frame is None or frame.f_code is _engine_run_backward.__code__


def next_number() -> int:
    """Return the sequence number of the next differentiable operation."""
    return torch._C._autograd._get_sequence_nr()


def number_at_work() -> int | None:
    """Return the sequence number of the operation whose derivative the engine computes now; None if there is none."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def accumulates_gradient() -> bool:
    """Whether the engine gives a leaf its gradient now."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def takes_boxed_gradients(node: Any) -> bool:
    """Whether a Python autograd function gets its gradients in a list that it may clear."""
    return bool(getattr(getattr(node, "_forward_cls", None), "boxed_grads_call", False))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is non-overlapping and dense."""
    return bool(is_non_overlapping_and_dense_or_false(tensor))


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the reference counts of a tensor and of its storage."""
    return uses(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def uses(tensor: torch.Tensor) -> int:
    """Return the C++ reference count of a tensor, in which all of Python's references count once."""
    return tensor._use_count()  # type: ignore[attr-defined]
