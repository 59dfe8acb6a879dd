"""Steps taken for real, and held to the model unwrapped and to what their plan predicts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import planner
from planner.capture.inputs import LossFunction
from planner.capture.memory import Recording, measure_peak, record
from planner.common.options import grouped
from planner.diagnose.verification import bitwise_equal
from planner.plans.plan import Plan, Verification
from planner.rewrite import host_copies
from tests.models import Layers

Left = dict[str, torch.Tensor | None]
"""What a step leaves behind."""


def step(model: nn.Module, x: Any, loss_fn: LossFunction | None = None, seed: int = 7) -> torch.Tensor:
    """Train one step, with the same random numbers every time, and give its loss."""
    torch.manual_seed(seed)
    output = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    loss: torch.Tensor = loss_fn(output) if loss_fn else output
    loss.backward()
    return loss.detach()


def train(model: nn.Module, x: Any, loss_fn: LossFunction | None = None, seed: int = 7) -> Left:
    """Train one step from no gradients, and give all that it leaves behind."""
    model.zero_grad()
    left: Left = {"loss": step(model, x, loss_fn, seed), "random state": torch.get_rng_state()}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    left |= {name: None if g is None else g.to_dense() if g.is_sparse else g.clone() for name, g in gradients.items()}
    return left | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(expected: Left, found: Left, tolerance: float = 0.0) -> None:
    """Compare every bit, or, with a tolerance, lengths of differences to those of what is expected."""
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        other = found[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None and not bitwise_equal(value, other):
            off = float((value.double() - other.double()).norm() / value.double().norm())
            assert tolerance and off <= tolerance, f"{name} is off by {off}"


def assert_gradients(plain: nn.Module, wrapped: nn.Module) -> None:
    """Compare every bit of the gradients that two models hold."""
    assert_same(*({name: p.grad for name, p in model.named_parameters()} for model in (plain, wrapped)))


def beside(model: nn.Module, *example: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model without a plan, and the same wrapped."""
    plain = copy.deepcopy(model)
    planner.auto_wrap(model, *example, **grouped(**options))
    return plain, model


def wrap_and_hold(
    model: nn.Module, x: Any, *, loss_fn: LossFunction | None = None, rounded: bool = False, **options: Any
) -> Plan:
    """Wrap a model, and hold a step of it to the model unwrapped, bit for bit, and to its plan, byte for byte.

    For ``rounded`` see :func:`hold_peak`.
    """
    plain = copy.deepcopy(model)
    if loss_fn is not None and "plan" not in options:
        options["loss_fn"] = loss_fn
    planner.auto_wrap(model, **grouped(**options))
    assert_same(train(plain, x, loss_fn), train(model, x, loss_fn))
    hold_peak(model, x, loss_fn=loss_fn, rounded=rounded)
    return planner.plan_of(model)


class UnderAutocast(Layers):
    """Stands for a training loop that calls its model under autocast, and the backward outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: torch.Tensor = self.model(x)
        return output


def wrap_and_hold_under_autocast(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    """Do what :func:`wrap_and_hold` does, in a loop that calls the model under autocast."""
    plain, loop = UnderAutocast(model=copy.deepcopy(model)), UnderAutocast(model=model)
    planner.auto_wrap(model, **grouped(**options))
    assert_same(train(plain, x), train(loop, x))
    hold_peak(loop, x, planned=model)
    return planner.plan_of(model)


def hold_peak(
    model: nn.Module,
    x: Any,
    *,
    loss_fn: LossFunction | None = None,
    least: float = 0.999,
    rounded: bool = False,
    planned: nn.Module | None = None,
) -> None:
    """Hold the peaks of one more step, on the device and on the host, to those that the plan predicts.

    The plan is that of the model, or of the part that is ``planned``.

    ``least`` says what share of what the plan allocates must be there; all of it is where sizes are ``rounded`` up as
    the planner counts them. It does not round the few bytes that kernels allocate inside, for numbers say.
    """
    pool = host_copies.POOL = host_copies.Pool()
    model.zero_grad()
    with record() as recording:
        step(model, x, loss_fn)
    plan = planner.plan_of(planned or model)
    predicted_bytes = plan.peak_bytes - plan.total_static_bytes
    if rounded:
        is_rounded = predicted_bytes % 64 == 0  # nothing that a kernel allocates inside is there at the peak
        assert peak_of(recording) == predicted_bytes if is_rounded else peak_of(recording) > predicted_bytes
    assert least * predicted_bytes <= peak_of(recording, alignment_bytes=1) <= predicted_bytes
    assert plan.peak_bytes <= plan.budget_bytes
    host_bytes = plan.offloading.host_bytes if plan.offloading else 0
    assert 0.99 * host_bytes <= pool.peak_bytes <= host_bytes
    assert pool.in_use_bytes == 0


def measured_bytes(model: nn.Module, x: Any, loss_fn: LossFunction | None = None) -> int:
    """Return what a later step of a model, planned or not, allocates at its peak beside what is resident."""
    step(model, x, loss_fn)
    model.zero_grad()
    return measure_peak(lambda: step(model, x, loss_fn), torch.device("cpu"))[0]


def verified(model: nn.Module, x: Any, plan: Plan, *, least: float = 0.999) -> Verification:
    """Hold real steps of a plan to the bits of eager, and to its peak as :func:`hold_peak` does."""
    found = planner.verify(model, x, plan, timed_steps=1)
    assert found.exact, found.differences
    assert least * plan.peak_bytes <= found.peak_bytes <= plan.peak_bytes, (found.peak_bytes, plan.peak_bytes)
    return found


def peak_of(recording: Recording, alignment_bytes: int = 64) -> int:
    """Return the peak of a recorded step, with each allocation rounded up as the planner counts it."""
    return recording.peak_bytes(alignment_bytes=alignment_bytes)
