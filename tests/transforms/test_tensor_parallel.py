"""Tensor parallelism: the step of one device, carried out by several of them and held against the whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import cli
import planner
from planner import zoo
from planner.capture.inputs import Inputs
from planner.capture.joint import JointGraph, is_tangent
from planner.capture.joint_capture import capture, fake_mode
from planner.errors import UsageError
from planner.transforms.local_graph import local_step
from planner.transforms.shards import Shard
from planner.transforms.tensor_parallel import Sharding, find_sharding
from tests.tiers import tiered

WIDTH, HIDDEN, HEADS, BATCH, LENGTH = 32, 64, 8, 2, 8


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


@pytest.fixture(scope="module")
def spread() -> planner.Plan:
    """Return a plan of one of two devices."""
    return planner.plan(Transformer(), torch.randn(BATCH, LENGTH, WIDTH), budget="1GiB", tensor_parallel=2)


def captured(model: nn.Module, inputs: Any = None) -> JointGraph:
    return capture(model, Inputs.of(torch.randn(BATCH, LENGTH, WIDTH) if inputs is None else inputs))


def names(joint: JointGraph, products: tuple[fx.Node, ...]) -> list[str]:
    from planner.capture.provenance import places_of

    places = places_of(joint.graph)
    return [places[product].module for product in products]


def part_of(tensor: torch.Tensor, state: Any, devices: int, device: int) -> torch.Tensor:
    """Return a device's part of a tensor."""
    if not isinstance(state, Shard):
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


def assert_right(joint: JointGraph, devices: int, **tolerance: float) -> Sharding:
    """Hold loss and gradients of all devices against those of the whole step."""
    found, local = find_sharding(joint, devices), local_step(joint, devices)
    alone = Sharding(devices=1, states=dict.fromkeys(joint.graph.nodes), columns=(), rows=(), whole=(),
                     summed=frozenset())  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    inputs = [
        t.detach() + torch.randn(t.shape, generator=generator, dtype=t.dtype) / 20 if t.is_floating_point() else t
        for t in joint.inputs  # biases begin as zeros, which would hide one that is added twice
    ]
    (expected,) = carried_out(joint, alone, joint.graph, inputs)
    placeholders = [n for n in joint.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    states = [None] * joint.num_forward_outputs + [found.states[n] for n in placeholders]
    for device, results in enumerate(carried_out(joint, found, local.joint.graph, inputs)):
        for whole, result, state in zip(expected, results, states, strict=False):
            if whole is not None:
                torch.testing.assert_close(result, part_of(whole, state, devices, device), **tolerance)
    return found


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"key_heads": 4}, {"key_heads": 4, "fused": True}])
def test_gradients_of_all_devices_make_those_of_the_step(options: dict[str, Any]) -> None:
    joint = captured(Transformer(**options).double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64))
    found = assert_right(joint, 2)
    columns = ["qkv", "up"] if options.get("fused") else ["q", "k", "v", "up"]
    assert names(joint, found.columns) == [f"blocks.{layer}.{name}" for layer in (0, 1) for name in columns]
    assert names(joint, found.rows) == [f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("o", "down")]
    assert not found.whole
    assert len(found.summed) == 8  # forward and backward, attention and MLP, two blocks


class Packed(nn.Module):
    """Attention whose one product gives queries, keys and values in one dimension of three, as ViTs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return (x + self.o((weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, -1))).square().mean()


class Gated(nn.Module):
    """An MLP whose one product gives what is gated and its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)).square().mean()


class Sliced(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        return (x + self.down(F.silu(both[..., :HIDDEN]) * both[..., HIDDEN:])).square().mean()


class BothWays(Gated):
    """One half is cut off, and the whole is folded: no division suits both, so all stays whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        folded = both.reshape(BATCH, LENGTH, HIDDEN, 2).sum(-1)
        return (x + self.down(both[..., :HIDDEN] * folded)).square().mean()


class NormBetween(nn.Module):
    """Only the second pair can be spread: a norm over the hidden layer stands in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.down(self.norm(self.up(x)))).square().mean()


@pytest.mark.parametrize(
    ("model", "columns", "rows", "whole"),
    [
        (Packed, ["qkv"], ["o"], []),
        (Gated, ["both"], ["down"], []),
        (Sliced, ["both"], ["down"], []),
        (BothWays, [], [], ["both", "down"]),
        (NormBetween, ["mlp.0"], ["mlp.2"], ["up", "down"]),
    ],
)
def test_what_is_spread(model: type[nn.Module], columns: list[str], rows: list[str], whole: list[str]) -> None:
    joint = captured(model().double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64))
    if columns:
        assert_right(joint, 2)
    found = find_sharding(joint, 2)
    assert [names(joint, products) for products in (found.columns, found.rows, found.whole)] == [columns, rows, whole]


@pytest.mark.parametrize(
    ("name", "columns", "whole"),
    [
        ("gpt2", ["attn.c_attn", "mlp.c_fc"], ["lm_head"]),
        ("minimind-26m", ["attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"], ["head"]),
        (
            "bert-large",
            ["attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"],
            ["cls.predictions.transform.dense", "cls.predictions.decoder"],
        ),
    ],
)
def test_models_of_the_zoo(name: str, columns: list[str], whole: list[str]) -> None:
    loaded = zoo.build(name, layers=1, batch_size=1, seq_len=32, fake_mode=fake_mode())
    joint = capture(loaded.model, Inputs.of(loaded.example_args, loaded.example_kwargs))
    found = find_sharding(joint, 2)
    assert [name.split(".0.")[-1] for name in names(joint, found.columns)] == columns
    assert len(found.rows) == 2
    assert names(joint, found.whole) == whole


@pytest.mark.parametrize("options", tiered([{}, {"fused": True}, {"key_heads": 4}], quick=[{"key_heads": 4}]))
def test_the_step_of_a_device_is_that_of_the_block_built_by_hand(options: dict[str, Any]) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    hand, whole = Transformer(2, **options), Transformer(**options)
    built = planner.plan(hand, x, budget="1GiB", optimizer="adamw")
    spread = planner.plan(whole, x, budget="1GiB", optimizer="adamw", tensor_parallel=2)
    assert spread.static_bytes == built.static_bytes
    assert spread.baseline_peak_bytes == built.baseline_peak_bytes
    assert spread.optimizer_peak_bytes == built.optimizer_peak_bytes
    assert spread.operations == built.operations  # with the work and the outputs of each
    # And a real step of the block built by hand: the CPU's allocator rounds nothing up, the prediction does.
    measured = planner.verify(hand, x, built, timed_steps=1)
    above_bytes = spread.baseline_peak_bytes - measured.baseline_peak_bytes
    assert 0 <= above_bytes < 0.002 * (measured.baseline_peak_bytes - spread.static_bytes["optimizer"])


def test_one_device_changes_nothing() -> None:
    model, x = Transformer(layers=1), torch.randn(BATCH, LENGTH, WIDTH)
    plans = [planner.plan(model, x, budget="120KiB", deterministic=True, **options)  # type: ignore[arg-type]
             for options in ({}, {"tensor_parallel": 1})]  # fmt: skip
    first, second = (
        replace(plan, capture_seconds=0.0, solve_seconds=0.0, baselines=()) for plan in plans
    )  # fmt: skip
    assert first == second


def test_bytes_between_the_products_are_halved(spread: planner.Plan) -> None:
    joint = captured(Transformer(layers=1))
    local, found = local_step(joint, 2), find_sharding(joint, 2)
    for node, copy in zip(joint.graph.nodes, local.joint.graph.nodes, strict=True):
        state = found.states.get(node)
        before, after = node.meta.get("val"), copy.meta.get("val")
        if isinstance(before, torch.Tensor):
            assert before.numel() == (2 if isinstance(state, Shard) else 1) * after.numel()
    by_module = {(row.module, row.operation): row.output_bytes for row in spread.operations if row.phase == "forward"}
    tokens = BATCH * LENGTH
    assert by_module["blocks.0.up", "aten.addmm.default"] == tokens * HIDDEN // 2 * 4
    assert by_module["blocks.0.down", "aten.addmm.default"] == tokens * WIDTH * 4
    assert by_module["blocks.0.norm2", "aten.native_layer_norm.default"] == tokens * (WIDTH + 2) * 4


def test_parameters_add_up(spread: planner.Plan) -> None:
    model = Transformer()
    shared = sum(
        p.numel() for name, p in model.named_parameters()
        if name.split(".")[-2] in ("q", "k", "v", "up") or name.endswith(("o.weight", "down.weight"))
    )  # fmt: skip
    whole = sum(p.numel() for p in model.parameters())
    assert spread.static_bytes["parameters"] == pytest.approx(4 * (whole - shared // 2), abs=64 * 40)
    (note,) = (finding for finding in spread.warnings if finding.rule == "tensor-parallel")
    assert note.evidence == "over 2 devices: 8 products are column-parallel, 4 row-parallel, 0 whole on each device"


def test_a_pipeline_of_such_devices() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    settings: dict[str, Any] = {"budget": "1GiB", "stages": 2, "micro_batches": 2, "optimizer": "adamw"}
    built = planner.plan_pipeline(Transformer(2), x, **settings)
    spread = planner.plan_pipeline(Transformer(), x, **settings, tensor_parallel=2)
    for hand, stage in zip(built.stages, spread.stages, strict=True):
        assert stage.plans[0].static_bytes == hand.plans[0].static_bytes
        assert stage.baseline_peak_bytes == hand.baseline_peak_bytes


def test_heads_that_cannot_be_divided_stay_whole() -> None:
    joint = captured(Transformer(layers=1, key_heads=1), torch.randn(BATCH, LENGTH, WIDTH))
    found = find_sharding(joint, 2)
    assert names(joint, found.columns) == ["blocks.0.up"]
    assert names(joint, found.whole) == [f"blocks.0.{name}" for name in "qkvo"]


def test_what_is_refused(spread: planner.Plan) -> None:
    model, x = Transformer(), torch.randn(BATCH, LENGTH, WIDTH)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    with pytest.raises(UsageError, match="no product with a parameter can be spread over 2"):
        planner.plan(convolutions, torch.randn(2, 3, 8, 8), budget="1GiB", loss_fn=torch.sum, tensor_parallel=2)
    with pytest.raises(UsageError, match="no product with a parameter can be spread over 7"):
        planner.plan(model, x, budget="1GiB", tensor_parallel=7)
    with pytest.raises(UsageError, match="at least 1"):
        planner.plan(model, x, budget="1GiB", tensor_parallel=0)
    with pytest.raises(UsageError, match="fsdp2"):
        planner.plan(model, x, budget="1GiB", tensor_parallel=2, data_parallel="fsdp2", ranks=2)
    with pytest.raises(UsageError, match="on the whole graph"):
        planner.plan(model, x, budget="1GiB", tensor_parallel=2, runtime="modules")
    for run in (lambda: planner.verify(model, x, spread), lambda: planner.auto_wrap(model, x, plan=spread)):
        with pytest.raises(UsageError, match="planned for, not run"):
            run()


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["gpt2", "--layers", "1", "--batch-size", "1", "--seq-len", "32", "--budget", "4GiB"]
    assert cli.main(["plan", *sizes, "--tensor-parallel", "2", "--full"]) == 0
    assert "2 products are column-parallel" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["verify", *sizes, "--tensor-parallel", "2"]) == UsageError.exit_code
    assert "planned for, not run" in capsys.readouterr().err
