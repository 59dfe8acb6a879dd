"""Give fake tensors the types and strides that kernels give, where torch's tracing has others.

Some elementwise operators are traced through a decomposition whose result is laid out in another way than the
kernel's (``elu_backward`` of a transposed gradient, say), and so are norms of a transposed input on a CPU. What
follows may then copy, and that would go unseen; or it would be traced as a view of what can only be copied, and fail.
The order of dimensions in memory does not depend on sizes, so the kernel is asked on a handful of elements.

Statistics of norms of 16 bits with weights of 32 have 32 bits on a CPU, and 16 in traces; on CUDA they have 32, though
traced on a CPU. Dropout is traced with the bits of eager. Products of tensors of different types are refused by
kernels, and not by fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.capture import operands
from planner.capture import torch_internals as internals
from planner.capture.fake_internals import fake_calls_by
from planner.capture.target_device import TargetDevice, is_for_target_device, meant, tracing_for
from planner.capture.trees import leaf_tensors, tensors_in

aten = torch.ops.aten

_OF_ONE_TYPE = {getattr(aten, name).default for name in ("addbmm", "addmm", "index_add", "index_add_", "mm", "mv")}
"""Operators that take tensors of one element, whatever the number of dimensions."""

_VIEWS = (aten.view.default, aten._unsafe_view.default)


@contextmanager
def eager_results(target_device: TargetDevice | None) -> Iterator[None]:
    """Trace operators with the types and strides of eager's kernels, or of those of an absent device.

    Derivatives copy a gradient where its layout is not that of what they saved. Whether it is, is settled in tracing;
    on layouts that the step does not have, kernels that cannot tell (GroupNorm's backward on a CPU, up to torch 2.13)
    compute wrong gradients.
    """
    with internals.eager_kernels(_dropout), tracing_for(target_device), fake_calls_by(kernel_result):
        yield


@contextmanager
def kernel_types_and_views() -> Iterator[None]:
    """Let fake tensors refuse the element types that kernels refuse, and have the strides of their views.

    A forward may ask for strides while Dynamo traces it: ``x.as_strided(x.shape, x.stride())`` read elements in another
    order than in eager.
    """

    def run(function: Any, args: Any, kwargs: Any, go_on: Callable[[], Any]) -> Any:
        _refuse_types(function, args, kwargs)
        result = go_on()
        return _as_kernels_view(args[0], result) if function in _VIEWS else result

    with fake_calls_by(run):
        yield


def _refuse_types(function: Any, args: Any, kwargs: Any) -> None:
    """Raise what a call's kernel raises for mixed element types: it is called on one element of each tensor."""
    if function not in _OF_ONE_TYPE:
        return
    if len({tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()}) > 1:
        with internals.outside_tracing(), torch.no_grad():
            function(*pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros((1,) * t.dim(), dtype=t.dtype), args))


def kernel_result(function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
    """Run a call on fake tensors; return its result with the types and strides of the operator's kernel."""
    _refuse_types(function, args, kwargs)
    result = run()
    if (rule := _TYPES.get(function)) is not None:
        result = rule(function, args, kwargs, result)
    if not isinstance(function, internals.OpOverload) or internals.is_mutable(function):
        return result
    read = leaf_tensors((args, kwargs))
    tensors = (*read, *leaf_tensors(result))
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return result
    if any(internals.is_drawn(size) for tensor in tensors for size in tensor.shape):
        return result
    if function in _VIEWS:
        return _as_kernels_view(args[0], result)
    if all(map(_is_contiguous, read)):
        return result
    on_cuda = is_for_target_device() or any(tensor.device.type == "cuda" for tensor in tensors)
    if on_cuda and (known := meant(function)) in _ON_CUDA:
        return _laid_out_on_cuda(args, _ON_CUDA[known], result)
    return _laid_out(function, args, kwargs, result)


# Dropout on a CPU. Eager multiplies with a mask that it has divided by the share kept; torch's fused operator, whose
# mask takes a byte, multiplies with that share's inverse. The two round differently: in 16 bits gradients differ, and
# where the inverse itself does (a share of 0.85 in 32 bits), results too.

_IN_16_BITS = 2
"""Bytes of an element."""


def _dropout(x: torch.Tensor, p: Any, train: bool) -> torch.Tensor:
    """Trace dropout; with a probability of zero return the input itself, as eager does."""
    if not train or not p:
        return x
    if x.device.type == "cpu" and not is_for_target_device() and isinstance(p, float) and p < 1:
        with internals.outside_tracing():
            scale = torch.ones((), dtype=x.dtype).div_(1 - p).item()
            is_as_eager = scale == torch.tensor(1 / (1 - p), dtype=x.dtype).item()
        if not is_as_eager:
            return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
        if x.dtype.itemsize == _IN_16_BITS:
            return _Dropout.apply(x, p, scale)  # type: ignore[no-untyped-call]
    return aten.native_dropout(x, p, train)[0]


class _Dropout(torch.autograd.Function):
    """The fused operator, whose gradients are scaled by a number that was rounded as eager's mask is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, scale: float) -> torch.Tensor:
        dropped: torch.Tensor
        dropped, mask = aten.native_dropout(x, p, True)
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return dropped

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return aten.native_dropout_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


# Types.


def _norm(function: Any, args: Any, kwargs: Any, made: Any) -> Any:
    """Trace a norm with the results of an absent device's kernel."""
    if not is_for_target_device() or made[0].device.type != "cpu":
        return _norm_on_a_cpu(function, args, kwargs, made)
    with made[0].fake_mode:

        def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

        def here(own: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
            if (own.dtype, own.stride()) == (found.dtype, found.stride()):
                return own
            return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=own.device)

        args, kwargs = pytree.tree_map_only(internals.FakeTensor, on_cuda, (args, kwargs))
        return tuple(map(here, made, function(*args, **kwargs)))


def _norm_on_a_cpu(_function: Any, args: Any, _kwargs: Any, made: Any) -> Any:
    """Give statistics the type that ``param_scalar_type`` of ATen's mixed_data_type.h has on a CPU."""
    x, *others = leaf_tensors(args)
    if x.device.type != "cpu" or is_for_target_device():
        return made
    if x.dtype not in (torch.bfloat16, torch.half) or all(other.dtype != torch.float32 for other in others):
        return made
    return (made[0], *(_of_type(torch.float32, each) for each in made[1:3]), *made[3:])


def _cudnn_batch_norm(_function: Any, args: Any, _kwargs: Any, made: Any) -> Any:
    return (made[0], *(_of_type(args[1].dtype, tensor) for tensor in made[1:3]), made[3])


_TYPES: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    aten.native_layer_norm.default: _norm,
    aten._native_batch_norm_legit.default: _norm,
    aten._native_batch_norm_legit.no_stats: _norm,
    aten._native_batch_norm_legit_functional.default: _norm,
    aten._native_batch_norm_legit_no_training.default: _norm,
    aten.native_batch_norm.default: _norm_on_a_cpu,
    aten.native_group_norm.default: _norm_on_a_cpu,  # whose statistics follow the input on CUDA
    # Traced in the type of the statistics.
    aten.native_group_norm_backward.default: lambda _, args, __, made: (_of_type(args[1].dtype, made[0]), *made[1:]),
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,  # which has no fake kernel that knows
}
"""Operators whose results are traced with other types than their kernels', and what gives them those."""


def _of_type(dtype: torch.dtype, traced: Any) -> Any:
    """Return a traced fake tensor with another type."""
    if not isinstance(traced, internals.FakeTensor) or traced.dtype == dtype:
        return traced
    with traced.fake_mode, torch.no_grad():
        return torch.empty_like(traced, dtype=dtype)


# Strides.

_NORMS = {
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.native_layer_norm_backward.default,
}
"""Not elementwise, yet as many elements come out as go in."""

_ON_CUDA: dict[Any, int | None] = {
    aten.cudnn_batch_norm_backward.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.upsample_bilinear2d.default: 0,
    **dict.fromkeys((aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)),
    **dict.fromkeys((aten.native_group_norm_backward.default, aten.native_layer_norm_backward.default)),
    **dict.fromkeys((aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.roll.default)),
}
"""By operator, which argument's memory format the first result has where CUDA runs it; None if it is contiguous.

Traces have the layout of the gradient, say, and copy it where the step has nothing to copy.
"""


def _as_kernels_view(source: torch.Tensor, result: Any) -> Any:
    """Return a fake view with the strides of the kernel's view.

    Along a dimension of one element they may differ: they do not matter there, but kernels look at them to tell
    whether channels come last, and lay out their own results after that.
    """
    if not isinstance(result, internals.FakeTensor) or 1 not in _numbers(result.shape) or _has_symbols(source):
        return result
    with internals.outside_tracing():
        strides = torch.empty_strided(source.shape, source.stride(), device="meta").view(result.shape).stride()
    if strides == result.stride():
        return result
    with result.fake_mode, torch.no_grad():
        return result.as_strided(result.shape, strides, result.storage_offset())


def _laid_out_on_cuda(arguments: Any, like: int | None, result: Any) -> Any:
    """Return the results of a call with the first laid out as CUDA's kernel does."""
    first = tensors_in(result)[0]
    order = list(range(first.dim()))
    if like is not None and internals.channels_come_last(
        _numbers(arguments[like].shape), _numbers(arguments[like].stride())
    ):
        order = [0, *order[2:], 1]
    if not isinstance(first, internals.FakeTensor) or _order(first) == order:
        return result
    with first.fake_mode, torch.no_grad():
        made = torch.empty_permuted(first.shape, order, dtype=first.dtype, device=first.device)
    return pytree.tree_map_only(torch.Tensor, lambda tensor: made if tensor is first else tensor, result)


def _laid_out(function: Any, arguments: Any, keywords: Any, result: Any) -> Any:
    """Return the results of a call with the strides of its kernel, as far as these are known."""
    read, outputs = tensors_in((arguments, keywords)), tensors_in(result)
    if not outputs or not all(isinstance(output, internals.FakeTensor) for output in outputs):
        return result
    if not {internals.storage_id(t) for t in outputs}.isdisjoint(map(internals.storage_id, read)):
        return result
    if function in _NORMS:
        if outputs[0].device.type != "cpu" or is_for_target_device():
            return result
    elif len({_numbers(output.shape) for output in outputs}) != 1 or not all(_goes_with(x, outputs[0]) for x in read):
        return result
    try:
        with operands.running_alone(torch.device("cpu")):
            arguments, keywords = pytree.tree_map_only(torch.Tensor, _small, (arguments, keywords))
            arguments, keywords = pytree.tree_map_only(torch.SymInt, internals.hint_of, (arguments, keywords))
            if told := _TOLD.get(function):
                arguments = told(*arguments)
            found = function(*arguments, **keywords)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return result  # it takes no sizes but its own
    if isinstance(result, torch.Tensor):
        return _like(result, found)
    leaves, structure = pytree.tree_flatten(result)  # which may have names for its parts
    return pytree.tree_unflatten(map(_like, leaves, pytree.tree_leaves(found)), structure)


def _one_group(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return samples, channels, elements of each, and groups."""
    samples, channels = x.shape[:2]
    return samples, channels, x[0, 0].numel(), 1


def _group_norm_backward(
    gradient: Any, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Any, *told: Any
) -> tuple[Any, ...]:
    return gradient, x, mean[:, :1], rstd[:, :1], weight, *_one_group(x), told[-1]


def _layer_norm_backward(gradient: Any, x: torch.Tensor, sizes: Sequence[int], *others: Any) -> tuple[Any, ...]:
    return gradient, x, list(x.shape[x.dim() - len(sizes) :]), *others


_TOLD: dict[Any, Callable[..., tuple[Any, ...]]] = {
    aten.native_group_norm.default: lambda x, weight, bias, *told: (x, weight, bias, *_one_group(x), told[-1]),
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
"""For operators that are told sizes, the arguments with the sizes of what they read."""


def _like(traced: Any, found: Any) -> Any:
    """Return a traced result with the strides of the kernel's result."""
    if not isinstance(traced, internals.FakeTensor) or not isinstance(found, torch.Tensor):
        return traced
    if found.dim() != traced.dim() or found.stride() == _small(traced).stride():
        return traced
    with traced.fake_mode:
        return torch.empty_permuted(traced.shape, _order(found), dtype=traced.dtype, device=traced.device)


def _goes_with(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a tensor is of the result's sizes, or is broadcast to them."""
    sizes = zip(reversed(_numbers(tensor.shape)), reversed(_numbers(output.shape)), strict=False)
    return tensor.dim() <= output.dim() and all(own in (1, made) for own, made in sizes)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in the order of their strides, the largest first."""
    strides = _numbers(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda d: -strides[d])


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros, laid out alike, with two elements along each dimension that has several."""
    sizes = [min(size, 2) for size in _numbers(tensor.shape)]
    made = torch.empty_permuted(sizes, _order(tensor), dtype=tensor.dtype).zero_()
    spread = zip(made.stride(), _numbers(tensor.stride()), strict=True)
    return made.as_strided(made.shape, [own if stride else 0 for own, stride in spread])


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes as numbers: those at hand, where they are symbols. No guard is made."""
    return tuple(map(internals.hint_of, sizes))


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride()))


def _is_contiguous(tensor: torch.Tensor) -> bool:
    if not _has_symbols(tensor):
        return tensor.is_contiguous()
    expected = 1
    for size, stride in zip(reversed(_numbers(tensor.shape)), reversed(_numbers(tensor.stride())), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
