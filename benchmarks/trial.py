"""One architecture in a process of its own: planned as people would, trained beside eager, and measured."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import planner
from benchmarks.common import Result
from cost_models.devices import cpu
from planner.capture.inputs import differentiable_in
from planner.capture.memory import record
from planner.capture.state_restore import RandomStates
from planner.common.options import grouped
from planner.diagnose.verification import StepResult, bitwise_equal, compare, distance
from planner.errors import InfeasibleBudgetError, PlannerError
from planner.plans.plan import Plan

BUDGET = "60%"
COMPARED_STEPS, MEASURED_STEPS = 2, 5
TOLERANCE = 1e-4
"""How far loss and gradients may be from eager's, as a share of their length: beyond it they are wrong."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model, and what makes new arguments of the same sizes for a call of it."""

    model: nn.Module
    inputs: Callable[[], Inputs]


def run(make: Callable[[], Case], destination: str, errors: str, seconds_to_solve: float, most_bytes: int) -> None:
    """Try one architecture, and write what came of it; what it says on standard error goes to a file."""
    stream = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    torch.set_num_threads(1)
    Path(destination).write_text(json.dumps(tried(make, seconds_to_solve)))


def tried(make: Callable[[], Case], seconds_to_solve: float) -> Result:
    """Say what comes of an architecture: whatever it raises is part of that."""
    row: Result = {"status": "invalid"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = _eager(make, row)
    except Exception as error:
        return {**row, "reason": said(error)}
    begun = _size_of_errors()
    with _warnings() as heard:
        try:
            _planned(make, reference, seconds_to_solve, row)
        except PlannerError as error:
            row |= {"status": "refused", "reason": said(error)}
        except Exception as error:
            row |= {"status": "crashed", "reason": said(error), "traceback": traceback.format_exc(limit=-6)}
    row["warnings"] = list(dict.fromkeys(heard))
    row["errors"] = _errors_since(begun)
    return row


def said(error: BaseException) -> str:
    """Say in one line what was raised."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


# Steps.


@dataclass
class _Training:
    """A model in training; the same seed gives the same model, data and random numbers."""

    case: Case

    @classmethod
    def of(cls, make: Callable[[], Case]) -> _Training:
        _seed(0)
        case = make()
        return cls(case)

    def data(self, number: int) -> Inputs:
        _seed(100 + number)
        return self.case.inputs()

    def step(self, given: Inputs) -> torch.Tensor:
        outputs = self.case.model(*given[0], **given[1])  # held until the backward ends, as most people do
        loss = loss_of(outputs)
        loss.backward()
        return loss.detach()

    def compared(self) -> list[StepResult]:
        """Take optimizer steps, and say what each left behind."""
        model = self.case.model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        results = []
        for number in range(COMPARED_STEPS):
            given = self.data(number)
            optimizer.zero_grad()
            _seed(200 + number)
            loss = self.step(given)
            gradients = {name: _plain(p.grad) for name, p in model.named_parameters()}
            buffers = {name: _plain(b) for name, b in model.named_buffers()}
            results.append(StepResult((loss.clone(),), gradients, buffers, RandomStates()))
            optimizer.step()
        return results

    def peak(self, number: int) -> tuple[int, int]:
        """Return the most bytes that a step holds, and what they are with each allocation rounded up as plans do."""
        given = self.data(number)
        self.case.model.zero_grad(set_to_none=True)
        gc.collect()
        with record() as recording:
            self.step(given)
        return recording.peak_bytes(), recording.peak_bytes(alignment_bytes=cpu().alignment_bytes)


def loss_of(outputs: Any) -> torch.Tensor:
    """Return what people would differentiate of what a model returned."""
    if isinstance(outputs, torch.Tensor) and not outputs.dim():
        return outputs
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is not None:
        found: torch.Tensor = loss.mean()
        return found
    scalars = [tensor for tensor in differentiable_in(outputs) if not tensor.dim()]
    return sum(scalars, start=torch.zeros(())) if scalars else squares(outputs)


def squares(outputs: Any) -> torch.Tensor:
    """Return a loss of a model that has none of its own."""
    return torch.stack([tensor.abs().float().pow(2).mean() for tensor in differentiable_in(outputs)]).sum()


def _needs_loss(outputs: Any) -> bool:
    """Whether a model returns no loss of its own."""
    return getattr(outputs, "loss", None) is None and all(tensor.dim() for tensor in differentiable_in(outputs))


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy that can be compared, whatever the layout and the numbers are."""
    if tensor is None:
        return None
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach().clone()
    return torch.view_as_real(dense.resolve_conj()).clone() if dense.is_complex() else dense


# Eager.


@dataclass(frozen=True)
class _Reference:
    results: list[StepResult]
    peak_bytes: int
    needs_loss: bool
    repeats_itself: bool


def _eager(make: Callable[[], Case], row: Result) -> _Reference:
    """Train as people do without a planner; raises where that does not work."""
    training = _Training.of(make)
    args, kwargs = training.data(0)
    row["parameters"] = sum(p.numel() for p in training.case.model.parameters())
    outputs = training.case.model(*args, **kwargs)
    needs_loss = _needs_loss(outputs)
    del outputs
    first, again = (_Training.of(make).compared() for _ in range(2))
    if not any(g is not None and bool(g.any()) for g in first[0].gradients.values()):
        raise ValueError("no parameter has a gradient")
    if not all(bool(loss.isfinite()) for result in first for loss in result.loss):
        raise ValueError("the loss is no number")
    training = _Training.of(make)
    training.compared()
    peak_bytes, _ = training.peak(COMPARED_STEPS)
    row["eager_peak_bytes"] = peak_bytes
    equal = not any(line for one, other in zip(first, again, strict=True) for line in compare(one, other))
    row["eager_repeats_itself"] = equal
    return _Reference(first, peak_bytes, needs_loss, equal)


# Planned.


def _planned(make: Callable[[], Case], reference: _Reference, seconds_to_solve: float, row: Result) -> None:
    training = _Training.of(make)
    model = training.case.model
    args, kwargs = training.data(0)
    loss_fn = squares if reference.needs_loss else None
    state, states = _state(model), RandomStates()
    options: dict[str, Any] = {"loss_fn": loss_fn, "time_limit_seconds": seconds_to_solve}
    budget: dict[str, Any] = {"activation_budget": BUDGET}
    begun = time.perf_counter()
    try:
        plan = planner.plan(model, planner.Inputs.of(args, kwargs), **grouped(**budget, **options))
    except InfeasibleBudgetError as error:
        row["infeasible"] = said(error)
        budget = {"budget": error.minimum_feasible_peak_bytes}
        plan = planner.plan(model, planner.Inputs.of(args, kwargs), **grouped(**budget, **options))
    row["seconds_to_plan"] = time.perf_counter() - begun
    row |= _facts(plan)
    row["touched"] = _touched(model, state, states)
    planner.auto_wrap(model, **grouped(**budget, **options))
    actual = training.compared()
    row |= _against(reference.results, actual)
    if row["wrong"] and not _drew_alike(reference.results, actual):  # both are right, of other random numbers
        row |= {"drew_otherwise": True, "wrong": _without_random_numbers(make, budget, options)}
    row["steps"] = []
    for number in range(COMPARED_STEPS, COMPARED_STEPS + MEASURED_STEPS):
        measured_bytes, rounded_bytes = training.peak(number)
        plan = planner.plan_of(model)
        row["steps"].append(
            {
                "measured_bytes": measured_bytes,
                "rounded_bytes": rounded_bytes,
                "predicted_bytes": plan.peak_bytes - plan.total_static_bytes,
                "budget_bytes": plan.activation_budget_bytes,
            }
        )
    row |= {"status": "run", "runtime": plan.runtime, "captured_share": _captured_share(plan)}
    row["reason"] = next((warning.evidence for warning in plan.warnings if warning.rule == "runtime"), "")


def _facts(plan: Plan) -> Result:
    return {
        "plan_status": plan.status, "findings": sorted({warning.rule for warning in plan.warnings}),
        "planned_runtime": plan.runtime, "operations": len(plan.operations), "static_bytes": plan.total_static_bytes,
        "baseline_bytes": plan.baseline_peak_bytes - plan.total_static_bytes,
        "smallest_bytes": plan.minimum_feasible_peak_bytes - plan.total_static_bytes, "overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
    }  # fmt: skip


def _captured_share(plan: Plan) -> float:
    """Return which share of what a step saves is made in captured graphs."""
    note = next((warning.evidence for warning in plan.warnings if warning.rule == "captured-share"), "")
    return float(note.partition("%")[0].split()[-1]) / 100 if note else float(plan.runtime == "graph")


def _state(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: _plain(each) for name, each in [*model.named_parameters(), *model.named_buffers()]}


def _touched(model: nn.Module, state: Mapping[str, torch.Tensor | None], states: RandomStates) -> list[str]:
    """Say what planning did not leave as it was."""
    after = _state(model)
    lines = [f"{name} is gone" for name in state if name not in after]
    lines += [f"{name} is new" for name in after if name not in state]
    lines += [
        f"{name} is another" for name, then in state.items() if name in after and not bitwise_equal(then, after[name])
    ]
    lines += [f"{name} has a gradient" for name, p in model.named_parameters() if p.grad is not None]
    if RandomStates() != states:
        lines.append("the random state is another")
    return lines


def _drew_alike(expected: list[StepResult], actual: list[StepResult]) -> bool:
    """Whether the first step left the same random states."""
    return expected[0].random_states == actual[0].random_states


def _without_random_numbers(make: Callable[[], Case], budget: Result, options: Result) -> list[str]:
    """Compare steps in evaluation mode, where nothing is dropped, and say what is wrong there."""
    eager, planned = (_Training.of(make) for _ in range(2))
    for training in (eager, planned):
        training.case.model.eval()
    planner.auto_wrap(planned.case.model, **grouped(**budget, **options))
    wrong: list[str] = _against(eager.compared(), planned.compared())["wrong"]
    return wrong


def _against(expected: list[StepResult], actual: list[StepResult]) -> Result:
    """Hold steps against eager's."""
    pairs = list(zip(expected, actual, strict=True))
    lines = [f"step {number}: {line}" for number, pair in enumerate(pairs, 1) for line in compare(*pair)]
    far = [f"step {n}: {line}" for n, pair in enumerate(pairs, 1) for line in compare(*pair, tolerance=TOLERANCE)]
    largest = max(distance(*pair) for pair in pairs)
    return {
        "bitwise_equal": not lines,
        "distance": largest if largest == largest and largest != float("inf") else 1e9,
        "differences": lines[:5],
        "wrong": far[:5],
    }


# What is said.


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect warnings, each with its kind and first line."""
    heard: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", DeprecationWarning)  # as Python does by itself

        def hear(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            heard.append(f"{category.__name__}: {(str(message).strip().splitlines() or [''])[0][:300]}")

        with suppress(AttributeError):
            warnings.showwarning = hear
        yield heard


def _size_of_errors() -> int:
    sys.stderr.flush()
    return os.fstat(2).st_size


def _errors_since(begun: int) -> str:
    """Return what standard error got since then; nothing where it is no file."""
    sys.stderr.flush()
    with suppress(OSError), open("/dev/fd/2", "rb") as stream:
        stream.seek(begun)
        return stream.read()[:4000].decode(errors="replace")
    return ""
