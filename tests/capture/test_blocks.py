"""One meaning of "block": captured, recorded and followed steps and FSDP2 see the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner import zoo
from planner.capture.blocks.regions import Step
from planner.capture.fake_internals import fake_mode
from planner.capture.inputs import Inputs
from planner.common.options import grouped
from planner.ir.layers import find_layers
from planner.zoo.modules import MiniGPT
from tests.models import WIDTH, Layers, linear
from tests.tiers import tiered


class Perceptron(Layers, up=linear(WIDTH, 2 * WIDTH), down=linear(2 * WIDTH, WIDTH)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Gated(Perceptron):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return x + self.down(up * torch.sigmoid(up))


class Rows(nn.Module):
    """Calls whatever it holds one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            for one in block if isinstance(block, nn.ModuleList) else [block]:
                x = one(x)
        return x


class Parts(Layers, layer=lambda: nn.ModuleList([Perceptron(), Gated()])):
    """Computes nothing itself, and numbers its two parts as T5 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.layer[1](self.layer[0](x))
        return gated


def table() -> torch.Tensor:
    return torch.randn(8, WIDTH)


@dataclass(frozen=True)
class Case:
    build: Callable[[], tuple[nn.Module, dict[str, Any] | torch.Tensor]]
    blocks: list[str]


def mini_gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = MiniGPT(layers=2, width=WIDTH, heads=2, hidden=2 * WIDTH, vocabulary=50, positions=16)
    ids, labels = torch.randint(50, (2, 2, 16))
    return model, {"input_ids": ids, "labels": labels}


def of_the_zoo(name: str, **sizes: int) -> tuple[nn.Module, dict[str, Any]]:
    pytest.importorskip("transformers")
    built = zoo.build(name, batch_size=1, fake_mode=fake_mode(), **sizes)
    return built.model, built.example_kwargs


CASES = {
    "MiniGPT": Case(mini_gpt, [f"blocks.{i}" for i in range(2)]),
    "GPT-2": Case(lambda: of_the_zoo("gpt2", layers=3, seq_len=16), [f"transformer.h.{i}" for i in range(3)]),
    "ResNet-50": Case(
        lambda: of_the_zoo("resnet50", image_size=64, layers=2),
        [f"resnet.encoder.stages.{stage}.layers.{layer}" for stage in range(4) for layer in range(2)],
    ),
    "T5": Case(
        lambda: of_the_zoo("t5-base", layers=2, seq_len=16),
        [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)],
    ),
    "a row of equal blocks": Case(
        lambda: (nn.Sequential(*(Perceptron() for _ in range(4))), table()), ["0", "1", "2", "3"]
    ),
    "blocks of two types in turn": Case(
        lambda: (Rows(Perceptron(), Gated(), Perceptron(), Gated()), table()), [f"blocks.{i}" for i in range(4)]
    ),
    "blocks between a stem and a head": Case(
        lambda: (nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), Perceptron(), Perceptron(), Parts()), table()),
        ["1", "2"],
    ),
    "blocks of unlike parts": Case(lambda: (Rows(Parts(), Parts()), table()), ["blocks.0", "blocks.1"]),
    "linear layers": Case(
        lambda: (Rows(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), table()), [f"blocks.{i}" for i in range(3)]
    ),
    "lists of linear layers": Case(
        lambda: (Rows(*(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))), table()),
        ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"],
    ),
    "none": Case(lambda: (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), table()), []),
}


def gathered_bytes(model: nn.Module, blocks: list[str]) -> int:
    """Give what FSDP2 holds at most beside its shards: all outside of blocks, and two blocks, with their gradients."""
    of_blocks = [sum(p.numel() * 4 for p in model.get_submodule(block).parameters()) for block in blocks]
    largest = max(of_blocks)
    root = sum(p.numel() * 4 for p in model.parameters()) - sum(of_blocks)
    return root + 2 * largest + 2 * max(root, largest)


@pytest.mark.parametrize(
    ("name", "runtime"), [("blocks of two types in turn", "graph"), ("blocks of unlike parts", "modules")]
)
def test_fsdp2_shards_these_blocks(name: str, runtime: str) -> None:
    model, x = CASES[name].build()
    step = planner.study(model, x, runtime=runtime, training=planner.Training(data_parallel="fsdp2", ranks=2))
    assert step.static_memory.static_bytes["communication buffers"] == gathered_bytes(model, CASES[name].blocks)


@pytest.mark.parametrize("name", tiered(CASES, slow=["GPT-2", "ResNet-50", "T5"]))  # toys have blocks like these
def test_all_agree_on_what_the_blocks_are(name: str) -> None:
    model, given = CASES[name].build()
    args, kwargs = ((), given) if isinstance(given, dict) else ((given,), {})
    found: dict[str, list[str]] = {}
    for runtime in ("graph", "modules"):
        options = grouped(runtime=runtime, cost_model="roofline")
        study = planner.study(model, planner.Inputs.of(*args, kwargs), **options)
        found[runtime] = list(find_layers(study.graph).blocks)
    found["regional"] = list(Step(model, Inputs(args, kwargs)).find_blocks())
    assert found == dict.fromkeys(found, CASES[name].blocks)
