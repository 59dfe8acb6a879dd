"""Blocks planned one by one, with eager PyTorch around them: what is seen there is what really happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import planner
from planner.capture import fake_mode
from planner.capture.blocks.regions import Step
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import Backend
from planner.errors import PlanMismatchError, UsageError
from tests.runtimes.steps import wrap_and_hold, wrap_and_hold_under_autocast

ROWS, WIDTH = 256, 32


class Normed(nn.Module):
    """Convolutions with running statistics; the backward of a block frees the gradient that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))  # noqa: E731
        self.layers = nn.Sequential(*(block() for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.stem(x)).mean((2, 3)))
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) * torch.sigmoid(self.other(memory)))


class Shared(nn.Module):
    """What one block returns goes to several, so autograd adds gradients up; a tied layer stands outside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.decoder = nn.ModuleList(Decoding() for _ in range(3))
        self.tied = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, y = x, self.tied(x)
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        for layer in self.decoder:
            y = layer(y, memory)
        return self.tied(y).square().mean()


class Twice(nn.Module):
    """A block that is called twice, and one that returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Passing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.layers[0](x, x.sum(), False)
        x, _ = self.layers[0](x, x.sum(), False)
        x, _ = self.layers[1](x, x.sum(), False)
        x, total = self.layers[2](x, x.sum(), True)
        return (x * total).square().mean()


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, total: torch.Tensor, passes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.layer(x)), total if passes else total + 1


IMAGES, TABLE = torch.randn(8, 3, 16, 16), torch.randn(ROWS, WIDTH)


def plan(model: nn.Module, x: torch.Tensor, budget: str) -> planner.Plan:
    options = {"runtime": "regional", "time_limit_seconds": 1.0, "deterministic": True, "compare": False}
    return planner.plan(model, x, activation_budget=budget, **options)


@pytest.mark.parametrize(
    ("kind", "x", "budget"),
    [(Normed, IMAGES, "90%"), pytest.param(Shared, TABLE, "100%", marks=pytest.mark.slow), (Twice, TABLE, "100%")],
)
def test_bits_and_peak_are_exact(kind: type[nn.Module], x: torch.Tensor, budget: str) -> None:
    ran = wrap_and_hold(kind(), x, activation_budget=budget, runtime="regional", time_limit_seconds=1.0)
    assert (ran.recompute_seconds > 0) == (budget != "100%")


def test_blocks_that_do_not_fit_the_mould_stay_eager() -> None:
    found = plan(Twice(), TABLE, "100%").warnings
    left = {w.evidence: w.cause for w in found if w.rule == "block-left-eager"}
    assert left.keys() == {"block layers.0", "block layers.2"}
    assert "called 2 times" in left["block layers.0"]
    assert "returns" in left["block layers.2"]


class Nested(nn.ModuleDict):
    """Lists in a list, neither of which is called."""

    def __init__(self) -> None:
        lists = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
        super().__init__({"all": lists})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self["all"]:
            for layer in row:
                x = layer(x)
        return x


def blocks_of(model: nn.Module, x: torch.Tensor) -> list[str]:
    return list(Step(model, Inputs.of(x, None)).find_blocks())


def test_blocks_are_the_outermost_repeated_members() -> None:
    assert blocks_of(Normed(), IMAGES) == ["layers.0", "layers.1", "layers.2"]
    assert blocks_of(Nested(), torch.randn(2, 2)) == ["all.0.0", "all.0.1", "all.1.0", "all.1.1"]


def test_blocks_that_fill_a_cache_are_refused_with_the_way_out() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(64, (2, 8))
    with pytest.raises(UsageError, match=r"set model.config.use_cache = False .*, or take runtime='graph'"):
        planner.plan(model, {"input_ids": ids, "labels": ids}, budget="90%", runtime="regional")


def test_a_model_without_blocks_is_sent_elsewhere() -> None:
    with pytest.raises(UsageError, match=r"has no repeated blocks.*take runtime='graph'"):
        plan(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), TABLE, "100%")


def test_a_model_on_fake_tensors_gets_the_same_plan() -> None:
    with fake_mode():
        fake, x = Shared(), torch.randn(ROWS, WIDTH)
    assert plan(fake, x, "100%").fingerprint == plan(Shared(), TABLE, "100%").fingerprint


def test_a_plan_of_another_model_is_refused() -> None:
    made = plan(Normed(), IMAGES, "100%")
    with pytest.raises(PlanMismatchError, match="made for something else"):
        planner.auto_wrap(Shared(), TABLE, plan=made)
    with pytest.raises(UsageError, match="verify runs one process"):
        sharded = planner.plan(Shared(), TABLE, budget="100%", runtime="regional", data_parallel="fsdp2", ranks=2)
        planner.verify(Shared(), TABLE, sharded)


def test_a_block_has_its_own_forward_whenever_the_model_is_not_called() -> None:
    model = planner.auto_wrap(Normed(), IMAGES, activation_budget="100%", runtime="regional", time_limit_seconds=1.0)
    model(IMAGES).backward()
    model.eval()
    model(IMAGES).backward()  # planned anew: BatchNorm is another operation there
    assert all("forward" not in vars(module) for module in model.modules() if module is not model)


class Positions(nn.Module):
    """Blocks that are given a part of a buffer, as rotary positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4 * ROWS, WIDTH))
        self.layers = nn.ModuleList(Decoding() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.table[: len(x)])
        return x.square().mean()


def test_a_block_may_be_given_a_part_of_something_larger() -> None:
    wrap_and_hold(Positions(), TABLE, activation_budget="90%", runtime="regional")


class Alike(nn.Module):
    """A block whose forward depends on more than its tensors."""

    def __init__(self, scale: float = 1.0, power: int = 1) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.scale, self.power = scale, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.drop(self.layer(x)) * self.scale) ** self.power


def stacked(blocks: list[Alike]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"all": nn.Sequential(*blocks)})["all"], Mean())


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Return what is captured, when a plan is made and when it runs."""
    seen: list[fx.GraphModule] = []
    own = Backend.__call__

    def noting(backend: Backend, graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(graph_module)
        return own(backend, graph_module, example_inputs)

    monkeypatch.setattr(Backend, "__call__", noting)
    return seen


@pytest.mark.parametrize("depth", [2, 5])
def test_equal_blocks_are_captured_and_compiled_once(depth: int, compiled: list[fx.GraphModule]) -> None:
    wrap_and_hold(stacked([Alike() for _ in range(depth)]), TABLE, activation_budget="100%", runtime="regional")
    assert len(compiled) == 2


def test_blocks_that_differ_in_anything_that_they_use_have_code_of_their_own(compiled: list[fx.GraphModule]) -> None:
    blocks = [Alike(), Alike(scale=2.0), Alike(power=2), Alike(), Alike(), Alike(), Alike(), Alike()]
    blocks[4].drop.eval()
    blocks[5].layer.weight.requires_grad_(False)
    blocks[6].layer.register_forward_hook(lambda module, inputs, output: -output)
    wrap_and_hold(stacked(blocks), TABLE, activation_budget="100%", runtime="regional")
    assert len(compiled) == 2 * 6  # the first, the fourth and the last are equal


class ConvolutionsOutside(nn.Module):
    """A convolution before and after the blocks, whose weights autocast copies; the backward needs the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x).float().square().mean()


@pytest.mark.parametrize("runtime", ["regional", "parts"])
def test_copies_of_weights_that_autocast_makes_outside_of_blocks_are_counted(runtime: str) -> None:
    x = torch.randn(8, 32, 8, 8)
    wrap_and_hold_under_autocast(
        ConvolutionsOutside(), x, activation_budget="200%", runtime=runtime, cost_model="roofline"
    )
