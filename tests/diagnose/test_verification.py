"""Steps with a plan beside steps without it, where kernels give other bits in every run."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import planner
from planner.capture.state_restore import RandomStates
from planner.diagnose import verification
from planner.errors import UsageError
from tests.models import Layers, OneLinear, Trained, linear

_run = itertools.count()


def test_a_loss_of_zero_is_infinitely_far_from_any_other() -> None:
    zero, one = (verification.StepResult((torch.tensor(x),), {}, {}, RandomStates()) for x in (0.0, 1.0))
    assert verification.distance(zero, one) == math.inf
    assert verification.distance(zero, zero) == 0.0


@torch.library.custom_op("tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Copy, but for noise that is another one in every run."""
    return x * (1.0 + 1e-6 * (next(_run) % 7))


noisy.register_fake(torch.empty_like)


noisy.register_autograd(lambda ctx, gradient: gradient)


class Noisy(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(noisy(self.linear(x))).square().sum()


def test_a_plan_is_held_to_what_two_steps_without_it_differ_by(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Noisy(16), torch.randn(64, 16)
    plan = planner.plan(model, x, budget="100%", search=planner.Search(compare=False))
    demanded = planner.verify(model, x, plan, timed_steps=1)
    assert demanded.control is None and not demanded.agrees
    monkeypatch.setattr(verification, "bits_may_differ", lambda device: True)
    held = planner.verify(model, x, plan, timed_steps=1)
    assert held.control > 0 and held.agrees and not held.exact
    assert held.tolerance == verification.NOISE * held.control
    monkeypatch.setattr(verification, "NOISE", 1e-3)
    assert not planner.verify(model, x, plan, timed_steps=1).agrees


@pytest.mark.parametrize("strict", [False, True])
def test_bits_are_demanded_where_torch_is_told_to_be_deterministic(strict: bool) -> None:
    torch.use_deterministic_algorithms(strict)
    try:
        assert verification.bits_may_differ(torch.device("cuda")) is not strict
        assert not verification.bits_may_differ(torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_wrapped_model_is_verified_and_stays_wrapped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    plan = planner.plan(model, x, budget="100%", loss_fn=torch.sum)
    planner.auto_wrap(model, budget="1GiB", loss_fn=torch.sum)
    model(x).sum().backward()
    in_force = planner.plan_of(model)
    assert planner.verify(model, x, plan, loss_fn=torch.sum).exact
    assert planner.plan_of(model) is in_force
    with pytest.raises(planner.UsageError, match="at least one step"):
        planner.verify(model, x, plan, loss_fn=torch.sum, timed_steps=0)


def test_inside_a_profiler_a_step_cannot_be_measured() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(64, 16)
    plan = planner.plan(model, x, budget="100%", search=planner.Search(compare=False))
    with torch.profiler.profile(), pytest.raises(UsageError, match="one is on already"):
        planner.verify(model, x, plan, timed_steps=1)
    assert planner.verify(model, x, plan, timed_steps=1).agrees


class Following(Layers, mix=linear(16, 16), after=lambda: nn.Linear(16, 16).requires_grad_(False)):
    """Draws a frozen copy after its weights in each step, and writes into what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.after.weight.lerp_(self.mix.weight, 0.5)
        x.mul_(0.5)
        return torch.tanh(self.after(self.mix(x))).square().sum()


def test_steps_that_write_into_weights_and_inputs_all_begin_with_the_same() -> None:
    model, x = Following(), torch.randn(64, 16)
    before = [tensor.clone() for tensor in (*model.parameters(), x)]
    plan = planner.plan(model, x, budget="100%", search=planner.Search(compare=False))
    assert planner.verify(model, x, plan, timed_steps=1).exact
    assert all(torch.equal(now, then) for now, then in zip((*model.parameters(), x), before, strict=True))


@pytest.mark.filterwarnings("ignore:runtime 'modules' instead of 'graph'", "ignore:data decide what Trained runs")
def test_sparse_gradients_are_compared_too() -> None:
    layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))
    model, words = Trained(nn.EmbeddingBag(200, 32, sparse=True), *layers), torch.randint(0, 200, (16, 5))
    plan = planner.plan(model, words, budget="100%", search=planner.Search(compare=False))
    proof = planner.verify(model, words, plan, timed_steps=1)
    assert proof.gradients_bitwise_equal
    assert 0 <= plan.peak_bytes - proof.peak_bytes < 256
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 32), (200, 32))
    off = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 32) * 1.5, (200, 32))
    assert not verification.bitwise_equal(gradient, off)
    assert not verification.bitwise_equal(gradient, gradient.to_dense())
    first, second = (
        verification.StepResult(loss=(), gradients={"bag": each}, buffers={}, random_states=[])
        for each in (gradient, off)
    )
    assert verification.compare(first, second) == ["gradient of bag differs by up to 0.5"]
    assert verification.distance(first, second) == pytest.approx(0.5)
