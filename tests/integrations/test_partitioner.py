"""``planner.knapsack``: torch's own partitioner, with a budget in bytes."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, greedy_knapsack
from torch._functorch.partitioners import estimate_runtime

import planner
from planner.errors import InfeasibleBudgetError, UsageError
from planner.integrations.partitioner_internals import Knapsack, Step
from planner.zoo.modules import MiniGPT
from tests.runtimes import steps
from tests.runtimes.steps import assert_same, train
from tests.tiers import tiered

TOKENS = torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(1))
BACKEND = "aot_eager_decomp_partition"


class AtManyBudgets(Knapsack):
    """Asks for a choice at each of many budgets, and for what torch's own solvers choose at each of many ratios."""

    def __call__(self, memory: Any, joint_graph: Any, max_memory: Any, node_info: Any, candidates: Any) -> Any:
        step = Step(joint_graph, node_info, candidates, 0)
        seconds = [estimate_runtime(node) for node in candidates]
        ratios = (0.6, 0.4, 0.3, 0.2, 0.1, 0.05)
        chosen = [solve(memory, seconds, ratio)[2] for solve in (dp_knapsack, greedy_knapsack) for ratio in ratios]
        self.of_torch = [step.judge(frozenset(positions)) for positions in chosen]
        with pytest.raises(InfeasibleBudgetError) as error:
            step.cheapest(1, memory)
        lowest_bytes = error.value.minimum_feasible_peak_bytes
        most_bytes = max(choice.peak_bytes for choice in self.of_torch)
        self.budgets = range(lowest_bytes, most_bytes, (most_bytes - lowest_bytes) // 8)
        self.choices = [step.cheapest(budget_bytes, memory) for budget_bytes in self.budgets]
        self.beside = [step.cheapest(choice.peak_bytes, memory) for choice in self.of_torch]
        return list(range(len(memory))), []


class Llama(nn.Module):
    """Layers like those of PyTorch's issue 197838, at whose smallest ratio the peak is four times that at a larger."""

    def __init__(self, layers: int, width: int = 256) -> None:
        super().__init__()
        parts = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 5 * width),
            "down": (5 * width // 2, width),
        }
        linear = {name: nn.Linear(*sizes, bias=False) for name, sizes in parts.items()}
        self.layers = nn.ModuleList(nn.ModuleDict(copy.deepcopy(linear)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer["qkv"](F.rms_norm(x, x.shape[-1:])).unflatten(-1, (12, -1)).transpose(1, 2).chunk(3, 1)
            x = x + layer["out"](F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
            gate, up = layer["up"](F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * up)
        return x.square().mean()


def compiled(solver: Any, *, ratio: float = 1e-6, layers: int = 1, dropout: float = 0.1) -> tuple[nn.Module, Any]:
    """Return a model, and the same compiled by a first step."""
    torch.manual_seed(0)
    model = MiniGPT(layers=layers, width=32, heads=2, hidden=128, vocabulary=64, positions=64, dropout=dropout)
    return model, compiled_step(model, (TOKENS, TOKENS), solver, ratio)


def compiled_step(model: nn.Module, inputs: tuple[torch.Tensor, ...], solver: Any, ratio: float = 1e-6) -> Any:
    torch.compiler.reset()
    run = torch.compile(model, backend=BACKEND, dynamic=False)
    with config.patch(activation_memory_budget=ratio, activation_memory_budget_solver=solver):
        run(*inputs).backward()
    return run


def measured_bytes(model: nn.Module, run: Any, inputs: tuple[torch.Tensor, ...] = (TOKENS, TOKENS)) -> int:
    resident = (*model.parameters(), inputs[0])
    return steps.measured_bytes(run, inputs) + sum(tensor.nbytes for tensor in resident)


def test_a_larger_budget_never_costs_more_and_torch_is_not_better() -> None:
    solver = AtManyBudgets(1, 0)
    compiled(solver, layers=2, dropout=0.0)
    assert len({choice.recomputed for choice in solver.choices}) >= 3
    for tighter, wider in pairwise(solver.choices):
        assert wider.recompute_seconds <= tighter.recompute_seconds
    assert all(choice.peak_bytes <= budget for choice, budget in zip(solver.choices, solver.budgets, strict=True))
    saved = [t.recompute_seconds - o.recompute_seconds for o, t in zip(solver.beside, solver.of_torch, strict=True)]
    assert min(saved) >= 0.0 and max(saved) > 0.05 * solver.choices[0].recompute_seconds
    assert solver.choices[0].peak_bytes < min(torchs.peak_bytes for torchs in solver.of_torch)


def test_the_measured_peak_is_within_the_budget() -> None:
    of_torch_bytes = measured_bytes(*compiled("dp", ratio=0.05))
    expected = train(compiled("dp", ratio=1.0)[1], (TOKENS, TOKENS))  # the numbers that dropout draws are not eager's
    with pytest.raises(BackendCompilerFailed, match="lowest known peak is") as error:
        compiled(planner.knapsack(1))
    assert isinstance(error.value.inner_exception, InfeasibleBudgetError)
    lowest_bytes = error.value.inner_exception.minimum_feasible_peak_bytes
    for share in (0.0, 1.0):
        reserve_bytes = 1000
        budget_bytes = int(lowest_bytes + share * (of_torch_bytes - lowest_bytes)) + reserve_bytes
        solver = planner.knapsack(budget_bytes, reserve=reserve_bytes)
        model, run = compiled(solver)
        predicted_bytes = solver.choices[0].peak_bytes
        assert 0.99 * predicted_bytes <= measured_bytes(model, run) + reserve_bytes <= predicted_bytes <= budget_bytes
        assert_same(expected, train(run, (TOKENS, TOKENS)), tolerance=1e-4)


@pytest.mark.parametrize("layers", tiered([4, 32]))
def test_peaks_follow_a_budget_in_bytes_where_they_do_not_follow_a_ratio(layers: int) -> None:
    torch.manual_seed(0)
    model, inputs = Llama(layers), (torch.randn(4, 256, 256),)

    def peak_bytes(solver: Any, ratio: float = 1e-6) -> int:
        return measured_bytes(model, compiled_step(model, inputs, solver, ratio), inputs)

    of_ratios = [peak_bytes("dp", ratio) for ratio in (0.3, 0.15, 0.05, 0.02)]
    budgets = [int(share * min(of_ratios)) for share in (1.0, 0.85, 0.7)]
    of_budgets = [peak_bytes(planner.knapsack(budget_bytes)) for budget_bytes in budgets]
    assert of_budgets == sorted(of_budgets, reverse=True)
    assert all(peak <= budget for peak, budget in zip(of_budgets, budgets, strict=True))


def test_sizes_that_are_symbols_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    run = torch.compile(model, backend=BACKEND, dynamic=True)
    settings = {"activation_memory_budget": 1e-6, "activation_memory_budget_solver": planner.knapsack("1GiB")}
    with config.patch(settings), pytest.raises(BackendCompilerFailed, match="pass dynamic=False") as error:
        run(torch.randn(512, 8)).sum().backward()
    assert isinstance(error.value.inner_exception, UsageError)
