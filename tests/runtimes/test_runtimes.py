"""One contract for every runtime: it keeps its prediction, its bits, and leaves no trace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner import runtimes
from planner.errors import UsageError
from tests.tiers import tiered

WIDTH = 64


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = nn.Linear(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.fall = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(self.dropout(F.gelu(self.rise(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(params=tiered(runtimes.names(), slow=["inductor"]))
def runtime(request: pytest.FixtureRequest) -> runtimes.Runtime:
    return runtimes.get(request.param)


def inputs(rows: int = 512) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def test_it_introduces_itself(runtime: runtimes.Runtime) -> None:
    assert runtime.summary
    assert 0.0 <= runtime.tolerance < 0.01
    assert isinstance(runtime.exact_peak, bool)


def test_a_name_nearby_is_suggested() -> None:
    with pytest.raises(UsageError, match="did you mean 'graph'"):
        planner.plan(Model(), inputs(), budget="90%", runtime="grpah")


@pytest.mark.parametrize(("budget", "dropout"), [("100%", 0.0), ("70%", 0.1)])
def test_real_steps_keep_the_prediction(runtime: runtimes.Runtime, budget: str, dropout: float) -> None:
    model = Model(dropout=dropout)
    plan = planner.plan(model, inputs(), activation_budget=budget, runtime=runtime.name, time_limit_seconds=1.0)
    proof = planner.verify(model, inputs(), plan, timed_steps=1)
    assert plan.peak_bytes <= plan.budget_bytes
    assert proof.peak_bytes <= plan.peak_bytes
    if runtime.exact_peak:
        assert proof.peak_bytes >= 0.999 * plan.peak_bytes  # sizes are rounded up to the allocator's alignment
    assert proof.agrees, proof.differences
    assert proof.exact or runtime.tolerance > 0


def test_a_wrapped_model_trains_and_leaves_no_trace(runtime: runtimes.Runtime) -> None:
    model = Model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = {name: type(module) for name, module in model.named_modules()}
    wrapped = planner.auto_wrap(model, inputs(), activation_budget="70%", runtime=runtime.name, time_limit_seconds=1.0)
    assert wrapped is model
    plan = planner.plan_of(model)
    model(inputs()).backward()
    model(inputs(256)).backward()  # another size
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model(inputs())
    planner.unwrap(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    again = planner.Plan.from_json(plan.to_json())
    assert again.runtime == plan.runtime
    planner.auto_wrap(model, inputs(), plan=again)
    assert planner.plan_of(model).recomputations == plan.recomputations
    model(inputs()).backward()


class Wide(Model):
    """Its output is large."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.wide = nn.Linear(WIDTH, 16 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.wide(x)


class Regression(Wide):
    """Its loss shrinks to one number, and the memory behind that does not."""

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(super().forward(x), wanted)


@pytest.mark.parametrize("name", tiered(["graph", "modules", "regional"], quick=["graph"]))
def test_a_loss_that_shrinks_counts_whole(name: str) -> None:
    model, example = Regression(), (inputs(), torch.randn(512, 16 * WIDTH))
    plan = planner.plan(model, example, budget="100%", runtime=name, compare=False)
    proof = planner.verify(model, example, plan, timed_steps=1)
    assert 0.999 * plan.peak_bytes <= proof.peak_bytes <= plan.peak_bytes


@pytest.mark.parametrize("name", tiered(["graph", "modules", "regional"], slow=["regional"]))
def test_a_loss_outside_that_shrinks_is_held_until_the_backward_ends(name: str) -> None:
    model, rows = Wide(), inputs()
    wanted = torch.randn(512, 16 * WIDTH)
    loss_fn = lambda given: F.mse_loss(given, wanted)  # noqa: E731
    plan = planner.plan(model, rows, budget="90%", loss_fn=loss_fn, runtime=name, compare=False)
    proof = planner.verify(model, rows, plan, loss_fn=loss_fn, timed_steps=1)
    assert proof.agrees
    assert 0.999 * plan.peak_bytes <= proof.peak_bytes <= plan.peak_bytes
