"""Trace on a CPU the operators that a GPU would run that is planned for and not here.

Torch chooses kernels by device before anything can be traced: attention, BatchNorm by cuDNN, RMSNorm as one operator
(types of norms are in :mod:`planner.capture.fake_kernels`). A step that is captured on a CPU for a GPU has
the GPU's operators, sizes and types, so that its plan is a plan there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cost_models.devices import DeviceSpec
from planner.capture.cuda_attention import attention_on
from planner.capture.torch_internals import holding, suggest_memory_format

aten = torch.ops.aten

_LARGEST_BATCH = {"rows": 131_070, "maps": 880_801}
"""Of cuDNN's BatchNorm in training: for inputs of two dimensions, and of more."""
_LARGEST_BATCH_OF_EVAL = {"rows": 262_136, "maps": 65_535}
_LARGEST_INDEX = 2**31 - 1


_target: ContextVar[TargetDevice | None] = ContextVar("device that is traced for and not here", default=None)


class TargetDevice:
    """An absent CUDA device that is planned for."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        attention = attention_on(spec)
        self.functions: dict[Any, Callable[..., Any]] = {
            functional.scaled_dot_product_attention: attention,
            functional.rms_norm: _rms_norm,
            torch.rms_norm: _rms_norm,
            functional.batch_norm: _batch_norm,
        }

    def replace_calls(self, graph_module: fx.GraphModule) -> None:
        """Let a captured program call what the device runs."""
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                node.target = self.functions.get(node.target, node.target)
        graph_module.recompile()


class _Calls(TorchFunctionMode):
    def __init__(self, target_device: TargetDevice) -> None:
        super().__init__()
        self.functions = target_device.functions

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.functions.get(function, function)(*args, **(kwargs or {}))


@contextmanager
def calls_of(target_device: TargetDevice | None) -> Iterator[None]:
    """Let a traced program call the operators of an absent target device, if there is one."""
    with tracing_for(target_device), _Calls(target_device) if target_device else nullcontext():
        yield


def tracing_for(target_device: TargetDevice | None) -> AbstractContextManager[None]:
    """Trace for an absent target device, if there is one."""
    return holding(_target, target_device or _target.get())


def is_for_target_device() -> bool:
    """Whether tracing is for an absent target device."""
    return _target.get() is not None


def _rms_norm(x: Tensor, sizes: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Run one operator, as ``rms_norm`` of aten/src/ATen/native/layer_norm.cpp does for tensors on CUDA."""
    other_type = weight is not None and weight.dtype != x.dtype
    if x.is_complex() or other_type or suggest_memory_format(x) != torch.contiguous_format:
        return torch.rms_norm(x, sizes, weight, eps)
    return fused_rms_norm(x, list(sizes), weight, eps)[0]


@torch.library.custom_op("checkpoint_planner::fused_rms_norm", mutates_args=())
def fused_rms_norm(x: Tensor, sizes: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Stand for ``aten._fused_rms_norm`` while a step is traced: on a CPU torch would trace what that is made of."""
    return aten._fused_rms_norm(x, sizes, weight, eps)


@fused_rms_norm.register_fake
def _(x: Tensor, sizes: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    outer = x.shape[: x.dim() - len(sizes)]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    return made, x.new_empty((*outer, *[1] * len(sizes)), dtype=dtype)


@torch.library.custom_op("checkpoint_planner::fused_rms_norm_backward", mutates_args=())
def fused_rms_norm_backward(
    gradient: Tensor, x: Tensor, sizes: list[int], deviation: Tensor, weight: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor]:
    """Stand for ``aten._fused_rms_norm_backward``, likewise."""
    return aten._fused_rms_norm_backward(gradient, x, sizes, deviation, weight, needed)


@fused_rms_norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, sizes: list[int], deviation: Tensor, weight: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor]:
    of_weight = x.new_empty(0) if weight is None or not needed[1] else torch.empty_like(weight)
    return torch.empty_like(x, memory_format=torch.contiguous_format), of_weight


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.sizes, weight, _eps = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor, _of_deviation: Any) -> tuple[Tensor | None, ...]:
    x, deviation, weight = ctx.saved_tensors
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    of_x, of_weight = fused_rms_norm_backward(gradient, x, ctx.sizes, deviation, weight, needed)
    return of_x if needed[0] else None, None, of_weight if needed[1] else None, None


fused_rms_norm.register_autograd(_differentiate, setup_context=_remember)


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Run cuDNN's operator where torch does."""
    if weight is None or bias is None or not takes_cudnn(x, mean, weight, training):
        return torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, torch.backends.cudnn.enabled)
    return aten.cudnn_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)[0]


def takes_cudnn(x: Tensor, mean: Tensor | None, weight: Tensor, training: bool) -> bool:
    """Whether BatchNorm with weight and bias runs by cuDNN: ``_select_batch_norm_backend`` in Normalization.cpp."""
    types = torch.bfloat16 not in (x.dtype, weight.dtype) and (x.dtype != torch.half or weight.dtype == torch.float32)
    largest = _LARGEST_BATCH if training else _LARGEST_BATCH_OF_EVAL
    small = x.shape[0] <= largest["rows" if x.dim() == 2 else "maps"] and x.numel() < _LARGEST_INDEX
    has_statistics = mean is not None or training
    return types and small and has_statistics and torch.backends.cudnn.enabled


_STAND_FOR = {
    torch.ops.checkpoint_planner.fused_rms_norm.default: aten._fused_rms_norm.default,
    torch.ops.checkpoint_planner.fused_rms_norm_backward.default: aten._fused_rms_norm_backward.default,
}


def meant(operator: Any) -> Any:
    """Return the target device's operator that a traced one stands for; others unchanged."""
    return _STAND_FOR.get(operator, operator)
