"""Draft and compile graphs with Inductor: every touch of its private parts.

Inductor is asked twice for the same graph: for a draft, whose code runs on fake tensors and shows what
it allocates and frees, and then, where that keeps the budget, for the code with its kernels.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
from torch import fx

from planner.capture.inductor_order_internals import Placement, moves_values, must_stay_apart
from planner.capture.torch_internals import OUTSIDE_AUTOCAST, PartitionFunction, outside_tracing
from planner.common.registry import did_you_mean
from planner.errors import RuntimeUnsupportedError, UsageError


@dataclass(frozen=True)
class Draft:
    """A graph's code from Inductor with empty kernels, and the fake tensors that it was generated for."""

    source: str
    """The code that allocates, frees and calls the kernels, comments left out."""
    run: Callable[[list[Any]], Any]
    """That code, loaded: it takes a list of tensors, which it empties, and gives the outputs."""
    inputs: list[Any]


_SETTINGS = {
    "fallback_random": True,
    "fx_graph_cache": False,
    "layout_optimization": False,  # copies of images and weights in another layout
    "allow_buffer_reuse": False,  # what may be used again later is not freed meanwhile
    "cpp_wrapper": False,
}
"""What a plan settles for Inductor, beside the partition."""

_NOT_PLANNED = {"triton.cudagraphs", "custom_partitioner_fn"}
"""Settings of which a plan knows nothing: CUDA graphs keep memory of their own."""


_ONE_KERNEL_EACH = {"cpp.simdlen": 1}
"""Without vectors a C++ kernel is written once, and not once for each of its loops: a draft has no use for them."""


def settings_of(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Inductor's settings for what ``torch.compile`` is given, by a UsageError if a plan does not go with it."""
    import torch._inductor

    known = torch._inductor.list_options()
    modes = torch._inductor.list_mode_options()
    if mode is not None and mode not in modes:
        raise UsageError(f"unknown mode {mode!r}: {did_you_mean(mode, modes)}known are {', '.join(modes)}")
    settings = {**(modes[mode] if mode is not None else {}), **(options or {})}
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"unknown option {name!r} of Inductor: {did_you_mean(name, known)}see list_options()")
        if (name in _NOT_PLANNED and value) or _SETTINGS.get(name, value) != value:
            asked = f"mode={mode!r}" if mode is not None and name in modes[mode] else f"option {name!r}"
            hint = ": use 'max-autotune-no-cudagraphs'" if mode == "max-autotune" else ""
            raise UsageError(f"{asked} ({name}={value!r}) does not work with a memory plan{hint or ': leave it out'}")
    return settings


def with_settings(settings: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Let Inductor compile by the settings of :func:`settings_of`."""
    from torch._inductor import config

    return config.patch(dict(settings))


def without_plan(graph_module: fx.GraphModule, inputs: Any, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Let Inductor compile a program that has no backward, as ``torch.compile`` does by default."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph_module, inputs, config_patches=dict(settings))  # type: ignore[return-value]


class _Drafted(BaseException):
    """Stops a compilation once the code of forward and backward is generated."""


def draft_with_inductor(
    partition: PartitionFunction,
    graph_module: fx.GraphModule,
    inputs: Any,
    is_enough: Callable[[list[Draft]], bool] = lambda drafts: True,
) -> list[Draft]:
    """Generate the code of forward and backward by Inductor, without compiling kernels.

    Until the drafts are enough, the same joint graph is partitioned and written again: it is captured once.
    """
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor.codecache import PyCodeCache

    drafts: list[Draft] = []
    loaded: list[Draft] = []
    compile_halves = graph_compile.aot_stage2_autograd

    def load(_key: str, path: str, linemap: Any = None, attrs: Any = None) -> Any:
        module = _load_without_kernels(path, attrs or {})
        loaded.append(Draft(_calling(Path(path).read_text(encoding="utf-8")), module.call, []))
        return module

    def compile_one(compile_fx_inner: Any, *arguments: Any, **options: Any) -> Any:
        written = arguments[1]
        compiled = compile_fx_inner(*arguments, **options)
        made = loaded.pop() if loaded else Draft("", compiled, [])  # nothing is written for a graph that does nothing
        drafts.append(replace(made, inputs=list(written)))
        if options.get("is_backward"):
            raise _Drafted
        return compiled

    def compile_until_enough(*captured: Any) -> Any:
        passes: AbstractContextManager[Any] = nullcontext()
        while True:
            drafts.clear()
            try:
                with passes:
                    return compile_halves(*captured)
            except _Drafted:
                with outside_tracing():
                    if is_enough(list(drafts)):
                        raise
            passes = patch("torch._inductor.compile_fx._recursive_joint_graph_passes", lambda joint, **_: joint)

    with (
        patch.object(PyCodeCache, "load_by_key_path", load),
        patch.object(graph_compile, "aot_stage2_autograd", compile_until_enough),
        suppress(_Drafted),
    ):
        _compile_with_inductor(partition, compile_one, graph_module, inputs, **_ONE_KERNEL_EACH)
    return drafts


class OtherCodeError(RuntimeUnsupportedError):
    """What Inductor wrote is not what it had drafted, so its peak is not known."""


def compile_with_inductor(
    partition: PartitionFunction, graph_module: fx.GraphModule, inputs: Any, drafts: Sequence[Draft]
) -> Callable[..., Any]:
    """Compile forward and backward by Inductor, and compare the code with its drafts."""
    from torch._inductor.graph import GraphLowering

    known = {draft.source for draft in drafts}

    def check(source: str) -> None:
        if _calling(source) not in known:
            raise OtherCodeError("Inductor wrote other code than it had drafted for the same graph")

    def compile_one(compile_fx_inner: Any, *arguments: Any, **options: Any) -> Any:
        with patch.object(GraphLowering, "save_output_code", staticmethod(check)):
            return compile_fx_inner(*arguments, **options)

    try:
        return _compile_with_inductor(partition, compile_one, graph_module, inputs)
    except Exception as error:
        if isinstance(other := getattr(error, "inner_exception", None), OtherCodeError):
            raise other from error  # Inductor has errors in its passes in one of its own
        raise


def _compile_with_inductor(
    partition: PartitionFunction,
    compile_one: Callable[..., Any],
    graph_module: fx.GraphModule,
    inputs: Any,
    **more: Any,
) -> Callable[..., Any]:
    """Run ``torch.compile``'s own backend, but for the partition, for what it fuses, and for when memory is freed.

    Its decompositions and its passes over the joint graph come before our partition, so what is planned is
    what is compiled. Random operations stay those of eager: Inductor's own draw from a seed and a place in a
    kernel, and are not what the recompute of a partition of ours would replay. Kernels are fused only where the
    others keep the plan's order (:func:`_keeps_the_order`). That is asked first, since Inductor takes long to find out
    what else stands against it. What would be computed later than planned, and holds more until then, stays where it is
    (:mod:`planner.capture.inductor_order_internals`).
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import StorageBox
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None  # a graph that it partitioned is not to be found in a cache

    may_fuse = Scheduler.can_fuse

    def in_order(scheduler: Any, first: Any, second: Any, *arguments: Any, **options: Any) -> bool:
        keeps = _keeps_the_order(V.graph, scheduler, first, second)
        return keeps and bool(may_fuse(scheduler, first, second, *arguments, **options))

    prefers_apart: Any = post_grad.should_prefer_unfused_addmm

    def apart(match: Any) -> bool:
        total = match.output_node()
        (product,) = (node for node in match.nodes if node is not total)
        return must_stay_apart(product, total) or bool(prefers_apart(match))

    lower_node, should_store = GraphLowering.run_node, StorageBox.should_realize_on_reuse

    def placed(lowering: Any, node: fx.Node) -> Any:
        result: Any = lower_node(lowering, node)
        if node in _placement_in(lowering).stored:
            result.realize()
        return result

    def stored_for_readers(box: Any, *arguments: Any, **options: Any) -> bool:
        is_inlined = V.graph.current_node in _placement_in(V.graph).inlined
        return not is_inlined and bool(should_store(box, *arguments, **options))

    write_loops = CppScheduling.codegen_node

    def written(scheduling: Any, node: Any) -> None:
        write_loops(scheduling, node)
        if node.get_read_write_buffers_sizes() >= _WORTH_A_CALL_BYTES:
            scheduling._set_flush_status(True)

    def with_our_fusions(graph_module: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        # Inductor knows nothing of copies to and from the host, and would move them.
        reorders = config.reorder_for_peak_memory and not any(map(moves_values, graph_module.graph.nodes))
        with (
            config.patch(reorder_for_peak_memory=reorders),
            patch.object(Scheduler, "can_fuse", in_order),
            patch.object(post_grad, "should_prefer_unfused_addmm", apart),
            patch.object(GraphLowering, "run_node", placed),
            patch.object(StorageBox, "should_realize_on_reuse", stored_for_readers),
            patch.object(CppScheduling, "codegen_node", written),
        ):
            return compile_one(compile_fx_inner, graph_module, *arguments, **options)

    settings = {**_SETTINGS, **more, "custom_partitioner_fn": Partitioner()}
    # AOTAutograd's cache is asked before the partition, and knows nothing of plans.
    caches = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with torch._functorch.config.patch(caches | OUTSIDE_AUTOCAST):
        return compile_fx(graph_module, inputs, with_our_fusions, config_patches=settings)  # type: ignore[return-value]


_WORTH_A_CALL_BYTES = 1 << 20
"""On a CPU loops that follow each other are called together, and what any of them makes is there before all, and what
it reads till after all. Loops that move so much take far longer than a call, and get one of their own."""

_SMALL = 8
"""What a kernel makes is small beside what it reads if that is so many times as large."""


def _keeps_the_order(lowering: Any, scheduler: Any, first: Any, second: Any) -> bool:
    """Whether two kernels may be fused without moving operations that the plan has in between.

    One kernel takes the place of the earlier, and all that it needs goes before it. Where library kernels lie between
    the two, that would pull a part of the step forward, and leave behind what that part would have freed. Only a kernel
    that needs none of them may go ahead of them, as the sum for a bias does, if it reads what the earlier one makes:
    then nothing is in memory for longer but what it makes, which must leave the step, or be small.
    """
    earlier, later = sorted((first, second), key=lambda node: node.min_order)
    between = [node for node in _library_calls(scheduler) if earlier.min_order < node.min_order < later.min_order]
    if not between:
        return True
    made = earlier.get_buffer_names()
    if made.isdisjoint(dependency.name for dependency in later.read_writes.reads):
        return False
    if any(name in later.ancestors for node in between for name in node.get_operation_names()):
        return False
    kept = later.get_buffer_names().difference(lowering.get_output_names())
    sizes = [scheduler.name_to_buf[name].node.get_layout().storage_size() for name in kept]
    read = [scheduler.name_to_buf[name].node.get_layout().storage_size() for name in made]
    return bool(_SMALL * sum(sizes) <= sum(read))


def _placement_in(lowering: Any) -> Placement:
    """Return where a graph that is lowered is to have its elementwise nodes."""
    known: Placement | None = vars(lowering).get("_placement")
    if known is None:
        known = lowering._placement = Placement(lowering.module.graph)
    return known


def _library_calls(scheduler: Any) -> list[Any]:
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    known: list[Any] | None = vars(scheduler).get("_library_calls")
    if known is None:
        nodes = scheduler.name_to_node.values()
        calls = [node for node in nodes if isinstance(node, ExternKernelSchedulerNode)]
        # What nobody reads was left out before places were given.
        known = scheduler._library_calls = [node for node in calls if hasattr(node, "min_order")]
    return known


def _load_without_kernels(path: str, constants: dict[str, Any]) -> Any:
    def nothing(*_arguments: Any, **_options: Any) -> None:
        return None

    class NoKernels:
        """Replaces the compilers of kernels by functions (C++) and objects with ``run`` (Triton) that do nothing."""

        def __getattr__(self, name: str) -> Any:
            nothing.run = nothing  # type: ignore[attr-defined]
            return nothing if name == "wait" else lambda *_arguments, **_options: nothing

    def allocate_on(device: str) -> Any:
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)

    def view(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    spec = importlib.util.spec_from_file_location("draft", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(constants)
    with patch("torch._inductor.async_compile.AsyncCompile", NoKernels):
        spec.loader.exec_module(module)
    # What it calls in C++ goes past the modes that fake tensors and their storages are followed by.
    vars(module).update(
        empty_strided_cpu=allocate_on("cpu"),
        empty_strided_cuda=allocate_on("cuda"),
        reinterpret_tensor=view,
        assert_size_stride=nothing,
        assert_size_stride_grouped=nothing,  # on CUDA since torch 2.14, as is the next
        copy_if_misaligned=lambda tensor: tensor,
        assert_alignment=nothing,
    )
    return module


def _calling(source: str) -> str:
    """Return the calling code that Inductor generates, without comments; symbolic sizes are numbered as they come."""
    _kernels, _, calls = source.rpartition("\ndel async_compile\n")
    code = "\n".join(line for line in calls.splitlines() if not line.lstrip().startswith("#"))
    numbers: dict[str, str] = {}
    return re.sub(r"\b[su]\d+\b", lambda found: numbers.setdefault(found[0], f"s{len(numbers)}"), code)


def missing_compiler(device: torch.device) -> str | None:
    """Name the compiler that Inductor needs for a device and does not find; None if it finds one."""
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else f"Triton for {device.type}"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++, clang++, or what the environment variable CXX names)"
    return None
