"""Which attention kernel CUDA would run, traced where there is no CUDA.

A step that is captured on a CPU gets the CPU's attention: other saved tensors, and with dropout
no fused kernel at all. For a plan of a GPU that is not here the call is replaced by the operator
that torch would choose there; its shapes, what it saves and its backward are then the GPU's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cost_models.devices import DeviceSpec

aten = torch.ops.aten

Attention = Callable[..., Tensor]

_HALVES = (torch.float16, torch.bfloat16)

_CUDNN_FIRST = ("sm90", "sm100")
"""Where torch 2.11 and later tries cuDNN first, given the cuDNN that its builds for CUDA 13 bring."""

_FLASH_HEAD = 256
_MASK_ALIGNMENT = 8
_FLASH_ALIGNMENT = 8


def choose(spec: DeviceSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> str:
    """Name the kernel that torch takes on a CUDA device: ``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``.

    Tensors, fake ones will do, are of shape (batch, heads, length, head size); ``options`` are ``dropout_p``,
    ``is_causal`` and ``enable_gqa`` of the call. The order and the conditions are those of
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` in torch 2.11 to 2.13 with nothing disabled by the user.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "math"
    call = _Call(query, key, value, mask, **options)
    fused = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}
    order = ("cudnn", "flash", "efficient") if spec.architecture in _CUDNN_FIRST else ("flash", "efficient")
    return next((name for name in order if fused[name](spec, call)), "math")


@dataclass(frozen=True, slots=True)
class _Call:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    def is_dense(self, *, grouped: bool) -> bool:
        """Check what every fused kernel wants of shapes and strides."""
        query, key, value = self.query, self.key, self.value
        heads = query.shape[1] == key.shape[1] == value.shape[1]
        if grouped:
            heads = query.shape[1] % key.shape[1] == 0 and query.shape[1] % value.shape[1] == 0
        batches = query.shape[0] == key.shape[0] == value.shape[0]
        unit_strides = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        same_types = query.dtype == key.dtype == value.dtype
        return heads and batches and unit_strides and same_types and 0 not in (query.shape[2], key.shape[2])


def _flash(spec: DeviceSpec, call: _Call) -> bool:
    size = call.query.shape[-1]
    same_size = size == call.key.shape[-1] == call.value.shape[-1] and size <= _FLASH_HEAD
    square = not call.is_causal or call.query.shape[2] == call.key.shape[2]
    # Cards with less shared memory have no backward for some large heads.
    small_card = spec.architecture in ("sm86", "sm89", "sm120")
    no_backward = small_card and (192 < size <= 224 or (size > 224 and call.dropout_p > 0))
    takes = call.mask is None and call.query.dtype in _HALVES and same_size and square and not no_backward
    return takes and call.is_dense(grouped=call.enable_gqa)


def _efficient(spec: DeviceSpec, call: _Call) -> bool:
    alignment = 8 if call.query.dtype in _HALVES else 4
    size, value_size = call.query.shape[-1], call.value.shape[-1]
    sizes = size == call.key.shape[-1] and size % alignment == 0 and value_size % alignment == 0
    known = call.query.dtype in (*_HALVES, torch.float32)
    return known and sizes and not (call.mask is not None and call.is_causal) and call.is_dense(grouped=False)


def _cudnn(spec: DeviceSpec, call: _Call) -> bool:
    largest = 256 if spec.architecture == "sm90" else 128
    sizes = (call.query.shape[-1], call.value.shape[-1])
    fits = all(size <= largest and size % 8 == 0 for size in sizes) and call.key.shape[2] > 1
    constant_mask = call.mask is None or not call.mask.requires_grad  # it has no gradient for the mask
    return call.query.dtype in _HALVES and fits and constant_mask and call.is_dense(grouped=call.enable_gqa)


_FUSED = {
    "cudnn": aten._scaled_dot_product_cudnn_attention,
    "efficient": aten._scaled_dot_product_efficient_attention,
}


def attention_on(spec: DeviceSpec) -> Attention:
    """Return what stands in for ``scaled_dot_product_attention`` while a step for a CUDA device is traced."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options = {"dropout_p": dropout_p, "is_causal": is_causal}
        kernel = choose(spec, query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
        if kernel == "math":
            result: Tensor = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
            return result
        if kernel == "flash":
            return _run_flash(query, key, value, scale=scale, **options)
        mask = None if attn_mask is None else _added(attn_mask, query, key, pad=kernel == "efficient")
        trains = any(tensor.requires_grad for tensor in (query, key, value))
        fused = _FUSED[kernel](query, key, value, mask, trains, dropout_p, is_causal, scale=scale)
        return fused[0]  # type: ignore[no-any-return]

    return attention


def _run_flash(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, **options: Any) -> Tensor:
    """Run flash attention; heads are padded to a multiple of eight, as torch does it outside the kernel."""
    size = query.shape[-1]
    missing = -size % _FLASH_ALIGNMENT
    if missing:
        query, key, value = (functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    result: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, **options, scale=scale)[0]
    return result[..., :size] if missing else result


def _added(mask: Tensor, query: Tensor, key: Tensor, *, pad: bool) -> Tensor:
    """Return the mask as the kernels take it: added to the scores, spread over batch and heads, rows aligned."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype, device=mask.device))
    aligned = mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1])
    if pad and not aligned:
        length = mask.shape[-1]
        mask = functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def replace_attention(graph_module: fx.GraphModule, attention: Attention) -> None:
    """Let every attention call of a captured graph run something else."""
    for node in graph_module.graph.find_nodes(
        op="call_function", target=functional.scaled_dot_product_attention, sort=False
    ):
        node.target = attention
    graph_module.recompile()


class InPlaceOfAttention(TorchFunctionMode):
    """While entered, lets every attention call of a program that is followed run something else, if there is any."""

    def __init__(self, attention: Attention | None) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.attention is not None and function is functional.scaled_dot_product_attention:
            function = self.attention
        return function(*args, **(kwargs or {}))
