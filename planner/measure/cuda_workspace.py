"""What CUDA kernels allocate beyond their outputs, where there is no CUDA to see it: allowances.

Each is what the kernel's own source or documentation says it allocates, or a bound on that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from planner.capture.joint import tensors_of
from planner.common.units import round_up

aten = torch.ops.aten

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_ATTENTION_BACKWARDS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)

_BLOCK = 128
"""Attention's backward rounds the length up to whole blocks of queries."""


def allowance_bytes(node: fx.Node) -> int:
    """Return an allowance for the workspace of one operation on a GPU.

    For a convolution as much as it reads and writes: cuDNN's fast kernels want channels last and rearrange what is not.
    For attention's backward the gradient of the queries summed up in float32, one float32 for each query, and with
    grouped queries a gradient of keys and values for each head. For the gradient of an embedding what sorting its
    indices takes. 0 for others: the workspace of matrix products is resident, see
    :func:`cost_models.devices.library_bytes`.
    """
    if node.target in _CONVOLUTIONS:
        return _convolution(node)
    if node.target in _ATTENTION_BACKWARDS:
        return _attention_backward(*_arguments(node)[1:4])
    if node.target is aten.embedding_dense_backward.default:
        return 5 * _arguments(node)[1].nbytes
    return 0


def _arguments(node: fx.Node) -> list[Tensor]:
    return [tensor for source in node.args if isinstance(source, fx.Node) for tensor in tensors_of(source)]


def _convolution(node: fx.Node) -> int:
    tensors = [tensor for tensor in (*_arguments(node), *tensors_of(node)) if tensor.dim() >= 3]
    if all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors if tensor.dim() == 4):
        return 0
    return sum(tensor.nbytes for tensor in tensors)


def _attention_backward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    batch, heads, length, size = query.shape
    rounded = round_up(length, _BLOCK)
    summed = batch * heads * rounded * round_up(size, 32) * 4 if query.dtype != torch.float32 else 0
    each_query = batch * heads * rounded * 4
    repeated = 0
    if key.shape[1] != heads:
        repeated = batch * heads * key.shape[2] * (key.shape[3] + value.shape[3]) * key.element_size()
    return summed + each_query + repeated
