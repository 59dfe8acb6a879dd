"""Operators are called by the shortest way that arrives at them with the same arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.planned_graph_internals import recompile_directly

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """Notes what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((function, repr((args, kwargs))))
        return function(*args, **(kwargs or {}))


def every_kind(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Call operators whose bindings choose among several by the kinds of their arguments."""
    z = x + y
    results = [z, z * 2.0, z - 1, 1 - z, z.sum(0, keepdim=True), z.sum(), z.mean((0, 1)), z**2, z**2.0, 2.0**z]
    results += [z.view(-1), z.t(), z.expand(2, 4, 4), z.select(0, 1), *z.split(2), *z.max(0), z.max(), z.amax(1)]
    results += [torch.addmm(x, x, y), torch.addmm(x, x, y, beta=0.5, alpha=2), x @ y, torch.cat([x, y], 1)]
    results += [z.clamp(min=0.0), z.clamp(max=y), torch.where(z > 0, z, 0.0), z.masked_fill(z > 0, 1.0), z.double()]
    results += [torch.nn.functional.gelu(z, approximate="tanh"), torch.softmax(z, -1), z.std(0), z.norm(), z.cumsum(0)]
    results += [z.gather(0, z.argsort(0)), z[torch.tensor([1, 1])], z.new_zeros(3), torch.zeros_like(z), z.clone()]
    results += [torch.native_layer_norm(z, [4], None, None, 1e-5)[0], z.div(2.0, rounding_mode="floor")]
    return results


def test_the_same_operators_run_with_the_same_arguments() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    traced = make_fx(every_kind, tracing_mode="fake")(x, y)
    seen = []
    for _ in range(2):
        with Seen() as mode:
            results = traced(x.clone(), y.clone())
        seen.append((mode.calls, results))
        targets = [node.target for node in traced.graph.nodes]
        recompile_directly(traced)
        assert [node.target for node in traced.graph.nodes] == targets
    (calls, expected), (direct, actual) = seen
    assert direct == calls
    assert all(map(torch.equal, actual, expected))
