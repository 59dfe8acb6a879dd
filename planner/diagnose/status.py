"""Compare real training steps with what their plan promises."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from planner.capture.model_facts import of_model
from planner.capture.torch_internals import at_end_of_backward, is_transformed
from planner.capture.trees import leaf_tensors
from planner.common.units import format_bytes, format_seconds
from planner.plans.plan import Plan
from planner.runtimes import PlannedModel
from planner.runtimes._observed import ObservedCalls
from planner.runtimes._whole_step import close_step

_STEPS = 20
"""Number of last steps that are timed."""

_SAME_BYTES = 0.01
_SAME_SECONDS = 0.25
"""Shares by which memory and time may be off before a warning."""

_BY_MEASURED = ("measured", "recorded")
"""Cost models whose seconds are of this machine."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The plan in force, and measurements of the last steps.

    A step is timed from the model's call to the end of its backward. The peak is of one measured step, of all calls of
    wrapped models in it and what runs between them, resident memory included. Both are None before any was measured.
    """

    plan: Plan
    """The plan whose promises are checked."""
    steps: int = 0
    """How many steps were timed."""
    step_seconds: float | None = None
    """Median of their times."""
    peak_bytes: int | None = None
    """Peak of the step after the status was last asked for."""
    observed: tuple[str, ...] = ()
    """What was seen around the model and is planned for: outputs, a loss outside, an optimizer, other calls."""

    @property
    def overhead(self) -> float | None:
        """Measured step time over the predicted time of the model's own step, less one."""
        own = self.plan.eager.step_seconds if self.plan.eager else self.plan.baseline_step_seconds
        return None if self.step_seconds is None or own <= 0 else self.step_seconds / own - 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of what differs from the plan, and what to do."""
        return tuple(self._differences())

    def _differences(self) -> Iterator[str]:
        plan = self.plan
        if self.peak_bytes is not None and abs(self.peak_bytes - plan.peak_bytes) > _SAME_BYTES * plan.peak_bytes:
            over = " and breaks the budget" if self.peak_bytes > plan.budget_bytes else ""
            yield (
                f"a step held {format_bytes(self.peak_bytes)}{over}; the plan promises "
                f"{format_bytes(plan.peak_bytes)}. "
                "planner.verify runs the model's step alone"
            )
        if self.step_seconds is None or not plan.cost_model.startswith(_BY_MEASURED):
            return
        if abs(self.step_seconds - plan.step_seconds) > _SAME_SECONDS * plan.step_seconds:
            yield (
                f"a step takes {format_seconds(self.step_seconds)}; the plan promises "
                f"{format_seconds(plan.step_seconds)}. Other work here, or costs measured elsewhere, can cause that"
            )

    def __str__(self) -> str:
        plan = self.plan
        rows = [
            ("", "promised", "measured"),
            ("peak", format_bytes(plan.peak_bytes), _or_not_yet(self.peak_bytes, format_bytes)),
            ("step", format_seconds(plan.step_seconds), _or_not_yet(self.step_seconds, format_seconds)),
            ("overhead", f"{plan.over_eager(plan.overhead):+.1%}", _or_not_yet(self.overhead, "{:+.1%}".format)),
        ]
        lines = [f"{name:<8}  {promised:>10}  {seen:>10}" for name, promised, seen in rows]
        lines += [f"observed: {line}" for line in self.observed]
        return "\n".join([*lines, *(f"warning: {line}" for line in self.warnings)])


def _or_not_yet(value: Any, write: Any) -> str:
    return "not yet" if value is None else str(write(value))


class Meter:
    """What ``model(...)`` runs once its status was asked for: the planned call, timed, and one of them measured."""

    def __init__(self, model: nn.Module, running: ObservedCalls) -> None:
        self._running, self._device = running, of_model(model)
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._last_seconds: float | None = None
        self._plan = running.plan
        self._peak_bytes: int | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._running.plan

    def stop(self) -> None:
        """Undo what was done to the model's parts."""
        self._running.stop()

    def status(self) -> Status:
        """Return the measurements so far, and have the next step measured."""
        assert self._running.plan is not None
        close_step()
        self._take()
        self._running.is_asked = True
        return Status(
            plan=self._running.plan,
            steps=len(self._seconds),
            step_seconds=median(self._seconds) if self._seconds else None,
            peak_bytes=self._peak_bytes,
            observed=self._running.seen_around,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        self._take()
        if not torch.is_grad_enabled() or is_transformed():
            return self._running(*args, **kwargs)
        begun = time.perf_counter()
        result = self._running(*args, **kwargs)
        if not self._running.was_logged:  # which takes longer
            waits = [tensor for tensor in leaf_tensors(result) if tensor.requires_grad]
            at_end_of_backward(waits, lambda: self._end(begun))
        return result

    def _end(self, begun: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._last_seconds = time.perf_counter() - begun

    def _take(self) -> None:
        """Store the last step's measurements, unless it was planned again or had no backward."""
        seconds, self._last_seconds = self._last_seconds, None
        if self._running.plan is not self._plan:
            self._plan, self._peak_bytes = self._running.plan, None
            self._seconds.clear()
        elif seconds is not None:
            self._seconds.append(seconds)
        if self._running.step_bytes is not None:
            self._peak_bytes, self._running.step_bytes = self._running.step_bytes, None


def metered(model: nn.Module, running: PlannedModel) -> Meter:
    """Return the existing meter of a model's calls, or a new one."""
    if isinstance(running, Meter):
        return running
    assert isinstance(running, ObservedCalls)
    return Meter(model, running)
