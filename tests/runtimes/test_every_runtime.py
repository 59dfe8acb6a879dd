"""What `auto_wrap` promises of varying sizes, of every runtime alike; a new runtime is held to it by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import planner
from planner import runtimes
from planner.capture.memory import measure_peak
from planner.common.options import chunks_of
from planner.common.units import parse_size
from tests.tiers import tiered

WIDTH = 32
SIZES = (256, 1024, 512, 1024, 16)
LARGEST = max(SIZES)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(nn.functional.gelu(self.rise(x)))


class Model(nn.Module):
    """Repeated blocks, so that every runtime can plan it; with its loss inside or without."""

    def __init__(self, *, has_loss: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.has_loss = has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return mean_square(x) if self.has_loss else x


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


# Inductor calls a C++ compiler.
@pytest.fixture(params=tiered(runtimes.names(), slow=["inductor"]))
def runtime(request: pytest.FixtureRequest) -> runtimes.Runtime:
    return runtimes.get(request.param)


def train(model: Model, x: torch.Tensor) -> None:
    y = model(x)
    (y if model.has_loss else mean_square(y)).backward()


def step(model: Model, count: int, tolerance: float) -> planner.Plan:
    """Train one step within its budget and with the gradients of the model unwrapped; give the plan that ran."""
    plain = copy.deepcopy(model)
    for one in (model, plain):
        one.zero_grad()
    train(plain, x := rows(count))
    train(model, x)  # captures or records what is new
    model.zero_grad()
    peak_bytes, _ = measure_peak(lambda: train(model, x), torch.device("cpu"))
    plan = planner.plan_of(model)
    assert peak_bytes + plan.total_static_bytes <= plan.peak_bytes <= plan.budget_bytes
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert torch.equal(ours.grad, theirs.grad) or 0 < error <= tolerance, name
    return plan


@pytest.mark.parametrize(
    ("has_loss", "budget"), [(True, "budget"), (False, "activation_budget")], ids=["loss inside", "loss outside"]
)
def test_a_percentage_is_of_the_largest_step_so_far(runtime: runtimes.Runtime, has_loss: bool, budget: str) -> None:
    model = planner.auto_wrap(
        Model(has_loss=has_loss),
        **{budget: "80%"},  # type: ignore[arg-type]
        loss_fn=None if has_loss else mean_square,
        runtime=runtime.name,
        time_limit_seconds=1.0,
    )
    plans = [step(model, count, runtime.tolerance) for count in SIZES]
    budgets = [plan.budget_bytes for plan in plans]
    assert budgets[0] < budgets[1]
    assert budgets[:2] == [share_of(plan, budget) for plan in plans[:2]]
    assert budgets[1:] == budgets[1:2] * (len(SIZES) - 1)
    assert plans[1].overhead > 0 and plans[2].overhead == plans[4].overhead == 0
    assert plans[3] == plans[1]


def share_of(plan: planner.Plan, budget: str) -> int:
    """Return what the percentage comes to of the step that this plan is of."""
    if budget == "budget":
        return parse_size("80%", whole_bytes=plan.baseline_peak_bytes)
    return plan.total_static_bytes + parse_size("80%", whole_bytes=plan.baseline_peak_bytes - plan.total_static_bytes)


def test_an_example_counts_as_a_step(runtime: runtimes.Runtime) -> None:
    options = {"activation_budget": "80%", "runtime": runtime.name, "time_limit_seconds": 1.0}
    model = planner.auto_wrap(Model(), rows(LARGEST), **options)  # type: ignore[arg-type]
    largest = planner.plan_of(model).budget_bytes
    assert step(model, 256, runtime.tolerance).budget_bytes == largest


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_a_wrapped_model_runs_the_plan(runtime: runtimes.Runtime, fullgraph: bool) -> None:
    torch.compiler.reset()  # what another test compiled is not compiled again
    model = planner.auto_wrap(Model(), activation_budget="80%", runtime=runtime.name, time_limit_seconds=1.0)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    if runtime.name == "modules" and fullgraph:
        with pytest.raises(RuntimeError, match="no compiled frames"):  # it runs the model itself: torch says so
            compiled(rows(LARGEST))
        return
    compiled(rows(LARGEST)).backward()
    assert planner.plan_of(model).recomputations


class Wide(nn.Module):
    """Perceptrons far wider than what goes between them, which chunks are for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 600), nn.GELU(), nn.Linear(600, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return mean_square(x)


def test_a_percentage_stays_one_of_the_step_in_one_piece() -> None:
    model = planner.auto_wrap(Wide(), budget="80%", chunk=4, time_limit_seconds=1.0)
    budgets = []
    for count in SIZES[:3]:
        model(rows(count)).backward()
        plan = planner.plan_of(model)
        budgets.append(plan.budget_bytes)
        assert chunks_of(plan.fingerprint) == 4
    whole = [planner.study(Wide(), rows(count)).problem("80%") for count in SIZES[:2]]
    expected = [problem.budget_bytes + problem.graph.total_static_bytes for problem in whole]
    assert budgets == [*expected, expected[1]]
