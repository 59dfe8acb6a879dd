"""Tensor parallelism: the step of one device, carried out by several of them and held against the whole step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import cli
import planner
from planner import zoo
from planner.capture import capture, fake_mode
from planner.errors import UsageError
from planner.inputs import Inputs
from planner.joint import JointGraph, is_tangent
from planner.local_graph import local_step
from planner.memory import measure_peak
from planner.shard_rules import Sharded
from planner.tensor_parallel import Sharding, find_sharding

WIDTH, HIDDEN, HEADS, BATCH, LENGTH = 32, 64, 4, 2, 8


class Block(nn.Module):
    """A transformer block whose heads and hidden layer may be a part of what the norms and residuals say."""

    def __init__(self, parts: int = 1, *, fused: bool = False, key_heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.key_heads, self.fused = HEADS // parts, key_heads // parts, fused
        size = WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        widths = [self.heads * size, self.key_heads * size, self.key_heads * size]
        if fused:
            self.qkv = nn.Linear(WIDTH, sum(widths))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, width) for width in widths)
        self.widths = widths
        self.o = nn.Linear(widths[0], WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN // parts)
        self.down = nn.Linear(HIDDEN // parts, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = self.qkv(y).split(self.widths, -1) if self.fused else (self.q(y), self.k(y), self.v(y))
        batch, length, _ = x.shape
        q, k, v = (t.reshape(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) if self.heads != self.key_heads else t
                for t in (k, v))  # fmt: skip
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, parts: int = 1, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(parts, **options) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def captured(model: nn.Module, inputs: Any = None) -> JointGraph:
    return capture(model, Inputs.of(torch.randn(BATCH, LENGTH, WIDTH) if inputs is None else inputs))


def names(joint: JointGraph, products: tuple[fx.Node, ...]) -> list[str]:
    from planner.provenance import Places

    places = Places(joint.graph)
    return [places[product].module for product in products]


def part_of(tensor: torch.Tensor, state: Any, devices: int, device: int) -> torch.Tensor:
    """Give a device's part of a tensor."""
    if not isinstance(state, Sharded):
        return tensor
    parts = [block.chunk(devices, state.dim)[device] for block in tensor.split(list(state.blocks), state.dim)]
    return torch.cat(parts, state.dim)


def carried_out(joint: JointGraph, found: Sharding, local: fx.Graph, inputs: list[torch.Tensor]) -> list[list[Any]]:
    """Run the graph of one device on all of them, node by node, with sums where the sharding says."""
    given = iter(inputs)
    devices = found.devices
    held: list[dict[fx.Node, Any]] = [{} for _ in range(devices)]
    for node, copy in zip(joint.graph.nodes, local.nodes, strict=True):
        if node.op == "placeholder":
            whole = torch.ones(()) if is_tangent(node) else next(given)
            for device in range(devices):
                held[device][copy] = part_of(whole, found.states[node], devices, device).contiguous()
        elif node.op == "call_function":
            for known in held:
                known[copy] = copy.target(*fx.map_arg(copy.args, known.get), **fx.map_arg(copy.kwargs, known.get))
            if node in found.summed:
                total = sum(known[copy] for known in held)
                if node.target is torch.ops.aten.addmm.default:  # the bias is added once
                    total = total - (devices - 1) * held[0][copy.args[0]]
                for known in held:
                    known[copy] = total.clone()
        elif node.op == "get_attr":
            for known in held:
                known[copy] = getattr(joint.module, node.target)
    flat = local.output_node().args[0]
    return [[known.get(node) if isinstance(node, fx.Node) else None for node in flat] for known in held]


def assert_right(joint: JointGraph, devices: int) -> Sharding:
    """Hold loss and gradients of all devices against those of the whole step."""
    found, local = find_sharding(joint, devices), local_step(joint, devices)
    alone = Sharding(devices=1, states=dict.fromkeys(joint.graph.nodes), columns=(), rows=(), whole=(),
                     summed=frozenset())  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    inputs = [t.detach().double() if t.is_floating_point() else t for t in joint.inputs]
    inputs = [torch.randn(t.shape, generator=generator, dtype=t.dtype) / 4 if t.is_floating_point() else t
              for t in inputs]  # fmt: skip
    (expected,) = carried_out(joint, alone, joint.graph, inputs)
    placeholders = [n for n in joint.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    states = [None] * joint.num_forward_outputs + [found.states[n] for n in placeholders]
    for device, results in enumerate(carried_out(joint, found, local.joint.graph, inputs)):
        for whole, result, state in zip(expected, results, states, strict=False):
            if whole is not None:
                torch.testing.assert_close(result, part_of(whole, state, devices, device))
    return found


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"key_heads": 2}, {"key_heads": 2, "fused": True}])
def test_gradients_of_all_devices_make_those_of_the_step(options: dict[str, Any]) -> None:
    joint = captured(Transformer(**options).double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64))
    found = assert_right(joint, 2)
    columns = ["qkv", "up"] if options.get("fused") else ["q", "k", "v", "up"]
    assert names(joint, found.columns) == [f"blocks.{layer}.{name}" for layer in (0, 1) for name in columns]
    assert names(joint, found.rows) == [f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("o", "down")]
    assert not found.whole
    assert len(found.summed) == 8  # forward and backward, attention and MLP, two blocks
