"""Workspace of CUDA kernels where there is no CUDA to measure it.

What torch's own kernels allocate follows from their source and the device, and is held against them in
``tests/cuda/test_workspace.py``. What cuDNN allocates nobody tells: that is an allowance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cost_models.devices import DeviceSpec, multiprocessors
from planner.capture.joint import tensors_of, values_of
from planner.common.units import round_up
from planner.plans.allocator import MIN_BLOCK_BYTES

aten = torch.ops.aten

_LARGE = ("sm80", "sm90", "sm100", "sm103")  # data centers' GPUs, whose multiprocessors run more and have more memory

_Rule = Callable[..., int]
"""From a node, the device and the tensors among the node's arguments to bytes."""


def allowance_bytes(node: fx.Node, spec: DeviceSpec) -> int:
    """Return the workspace of one operation on a GPU; 0 for most.

    The workspace of matrix products is resident, see :func:`cost_models.devices.library_bytes`.
    """
    rule = _RULES.get(node.target)
    return 0 if rule is None else rule(node, spec, *_arguments(node))


def _contiguous_copies(tensors: Sequence[Tensor]) -> int:
    return sum(_as_block(tensor) for tensor in tensors if not tensor.is_contiguous())


def _as_block(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, MIN_BLOCK_BYTES)


def _arguments(node: fx.Node) -> list[Tensor]:
    return [tensor for source in node.args if isinstance(source, fx.Node) for tensor in tensors_of(source)]


def _convolution(node: fx.Node, spec: DeviceSpec, *given: Tensor) -> int:
    """Return the bytes it reads and writes: cuDNN's fast kernels convert to channels last.

    Summing the gradient over all but its channels, for that of a bias, comes after the convolution itself.
    """
    tensors = [tensor for tensor in (*given, *tensors_of(node)) if tensor.dim() >= 3]
    is_last = all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors if t.dim() == 4)
    rearranged = 0 if is_last else sum(tensor.nbytes for tensor in tensors)
    if node.target is not aten.convolution_backward.default or not node.args[-1][2]:  # type: ignore[index]
        return rearranged
    return max(rearranged, _sum(given[0], [d for d in range(given[0].dim()) if d != 1], spec))


# Sums: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig and ReduceConfig.global_memory_size.

_MOST_THREADS, _WARP = 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""For each thread, before and after a sum is spread over several blocks."""


def _sum(x: Tensor, dimensions: list[int] | None, spec: DeviceSpec) -> int:
    """Return the partial results of a sum over leading dimensions, one from each block that shares a result.

    A sum over the dimension that lies closest in memory has few results to share, and takes next to nothing.
    """
    summed = {d % x.dim() for d in (dimensions or range(x.dim()))} if x.dim() else set()
    by_stride = sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: (x.stride(d), x.shape[d]))
    if not by_stride or by_stride[0] in summed:
        return 0
    results = math.prod(x.shape[d] for d in by_stride if d not in summed)
    terms = math.prod(x.shape[d] for d in by_stride if d in summed)
    together = math.gcd(4, _closest(x, by_stride, summed)) if x.stride(by_stride[0]) == 1 else 1
    threads = _MOST_THREADS // together
    columns, rows = min(_power(results // together), threads), min(_power(terms), threads)
    width = min(columns, _WARP)
    height = min(rows, threads // width)
    width = min(columns, threads // height)
    if terms < min(_LEAST_VALUES * height, _MOST_VALUES):
        return 0
    values = -(-terms // height)
    most_threads = 2048 if spec.architecture in _LARGE else 1536  # that a multiprocessor runs at once
    resident = multiprocessors(spec.name) * (most_threads // (width * height))
    blocks = -(-(results // together) // width)
    if values < _MOST_VALUES or blocks > resident:
        return 0
    sharing = max(min(-(-resident // blocks), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if sharing <= 1:
        return 0
    item_bytes = max(4, x.element_size())  # 16 bits are summed up in 32
    parts_bytes = item_bytes * results * sharing * width * together
    return round_up(parts_bytes, MIN_BLOCK_BYTES) + round_up(4 * blocks, MIN_BLOCK_BYTES)


def _closest(x: Tensor, by_stride: list[int], summed: set[int]) -> int:
    """Return how many results lie side by side in memory."""
    count = 1
    for d in by_stride:
        if d in summed or x.stride(d) != count:
            break
        count *= x.shape[d]
    return count


def _power(number: int) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << max(number, 1).bit_length() - 1


# Attention.

_BLOCK = 128
"""Flash attention's backward rounds the length up to whole blocks of queries."""


def _halved_attention_backward(_node: fx.Node, _spec: DeviceSpec, *given: Tensor) -> int:
    """Return the gradient of the queries summed up in float32, and one float32 for each query."""
    query, key, value = given[1:4]
    batch, heads, length, size = query.shape
    rounded = round_up(length, _BLOCK)
    summed = batch * heads * rounded * round_up(size, 32) * 4 if query.dtype != torch.float32 else 0
    return summed + batch * heads * rounded * 4 + _repeated(query, key, value)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the gradients of keys and values for each head, where heads share them."""
    batch, heads = query.shape[:2]
    if key.shape[1] == heads:
        return 0
    return batch * heads * key.shape[2] * (key.shape[3] + value.shape[3]) * key.element_size()


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How a kernel cuts attention: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h."""

    queries: int
    keys: int
    sums_keys: bool = False
    """Whether gradients of keys and values, too, are summed up in memory of their own."""


def _tiles(size: int, *, is_half: bool, spec: DeviceSpec) -> _Tiles:
    """Return the tiles of a head size: with little shared memory those of consumer cards, else those of A100."""
    if size <= 64:
        return _Tiles(64, 64)
    if spec.architecture in _LARGE:
        if size <= 128:
            return _Tiles(128, 128 if is_half else 64)
        return _Tiles(128, 64, sums_keys=is_half)
    if not is_half:
        return _Tiles(64, 64)
    return _Tiles(128, 64) if size <= 96 else _Tiles(64 if size <= 128 else 128, 64, sums_keys=True)


def _efficient_attention_backward(_node: fx.Node, spec: DeviceSpec, *given: Tensor) -> int:
    """Return sums of gradients tile by tile, and what each query's output and gradient come to."""
    query, key, value = given[1:4]
    batch, heads, length, size = query.shape
    is_half = query.dtype != torch.float32
    tiles = _tiles(max(size, value.shape[3]), is_half=is_half, spec=spec)
    rows, columns = -(-length // tiles.queries), -(-size // tiles.keys)
    summed = rows * columns * (tiles.queries * tiles.keys + 4)  # each tile has a lock and a counter
    if tiles.sums_keys:
        widths = round_up(size, tiles.keys) + round_up(value.shape[3], tiles.keys)
        summed += round_up(key.shape[2], tiles.keys) * widths
    # Not in the kernel in float32: the product of output and gradient, its sum, and that rearranged.
    before = 0 if is_half else length * value.shape[3] + 2 * length
    return batch * heads * max(summed + length, before) * 4 + _repeated(query, key, value)


# Embeddings: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.

_UNSORTED = 3072
"""How many indices are not sorted."""
_SORTING = 5
"""How many times the indices are there while they are sorted."""
_COUNTS = 17 * 2**10
"""What sorting counts in, until torch 2.11 at least."""
_ROWS = 10
"""How many rows a stretch has at most."""


def _embedding_backward(node: fx.Node, _spec: DeviceSpec, gradient: Tensor, indices: Tensor) -> int:
    """Return what sorting many indices takes, then the sums of stretches of equal ones; few are not sorted.

    A bound where each row is asked for dozens of times: newer versions of torch need less then.
    """
    rows: int = node.args[2]  # type: ignore[assignment]
    count, width, item_bytes = indices.numel(), gradient.shape[-1], indices.element_size()
    copied = 0 if gradient.is_contiguous() else gradient.nbytes
    if count <= _UNSORTED:
        return copied
    segments = min(count, rows)
    parts = count // _ROWS + segments
    sizes = [count * item_bytes] * 3 + [segments * item_bytes] * 2 + [parts * item_bytes]
    sizes.append(parts * width * 4)
    sorting = round_up(_SORTING * count * item_bytes, MIN_BLOCK_BYTES) + _COUNTS
    return copied + max(sum(round_up(size, MIN_BLOCK_BYTES) for size in sizes), sorting)


def _copied(count: int) -> _Rule:
    """Return the rule of kernels that copy what is not contiguous of so many of their first tensors."""
    return lambda _node, _spec, *given: _contiguous_copies(given[:count])


def _softmax_backward(_node: fx.Node, _spec: DeviceSpec, *given: Tensor) -> int:
    return _as_block(given[0]) + _contiguous_copies(given[:2])  # their product comes first


def _roll(node: fx.Node, _spec: DeviceSpec, x: Tensor) -> int:
    return _as_block(x) if len(node.args[1]) > 1 or not x.is_contiguous() else 0  # type: ignore[arg-type]


def _sum_of(node: fx.Node, spec: DeviceSpec, x: Tensor) -> int:
    return _sum(x, values_of(node.args[1]), spec)


_RULES: dict[Any, _Rule] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution,
    aten.sum.dim_IntList: _sum_of,
    aten.mean.dim: _sum_of,
    aten._scaled_dot_product_flash_attention_backward.default: _halved_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _halved_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.roll.default: _roll,
    aten._softmax.default: _copied(1),
    aten._log_softmax.default: _copied(1),
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _copied(2),
    aten.native_layer_norm.default: _copied(1),
    aten.native_layer_norm_backward.default: _copied(2),
}
