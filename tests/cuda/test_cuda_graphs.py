"""Steps as CUDA graphs: what is launched, drawn, allocated and held. ``tests/runtimes/`` has their bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from benchmarks.blocks import built, step
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError
from planner.runtimes._cuda_graphs import GraphedStep
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()

OPTIONS: dict[str, Any] = {"runtime": "graph", "time_limit_seconds": 1, "cost_model": "roofline"}
SIZE = 64


class Block(nn.Module):
    """Norm, products, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(SIZE), nn.Dropout(0.1)
        self.into, self.out = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.drop(nn.functional.gelu(self.into(self.norm(x)))))


class Net(nn.Module):
    """Blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def inputs() -> torch.Tensor:
    return torch.randn(512, SIZE, device="cuda")


def wrapped(model: nn.Module, x: Any = None, **asked: Any) -> nn.Module:
    """Wrap a model for the least that it is known to need."""
    try:
        return planner.auto_wrap(model, x, **grouped(budget=1, **OPTIONS, **asked))
    except InfeasibleBudgetError as refusal:
        return planner.auto_wrap(model, x, **grouped(budget=refusal.minimum_feasible_peak_bytes, **OPTIONS, **asked))


def graphed(model: nn.Module) -> GraphedStep:
    running: Any = planner.api.running_on(model)
    found = running._cuda_graphs._in_use
    assert isinstance(found, GraphedStep)
    return found


def pools() -> int:
    """Count the memory that graphs hold."""
    snapshot = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in snapshot if tuple(segment["segment_pool_id"]) != (0, 0))


def counted(call: Callable[[], Any]) -> gpu.Calls:
    before, _, after = gpu.calls(), call(), gpu.calls()
    return gpu.Calls(*(b - a for a, b in zip(vars(before).values(), vars(after).values(), strict=True)))


def train(model: nn.Module) -> None:
    model(inputs()).backward()
    model.zero_grad()


@gpu.only_fake
def test_a_step_is_two_launches_and_copies() -> None:
    model = wrapped(Net().cuda(), inputs(), cuda_graphs=True)
    as_ever = counted(lambda: train(model))
    train(model)
    launched = counted(lambda: train(model))
    # Two graphs, seed and offset of each generator, outputs and gradients by type, and the batch that is made.
    again = sum("dropout" in key for keys in planner.plan_of(model).recomputations.values() for key in keys)
    assert launched.launches <= 2 + 2 * (1 + again) + 6 < as_ever.launches / 3
    assert launched.synchronisations == 0
    assert launched.segments == 0


@gpu.only_fake
def test_random_operations_draw_where_they_do_in_eager() -> None:
    generator = torch.cuda.default_generators[0]
    model = wrapped(Net().cuda(), inputs(), cuda_graphs=True)
    moved = []
    for _ in range(4):
        x, before = inputs(), generator.get_offset()
        loss = model(x)
        between = generator.get_offset()
        loss.backward()
        moved.append((between - before, generator.get_offset() - between))
        model.zero_grad()
    assert len(set(moved)) == 1
    recorded = graphed(model)._recorded
    assert recorded is not None and recorded.backward is not None
    again = [own.get_offset() - before for _, own in recorded.backward.states]
    each = moved[0][0] // 6
    assert again and sorted(again) == sorted(offset + each for offset in graphed(model)._offsets)[: len(again)]


@pytest.mark.skipif(gpu.FAKE, reason="numbers of stand-ins mean nothing")
def test_bits_are_those_without_graphs() -> None:
    torch.manual_seed(0)
    models = [Net().cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    wrapped(models[0], inputs(), cuda_graphs=True)
    planner.auto_wrap(models[1], budget=planner.plan_of(models[0]))
    for seed in range(5):
        for model in models:
            torch.manual_seed(seed)
            model(inputs()).backward()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


MODELS = ["minimind-26m", "bert-large", "resnet50", "vit-b16", "t5-base", "gpt2", "unet"]


@pytest.mark.parametrize("budget", ["100%", "least"])
@pytest.mark.parametrize("name", tiered(MODELS, quick=["minimind-26m", "resnet50"]))
def test_memory_is_what_the_plan_says(name: str, budget: str) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before, others = torch.cuda.memory_reserved(), pools()
    model, example = built(name, layers=2)
    if budget == "least":
        wrapped(model, example_kwargs=example, cuda_graphs=True)
    else:
        planner.auto_wrap(model, example, **grouped(budget="60GiB", cuda_graphs=True, **OPTIONS))
    plan = planner.plan_of(model)
    assert plan is not None and plan.reserved is not None
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step(model, example)
    is_recorded, held = graphed(model)._recorded is not None, pools()
    planner.unwrap(model)
    assert is_recorded
    assert held - others == pytest.approx(plan.reserved.graph_pool_bytes, rel=0.01)
    # What other tests left may have room for some of it.
    assert torch.cuda.max_memory_reserved() - before <= 1.01 * plan.reserved.reserved_bytes
    assert torch.cuda.max_memory_allocated() - before <= plan.reserved.allocated_bytes <= plan.budget_bytes


def test_memory_goes_with_the_wrapping() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = pools()
    model = wrapped(Net().cuda(), inputs(), cuda_graphs=True)
    for _ in range(3):
        train(model)
    assert pools() > before + (64 << 20)
    planner.unwrap(model)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert pools() <= before
