"""Dropout on a CPU: the bits of eager at every share and type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.dropout import kernel_of
from planner.capture.memory import measure_peak
from planner.capture.torch_internals import FakeTensorMode
from tests.runtimes.steps import assert_same, beside, train

SHARES = (0.1, 0.15, 0.42, 0.5)  # the inverse of 0.85 and of 0.58 is not, in 32 bits, what eager's mask holds


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4 * len(SHARES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = x @ self.weight
        dropped = [
            nn.functional.dropout(part.to(dtype), p).float()
            for part, p in zip(products.chunk(len(SHARES), 1), SHARES, strict=True)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ]
        return torch.cat([*dropped, torch.native_dropout(products, 0.1, True)[0].bfloat16().float()], 1).square().sum()


def test_every_share_and_type_has_the_bits_of_eager() -> None:
    plain, model = beside(Drops(), budget="100%")
    x = torch.randn(64, 8)
    assert_same(train(plain, x), train(model, x))


@pytest.mark.parametrize("shape", [(100,), (2**14,), (33, 65, 17), (2**20 + 1,)])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.15, 0.5, 0.999])
def test_the_shorter_kernels_have_the_bits_of_the_fused_ones(shape: tuple[int, ...], p: float) -> None:
    x, gradient = torch.randn(shape), torch.randn(shape)
    for tensor in (x, gradient):
        tensor.view(-1)[:5] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 1e-42])
    graph, fake = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    given = graph.placeholder("x")
    given.meta["val"] = fake.from_tensor(x)
    drop, drop_backward = (
        kernel_of(graph.call_function(operator, (given,)))
        for operator in (torch.ops.aten.native_dropout.default, torch.ops.aten.native_dropout_backward.default)
    )
    torch.manual_seed(1)
    expected, mask = torch.native_dropout(x, p, True)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    dropped, own_mask = drop(x, p, True)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(own_mask, mask)
    assert torch.equal(bits(dropped), bits(expected))
    scale = 1 / (1 - p)
    expected = torch.ops.aten.native_dropout_backward(gradient, mask, scale)
    assert torch.equal(bits(drop_backward(gradient, mask, scale)), bits(expected))
    own_bytes, _ = measure_peak(lambda: drop(x, p, True), torch.device("cpu"))
    assert own_bytes <= measure_peak(lambda: torch.native_dropout(x, p, True), torch.device("cpu"))[0]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits, all that are no numbers alike."""
    return tensor.masked_fill(tensor.isnan(), float("nan")).view(torch.int32)


def test_small_ones_run_torchs_operators() -> None:
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x = torch.ones(100)
    dropout, backward = torch.ops.aten.native_dropout.default, torch.ops.aten.native_dropout_backward.default
    with Operators() as called:
        _, mask = kernel_of(graph.call_function(dropout, (given,)))(x, 0.1, True)
        kernel_of(graph.call_function(backward, (given,)))(x, mask, 1 / 0.9)
    assert called.seen == [dropout, backward]


class Operators(TorchDispatchMode):
    """Notes down what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


def test_rounded_ones_and_those_of_other_devices_run_as_they_are() -> None:
    graph = fx.Graph()
    given = graph.placeholder("x")
    for x in (torch.empty(2**15, dtype=torch.bfloat16), torch.empty(2**15, device="meta")):
        given.meta["val"] = x
        node = graph.call_function(torch.ops.aten.native_dropout.default, (given, 0.1, True))
        assert kernel_of(node) is node.target
