"""Verify a plan on real steps: peak, time, and gradients bit for bit, with and without it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planner import runtimes
from planner.capture.inputs import Inputs, LossFunction, run_step
from planner.capture.memory import measure_peak
from planner.capture.planned_call import as_its_class, calling, parts_as_written
from planner.capture.state_restore import RandomStates, written_by
from planner.capture.torch_internals import call_implementation
from planner.capture.trees import leaf_tensors, tensors_in
from planner.common.options import HELD, KEPT, TOLERANCE, Budget, Runtime, chunks_of
from planner.ir.static_memory import OUTPUTS, LossMemory
from planner.plans.plan import MeasuredEager, Plan, Verification
from planner.session.step import options_of

ROUNDED = 0.05
"""How far loss and gradients may differ, as a share of their norm, where the same is computed with other rounding. A
captured step beside eager's differs by some thousandths; a larger difference is no rounding error."""

NOISE = 4.0
"""Tolerance in multiples of the distance of two steps without the plan, where kernels are not deterministic. That
distance is of one pair of steps; another pair may well be further apart."""

_ANY_BYTES = 2**60
"""A budget that is never exceeded."""


@dataclass(frozen=True)
class StepResult:
    """Copies of one step's results."""

    loss: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_states: RandomStates


def verify(
    model: nn.Module,
    inputs: Inputs,
    plan: Plan,
    *,
    loss_fn: LossFunction | None,
    loss: LossMemory | None,
    timed_steps: int,
) -> Verification:
    """Run real steps with the plan, with the full-save graph and in eager, in turn; see :func:`planner.verify`.

    The step without the plan is of the same captured graph: only the eager step shows a fault of capture. Capture may
    round differently, so it is compared within :data:`ROUNDED`.

    Where kernels may differ from run to run, the step without the plan runs once more as a control.

    ``loss`` is what ``loss_fn`` takes. What is resident is added to what a step was seen to allocate.
    """
    options, chosen = options_of(plan, loss), runtimes.get(plan.runtime)
    unbounded_bytes = 4 * max(plan.baseline_peak_bytes, plan.optimizer_peak_bytes)  # code may hold more than the graph
    one_piece = None
    with _restored(model, inputs) as start:
        step = _Step(model, inputs, loss_fn, str(plan.fingerprint.get(OUTPUTS, HELD)))
        planned = chosen.start(model, options, plan=plan, replan=False)
        baseline = chosen.start(model, replace(options, budget=Budget(unbounded_bytes)))
        peak_bytes, actual = step.measured(planned, start)
        baseline_peak_bytes, expected = step.measured(baseline, start)
        control = distance(expected, step.measured(baseline, start)[1]) if bits_may_differ(step.device) else None
        if chunks_of(plan.fingerprint) > 1:
            whole = chosen.start(model, replace(options, budget=Budget(_ANY_BYTES), runtime=Runtime(plan.runtime)))
            _, one_piece = step.measured(whole, start)
        eager_peak_bytes, as_eager = step.measured(call_implementation(model), start)
        ways: dict[str, Callable[..., Any]] = {"planned": planned, "baseline": baseline}
        if plan.eager is not None:
            ways["eager"] = call_implementation(model)
        rounds = [step.round(ways, backwards=bool(number % 2)) for number in range(timed_steps)]
    eager = None
    if plan.eager is not None:
        peak = eager_peak_bytes + plan.total_static_bytes
        equal = not compare(as_eager, actual)
        eager = MeasuredEager(peak_bytes=peak, overhead=_overhead(rounds, "eager"), equal=equal)
    kinds = {line.split(" ", 1)[0] for line in compare(expected, actual)}
    tolerance = max(chosen.tolerance, NOISE * (control or 0.0))
    differences = compare(expected, actual, tolerance=tolerance)
    if one_piece is not None:
        far = compare(one_piece, actual, tolerance=TOLERANCE)
        differences += [f"{line}, compared with the step in one piece" for line in far]
    if not chosen.tolerance or as_eager.random_states == actual.random_states:
        # Compiled code may draw other random numbers; what it computes of them cannot be compared.
        far = compare(as_eager, actual, tolerance=ROUNDED, in_roundings=False)
        differences += [f"{line}, compared with the eager step" for line in far]
    resident_bytes = plan.total_static_bytes
    return Verification(
        peak_bytes=peak_bytes + resident_bytes,
        baseline_peak_bytes=baseline_peak_bytes + resident_bytes,
        overhead=_overhead(rounds, "baseline"),
        loss_equal="loss" not in kinds,
        gradients_bitwise_equal="gradient" not in kinds,
        buffers_equal=not kinds & {"buffer", "random"},
        differences=tuple(differences),
        steps=timed_steps,
        tolerance=tolerance,
        from_one_piece=0.0 if one_piece is None else distance(one_piece, actual),
        control=control,
        eager=eager,
    )


def bits_may_differ(device: torch.device) -> bool:
    """Whether kernels may be non-deterministic: on CUDA some are, unless torch is told to avoid them."""
    return device.type == "cuda" and torch.get_deterministic_debug_mode() < 2  # 2: other kernels raise


def _overhead(rounds: Sequence[Mapping[str, float]], of: str) -> float:
    """Return the median of paired overheads: a machine that slows down does not count."""
    return statistics.median(seconds["planned"] / seconds[of] for seconds in rounds) - 1.0


@dataclass(frozen=True)
class _Step:
    """A training step with a replaceable model call."""

    model: nn.Module
    inputs: Inputs
    loss_fn: LossFunction | None
    outputs: str
    """Whether the plan is for a loop that holds outputs."""

    @property
    def device(self) -> torch.device:
        return next((t.device for t in (*self.model.parameters(), *self.inputs.tensors())), torch.device("cpu"))

    def run(self, outputs: str = HELD) -> Any:
        return run_step(self.call, self.loss_fn, outputs)

    def call(self) -> Any:
        return self.model(*self.inputs.args, **self.inputs.kwargs)

    def counted(self) -> None:
        """Run a step with what its loop holds, which may be the outputs of the step before."""
        held = [self.run(self.outputs)]

        def call() -> Any:
            result = self.call()
            held.clear()
            return result

        if self.outputs == KEPT:
            self.model.zero_grad(set_to_none=True)
            run_step(call, self.loss_fn)

    def round(self, ways: Mapping[str, Callable[..., Any]], *, backwards: bool) -> dict[str, float]:
        """Return the seconds of one step each way, in alternating order."""
        order = reversed(list(ways)) if backwards else ways
        return {name: self.seconds(ways[name]) for name in order}

    def measured(self, running: Callable[..., Any], start: _ModelState) -> tuple[int, StepResult]:
        """Return the second step's peak and results; the first one captures, plans and compiles."""
        model = self.model
        with as_its_class(model), calling({model: running}):
            loss = tuple(tensor.detach().clone() for tensor in leaf_tensors(self.run()))
            start.put_back(model)
            peak_bytes, _ = measure_peak(self.counted, self.device)
            result = StepResult(
                loss=loss,
                gradients={n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
                buffers={name: b.clone() for name, b in model.named_buffers()},
                random_states=RandomStates(),
            )
            start.put_back(model)
        return peak_bytes, result

    def seconds(self, running: Callable[..., Any]) -> float:
        with as_its_class(self.model), calling({self.model: running}):
            self.model.zero_grad(set_to_none=True)
            begun = time.perf_counter()
            self.run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter() - begun


def compare(
    expected: StepResult, actual: StepResult, *, tolerance: float = 0.0, in_roundings: bool = True
) -> list[str]:
    """Return one line for each difference between two steps.

    The tolerance is how long the difference of two tensors may be, as a share of the expected one's length (both
    Euclidean), for float32; as many roundings for other types if it is ``in_roundings``, else the same share. A
    gradient counts as no shorter than a hundredth of all gradients together: one that cancels out is nothing but
    rounding. 0 compares bits.
    """

    def close(own: torch.Tensor, other: torch.Tensor, shortest: float = 0.0) -> bool:
        return _apart(own, other, shortest, in_roundings=in_roundings) <= tolerance

    shortest = _shortest(expected)
    lines = []
    if len(expected.loss) != len(actual.loss) or not all(map(close, expected.loss, actual.loss)):
        lines.append("loss or outputs differ")
    for name, gradient in expected.gradients.items():
        other = actual.gradients[name]
        if gradient is None or other is None:
            if gradient is not other:
                lines.append(f"gradient of {name} is {'absent' if other is None else 'present'}, unlike unplanned")
        elif not close(gradient, other, shortest):
            furthest = (gradient.to_dense() - other.to_dense()).abs().max().item()
            lines.append(f"gradient of {name} differs by up to {furthest:.3g}")
    pairs = ((name, own, actual.buffers[name]) for name, own in expected.buffers.items())
    lines += [f"buffer {name} differs" for name, own, other in pairs if not close(own, other)]
    if expected.random_states != actual.random_states:
        lines.append("random state after the step differs")
    return lines


def distance(expected: StepResult, actual: StepResult) -> float:
    """Return the largest difference of loss and gradients, as :func:`compare` measures it."""
    shortest = _shortest(expected)
    pairs = [(a, b, 0.0) for a, b in zip(expected.loss, actual.loss, strict=True) if a.is_floating_point()]
    for name, gradient in expected.gradients.items():
        other = actual.gradients[name]
        if gradient is not None and other is not None:
            pairs.append((gradient, other, shortest))
    return max((_apart(a, b, least) for a, b, least in pairs), default=0.0)


def _shortest(expected: StepResult) -> float:
    """Return the least norm that a gradient counts with."""
    gradients = [g for g in expected.gradients.values() if g is not None]
    return 0.01 * torch.stack([g.to_dense().norm().double() for g in gradients]).norm().item() if gradients else 0.0


def _apart(expected: torch.Tensor, actual: torch.Tensor, shortest: float, *, in_roundings: bool = True) -> float:
    """Return the norm of a difference as a share of the expected norm, scaled to roundings of float32."""
    if bitwise_equal(expected, actual):
        return 0.0
    if expected.shape != actual.shape or expected.dtype != actual.dtype or not expected.is_floating_point():
        return math.inf
    roundings = torch.finfo(expected.dtype).eps / torch.finfo(torch.float32).eps if in_roundings else 1.0
    length = max(expected.to_dense().double().norm().item(), shortest)
    apart = (expected.to_dense().double() - actual.to_dense().double()).norm().item()
    return 0.0 if not apart else apart / (roundings * length) if length else math.inf


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits: NaNs of the same bits are equal, zeros of different sign are not.

    Of sparse tensors those of indices and values are compared.
    """
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    pairs = zip(tensors_in(a), tensors_in(b), strict=True)
    return all(own.shape == other.shape and torch.equal(_bits(own), _bits(other)) for own, other in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


class _ModelState:
    """The state that a step starts from: buffers, gradients, random states, and whatever a step writes into."""

    def __init__(self, model: nn.Module, written: Sequence[torch.Tensor]) -> None:
        self.written = [(tensor, tensor.detach().clone()) for tensor in written]
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self.random_states = RandomStates()

    def put_back(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])
            for tensor, before in self.written:
                tensor.copy_(before)
        model.zero_grad(set_to_none=True)
        self.random_states.restore()


@contextmanager
def _restored(model: nn.Module, inputs: Inputs) -> Iterator[_ModelState]:
    """Let steps begin without gradients, and restore the model afterwards; give the state that steps begin with."""
    with as_its_class(model), parts_as_written(model):
        state = _ModelState(model, written_by(model, inputs))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    try:
        yield state
    finally:
        state.put_back(model)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
