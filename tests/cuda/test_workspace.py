"""What torch's kernels allocate beside their outputs, held against what is said of them where no GPU is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from planner.capture.fake_internals import fake_mode
from planner.measure import devices, workspace
from planner.measure.cuda_workspace import allowance_bytes
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()

aten = torch.ops.aten
HERE = torch.device("cuda:0")
MODE = fake_mode()
ROUNDED = 512 * 8
"""Every tensor of a kernel is rounded up by itself."""


def tensor(*shape: int, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    with MODE:
        if strides is None:
            return torch.empty(shape, dtype=dtype, device=HERE)
        return torch.empty_strided(shape, strides, dtype=dtype, device=HERE)


@pytest.mark.parametrize("name", tiered(["h100", "a100-80", "rtx-4090", "rtx-5090", "b200"], quick=["h100"]))
@pytest.mark.parametrize("settings", [{}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}])
@gpu.only_fake
def test_what_matrix_libraries_keep(name: str, settings: dict[str, str]) -> None:
    lines = [
        "import torch; from planner.capture.operands import settle; from planner.measure import devices",
        "settle(torch.device('cuda')); spec = devices.here(torch.device('cuda'))",
        "blocks = [b for s in torch.cuda.memory_snapshot() for b in s['blocks'] if b['state'] == 'active_allocated']",
        "assert sum(devices.pieces(spec)) == spec.library_bytes",
        "assert sorted(b['requested_size'] for b in blocks) == sorted(devices.pieces(spec)), (blocks, spec)",
    ]
    gpu.run("\n".join(lines), FAKE_GPU=name, **settings)


def call(operator: Any, *arguments: Any) -> fx.Node:
    """Return a node that calls an operator with tensors, or other arguments."""
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"given_{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(operator, tuple(map(given, arguments)))
    with MODE:
        node.meta["val"] = operator(*arguments)
    return node


def check(node: fx.Node) -> None:
    (measured,) = workspace.of_calls([node], HERE, workspace.TO_RUN)
    assert abs(allowance_bytes(node, devices.here(HERE)) - measured) <= ROUNDED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [1, 3, 30, 96, 128, 768, 1022, 3072, 30522])
def test_sums_over_leading_dimensions(columns: int, dtype: torch.dtype) -> None:
    for rows in (7, 64, 200, 256, 512, 1000, 1024, 1568, 6304, 25088):
        if rows * columns < 2**27:
            check(call(aten.sum.dim_IntList, tensor(rows, columns, dtype=dtype), [0], True))


def test_sums_over_more_dimensions() -> None:
    check(call(aten.sum.dim_IntList, tensor(8, 512, 768), [0, 1], True))
    check(call(aten.sum.dim_IntList, tensor(4, 1024, 16, 128, strides=(2097152, 128, 131072, 1)), [0, 1, 2], True))
    check(call(aten.sum.dim_IntList, tensor(8192, 768), [1], True))
    check(call(aten.sum.dim_IntList, tensor(32, 64, 56, 56), [0, 2, 3], True))


@pytest.mark.parametrize("rows", [32, 6400, 151936])
@pytest.mark.parametrize("count", [1024, 3072, 3073, 8192])
def test_gradients_of_embeddings(count: int, rows: int) -> None:
    for width in (12, 512, 1000):
        arguments = (tensor(1, count, width), tensor(1, count, dtype=torch.int64), rows, -1, False)
        node = call(aten.embedding_dense_backward.default, *arguments)
        if rows * 20 < count:  # newer versions of torch need less
            (measured,) = workspace.of_calls([node], HERE, workspace.TO_RUN)
            assert measured <= allowance_bytes(node, devices.here(HERE))
        else:
            check(node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", tiered([32, 64, 96, 128, 256], quick=[64, 128]))
def test_backward_of_efficient_attention(size: int, dtype: torch.dtype) -> None:
    for length in (64, 197, 1000, 1024):
        heads = tensor(2, 3, length, size, dtype=dtype, strides=(length * 3 * size, size, 3 * size, 1))
        sums = tensor(2, 3, -(-length // 32) * 32)
        state = tensor(dtype=torch.int64)
        arguments = (heads, heads, heads, heads, None, heads, sums, state, state, 0.0, [True, True, True, False])
        check(call(aten._scaled_dot_product_efficient_attention_backward.default, *arguments))


@pytest.mark.parametrize("strides", [None, (160, 160 * 48, 1)])
def test_what_softmax_norms_and_rolls_copy(strides: tuple[int, ...] | None) -> None:
    x, like = (tensor(48, 64, 160, strides=strides) for _ in range(2))
    check(call(aten._softmax_backward_data.default, x, like, -1, torch.float32))
    check(call(aten._softmax.default, x, -1, False))
    check(call(aten.native_layer_norm.default, x, [160], None, None, 1e-5))
    check(call(aten.roll.default, x, [3], [0]))
    check(call(aten.roll.default, x, [3, 4], [0, 1]))
