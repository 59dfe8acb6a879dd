"""Every byte around the step: optimizer, other ranks, reserve, and the optimizer's own peak."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cost_models
import planner
from planner.common.options import Training, grouped
from planner.errors import InfeasibleBudgetError, UsageError
from planner.measure.optimizers import optimizer_memory
from planner.measure.resident import static_memory
from tests.models import Trained

WIDTH, BLOCKS, BATCH = 64, 6, 512


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = functional.gelu(block(x))
        return x.float().square().sum()


BLOCK_BYTES = 4 * WIDTH * WIDTH
START_BYTES = 4 * WIDTH * WIDTH + 512  # the bias is rounded up
WHOLE_BYTES = START_BYTES + BLOCKS * BLOCK_BYTES


def around(training: Training, device: str = "a100-80", dtype: torch.dtype = torch.float32) -> Any:
    paths = [f"blocks.{number}" for number in range(BLOCKS)]
    inputs = [torch.zeros(BATCH, WIDTH)]
    return static_memory(Net(dtype), inputs, cost_models.device(device), training, lambda: paths)


def test_what_is_there_without_an_optimizer() -> None:
    found = around(Training())
    assert found.static_bytes == {
        "parameters": WHOLE_BYTES,
        "buffers": 0,
        "inputs": 4 * BATCH * WIDTH,
        "library workspace": 2 * (2 * 4096 + 128) * 1024,
    }
    assert found.optimizer_step_bytes == 0 and found.has_caching_allocator
    assert sum(found.resident_bytes) == sum(found.static_bytes.values())
    assert found.library_bytes == (8320 * 1024, 8320 * 1024)  # for the forward's thread and the backward's


def test_mixed_precision_with_master_weights() -> None:
    found = around(Training("adamw", master_weights=True, gradient_accumulation=True), dtype=torch.bfloat16)
    half = BLOCKS * BLOCK_BYTES // 2 + BLOCK_BYTES // 2 + 512
    assert found.static_bytes["parameters"] == found.static_bytes["gradients"] == half
    assert found.static_bytes["master weights"] == WHOLE_BYTES
    assert found.static_bytes["optimizer"] == 2 * WHOLE_BYTES
    assert found.optimizer_step_bytes == 2 * WHOLE_BYTES  # float32 gradients, and the root of the second moments


def test_ddp_holds_every_gradient_twice() -> None:
    found = around(Training(data_parallel="ddp", ranks=2, gradient_accumulation=True))
    assert found.static_bytes["communication buffers"] == found.static_bytes["gradients"] == WHOLE_BYTES
    assert found.static_bytes["parameters"] == WHOLE_BYTES and found.gradient_shards == 1


def test_fsdp2_shards_and_gathers() -> None:
    ranks = 4
    found = around(Training(data_parallel="fsdp2", ranks=ranks, optimizer="adamw"))
    assert found.static_bytes["parameters"] == math.ceil(WHOLE_BYTES / ranks)
    assert found.static_bytes["optimizer"] == math.ceil(2 * WHOLE_BYTES / ranks)
    assert found.static_bytes["communication buffers"] == START_BYTES + 2 * BLOCK_BYTES + 2 * START_BYTES
    assert found.gradient_shards == ranks


def test_fsdp2_spreads_gradients() -> None:
    x = torch.randn(BATCH, WIDTH)
    asked = {"activation_budget": "100%", "device": "a100-80", "compare": False}
    alone = planner.plan(Net(), x, **grouped(**asked))
    shared = planner.plan(Net(), x, **grouped(data_parallel="fsdp2", ranks=8, **asked))
    left = [plan.optimizer_peak_bytes - plan.total_static_bytes for plan in (alone, shared)]  # gradients, and the loss
    assert left == [WHOLE_BYTES + 512, (BLOCKS + 1) * BLOCK_BYTES // 8 + 512 + 512]


@pytest.mark.parametrize(("reserve", "size_bytes"), [("1GiB", 2**30), (12345, 12345), ("10%", None)])
def test_a_reserve_is_stated(reserve: Any, size_bytes: int | None) -> None:
    device = cost_models.device("a100-80")
    expected = int(device.memory_bytes * 0.1) if size_bytes is None else size_bytes
    assert around(Training(reserve=reserve)).static_bytes["reserve"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamww"}, "did you mean adamw"),
        ({"data_parallel": "fsdp", "ranks": 2}, "unknown data_parallel 'fsdp'"),
        ({"data_parallel": "ddp"}, "give both"),
        ({"ranks": 2}, "give both"),
        ({"ranks": 0}, "give both"),
        ({"reserve": "lots"}, "cannot read size"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Training(**options)
    with pytest.raises(UsageError, match=message):
        planner.plan(Net(), torch.randn(BATCH, WIDTH), **grouped(budget="100%", **options))


def wide() -> Trained:
    """Return few activations and many parameters: the optimizer's step is the larger peak."""
    return Trained(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)))


def test_the_optimizers_step_can_be_the_larger_peak() -> None:
    model, x = wide(), torch.randn(64, 512)
    step = planner.study(model, x, training="adamw", target="a100-80")
    free = step.plan(budget="1GiB")
    memory = optimizer_memory(model.parameters(), "adamw", alignment_bytes=512, device_kind="cuda")
    parameters = free.static_bytes["parameters"]
    assert free.optimizer_step_bytes == memory.step_bytes == parameters
    # Parameters, gradients, two moments and one temporary for each; inputs, cuBLAS, and the loss that is still there.
    beside = free.static_bytes["inputs"] + free.static_bytes["library workspace"] + 512
    assert free.optimizer_peak_bytes == 5 * parameters + beside
    assert free.whole_step_peak_bytes == free.optimizer_peak_bytes > free.peak_bytes
    assert planner.Plan.from_json(free.to_json()) == free

    with pytest.raises(InfeasibleBudgetError, match="bound by the optimizer's step") as caught:
        step.plan(budget=free.optimizer_peak_bytes - 1)
    assert caught.value.minimum_feasible_peak_bytes == free.optimizer_peak_bytes and caught.value.is_proven
    smallest = step.plan(budget=free.optimizer_peak_bytes)
    assert smallest.whole_step_peak_bytes <= smallest.budget_bytes


def test_a_plan_whose_optimizer_peaks_higher_is_verified_and_not_taken_below_that_peak() -> None:
    model, x = wide(), torch.randn(64, 512)
    plan = planner.plan(model, x, budget="1GiB", training="adamw")
    high = dataclasses.replace(plan, optimizer_step_bytes=2**24, optimizer_peak_bytes=plan.peak_bytes + 2**24)
    assert planner.verify(model, x, high, timed_steps=1).exact
    with pytest.raises(InfeasibleBudgetError, match="the optimizer's step"):
        planner.auto_wrap(model, x, budget=planner.Budget(plan.peak_bytes + 64, plan=high, replan=True))


def test_measured_against_a_whole_training_step() -> None:
    """Peak of backward and of the optimizer's step, counted from the allocations of a real loop."""
    from planner.capture.memory import measure_peak

    model, x = wide(), torch.randn(64, 512)
    plan = planner.plan(model, x, budget="1GiB", training="adamw")
    optimizer = torch.optim.AdamW(model.parameters())
    planner.auto_wrap(model, budget=plan)

    def step() -> None:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    peak_bytes, _ = measure_peak(step, torch.device("cpu"))
    planner.unwrap(model)
    resident = sum(plan.static_bytes.values())
    assert resident + peak_bytes == pytest.approx(plan.whole_step_peak_bytes, abs=64 * 64)


def test_autocasts_weight_copies_are_named() -> None:
    class Cast(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    plan = planner.plan(Cast(), torch.randn(BATCH, WIDTH), budget="100%")
    assert plan.anatomy["autocast weight copies"] >= BLOCK_BYTES // 2
    assert sum(plan.anatomy.values()) == plan.peak_bytes
