"""Choose the attention kernel that CUDA would run, while tracing where there is no CUDA.

A step that is captured on a CPU gets the CPU's attention: other saved tensors, and with dropout
no fused kernel at all. For a plan of a GPU that is not here the call is replaced by the operator
that torch would choose there; its shapes, what it saves and its backward are then the GPU's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cost_models.devices import DeviceSpec
from planner.capture.torch_internals import VERSION

aten = torch.ops.aten

Attention = Callable[..., Tensor]

_HALVES = (torch.float16, torch.bfloat16)

_CUDNN_FIRST = ("sm90", "sm100", "sm103")
"""Where cuDNN is tried first, given the cuDNN that torch's builds for CUDA 13 bring."""

_LITTLE_SHARED_MEMORY = ("sm86", "sm89", "sm120", "sm121")
"""Cards on which flash attention has no backward for some large heads."""

_FLASH_HEAD = 256
_MASK_ALIGNMENT = 8
_FLASH_ALIGNMENT = 8
_CUDNN_HEAD = 128
_DROPOUT_STEPS = 16
_SWITCH = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules for choosing attention kernels that differ between versions of torch."""

    grouped_efficient: bool = True
    """Whether the efficient kernel takes fewer heads of keys and values than of queries."""
    dropout_in_steps: bool = True
    """Whether cuDNN is left alone for probabilities that are no multiple of a sixteenth."""
    largest_cudnn_head: Mapping[str, int] = field(default_factory=dict)
    """By architecture, up to which size cuDNN takes heads; 128 for others."""
    other_cudnn_heads: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By architecture, larger sizes of queries and values that it takes in training."""
    no_single_query: tuple[str, ...] = ()
    """Architectures on which cuDNN is left alone for one query at a time."""


_LATENT = (192, 128)
_BLACKWELL = ("sm100", "sm103")

_2_11 = Rules(
    grouped_efficient=False,
    dropout_in_steps=False,
    largest_cudnn_head={"sm90": 256},
    other_cudnn_heads=dict.fromkeys(_BLACKWELL, (_LATENT,)),
)
_2_12 = replace(_2_11, dropout_in_steps=True)
_2_14 = Rules(other_cudnn_heads=dict.fromkeys(_CUDNN_FIRST, (_LATENT, (256, 256))), no_single_query=_BLACKWELL)
RULES: dict[tuple[int, ...], Rules] = {(2, 11): _2_11, (2, 12): _2_12, (2, 13): _2_12, (2, 14): _2_14}
"""By version. Each was held against torch itself over a grid of calls: ``tests/cuda/test_attention.py``."""

NEWEST = max(RULES)


def rules_here() -> Rules:
    """Return the rules of this torch: those of the newest version that is known, where it is newer."""
    return RULES.get(VERSION, RULES[NEWEST])


def choose(spec: DeviceSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> str:
    """Name the kernel that torch takes on a CUDA device: ``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``.

    Tensors, fake ones will do, are of shape (batch, heads, length, head size); ``options`` are ``dropout_p``,
    ``is_causal`` and ``enable_gqa`` of the call. The order and the conditions are those of
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` in training; what a person has switched off stays off.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "math"
    call = _Call(query, key, value, mask, **options)
    fused: dict[str, tuple[Callable[[], bool], Callable[[DeviceSpec, _Call], bool]]] = {
        "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, _cudnn),
        "flash": (torch.backends.cuda.flash_sdp_enabled, _flash),
        "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, _efficient),
    }
    cudnn_first = spec.architecture in _CUDNN_FIRST and os.environ.get(_SWITCH) != "1"
    order = ("cudnn", "flash", "efficient") if cudnn_first else ("flash", "efficient")
    return next((name for name in order if fused[name][0]() and fused[name][1](spec, call)), "math")


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
    no_backward = 192 < size <= 224 or (size > 224 and call.dropout_p > 0)
    card = not (spec.architecture in _LITTLE_SHARED_MEMORY and no_backward)
    takes = call.mask is None and call.query.dtype in _HALVES and same_size and square and card
    return takes and call.is_dense(grouped=call.enable_gqa)


def _efficient(_spec: DeviceSpec, call: _Call) -> bool:
    alignment = 8 if call.query.dtype in _HALVES else 4
    size, value_size = call.query.shape[-1], call.value.shape[-1]
    sizes = size == call.key.shape[-1] and size % alignment == 0 and value_size % alignment == 0
    known = call.query.dtype in (*_HALVES, torch.float32)
    grouped = call.enable_gqa and rules_here().grouped_efficient
    return known and sizes and not (call.mask is not None and call.is_causal) and call.is_dense(grouped=grouped)


def _cudnn(spec: DeviceSpec, call: _Call) -> bool:
    rules = rules_here()
    (size, value_size), lengths = (call.query.shape[-1], call.value.shape[-1]), (call.query.shape[2], call.key.shape[2])
    small = max(size, value_size) <= rules.largest_cudnn_head.get(spec.architecture, _CUDNN_HEAD)
    other = (size, value_size) in rules.other_cudnn_heads.get(spec.architecture, ())
    fits = size % 8 == value_size % 8 == 0 and (small or other)
    no_single_query = call.dropout_p or spec.architecture in rules.no_single_query
    several = lengths[1] > 1 and not (lengths[0] == 1 and no_single_query)
    in_steps = not rules.dropout_in_steps or (call.dropout_p * _DROPOUT_STEPS).is_integer()
    constant_mask = call.mask is None or not call.mask.requires_grad  # it has no gradient for the mask
    strict = torch.get_deterministic_debug_mode() == 2  # kernels that are not deterministic raise
    takes = call.query.dtype in _HALVES and fits and several and in_steps and constant_mask and not strict
    return takes and call.is_dense(grouped=call.enable_gqa)


_FUSED = {"cudnn": aten._scaled_dot_product_cudnn_attention, "efficient": aten._scaled_dot_product_efficient_attention}


def attention_on(spec: DeviceSpec) -> Attention:
    """Return the replacement of ``scaled_dot_product_attention`` for tracing a step for a CUDA device."""

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
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if kernel == "flash":
            return _run_flash(query, key, value, scale=scale, **options)
        mask = None if attn_mask is None else _added(attn_mask, query, key, pad=kernel == "efficient")
        trains = any(tensor.requires_grad for tensor in (query, key, value))
        return _FUSED[kernel](query, key, value, mask, trains, dropout_p, is_causal, scale=scale)[0]

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
        mask = torch.where(mask, 0.0, aten.scalar_tensor(-math.inf, dtype=query.dtype, device=mask.device))
    aligned = mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1])
    if pad and not aligned:
        length = mask.shape[-1]
        mask = functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
