"""Compare real training steps with what their plan promises."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from planner.capture.memory import Recording, record
from planner.capture.model_facts import of_model
from planner.capture.torch_internals import at_end_of_backward, is_transformed, profiler_is_running
from planner.capture.trees import leaf_tensors, leaves_of
from planner.common.units import format_bytes, format_seconds
from planner.plans.plan import Plan
from planner.runtimes import PlannedModel

_STEPS = 20
"""Number of last steps that are timed."""

_SAME_BYTES = 0.01
_SAME_SECONDS = 0.25
"""Shares by which memory and time may be off before a warning."""

_END = "planner: end of the backward"
"""What the profiler shows there."""

_BY_MEASURED = ("measured", "recorded")
"""Cost models whose seconds are of this machine."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The plan in force, and measurements of the last steps.

    A step is timed from the model's call to the end of its backward. The peak is of one recorded step, resident memory
    included. Both are None before any step was measured.
    """

    plan: Plan
    """The plan whose promises are checked."""
    steps: int = 0
    """How many steps were timed."""
    step_seconds: float | None = None
    """Median of their times."""
    peak_bytes: int | None = None
    """Peak of the step after the status was last asked for."""

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
                "A loss outside the model counts only with loss_fn; planner.verify runs the step alone"
            )
        if self.step_seconds is None or not plan.cost_model.startswith(_BY_MEASURED):
            return
        if abs(self.step_seconds - plan.step_seconds) > _SAME_SECONDS * plan.step_seconds:
            yield (
                f"a step takes {format_seconds(self.step_seconds)}; the plan promises "
                f"{format_seconds(plan.step_seconds)}. Other work on the machine, or costs measured elsewhere, do that"
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
        return "\n".join([*lines, *(f"warning: {line}" for line in self.warnings)])


def _or_not_yet(value: Any, write: Any) -> str:
    return "not yet" if value is None else str(write(value))


class Meter:
    """What ``model(...)`` runs once its status was asked for: the planned call, timed, and one of them recorded."""

    def __init__(self, model: nn.Module, running: PlannedModel) -> None:
        self._running = running
        self._device = of_model(model)
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._peak_bytes: int | None = None
        self._records_next = True
        self._step: _Step | None = None
        self._plan = running.plan
        self._model_of = weakref.ref(model)
        self._call: Any = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._running.plan

    def stop(self) -> None:
        """Undo what was done to the model's parts."""
        self._take()
        self._running.stop()

    def status(self) -> Status:
        """Return the measurements so far, and record the next step."""
        assert self._running.plan is not None
        self._take()
        self._records_next = True
        return Status(
            plan=self._running.plan,
            steps=len(self._seconds),
            step_seconds=median(self._seconds) if self._seconds else None,
            peak_bytes=self._peak_bytes,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""
        self._take()
        if not torch.is_grad_enabled() or is_transformed():
            return self._running(*args, **kwargs)
        before, self._call = self._call, self._like(args, kwargs)
        recorded = self._records_next and before == self._call and not profiler_is_running()
        self._step = step = _Step(self._device, recorded=recorded)
        result = self._running(*args, **kwargs)
        waits = [tensor for tensor in leaf_tensors(result) if tensor.requires_grad]
        at_end_of_backward(waits, step.end)
        return result

    def _like(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a key of calls that need no new capture: a profiler would disturb one."""
        model = self._model_of()
        leaves = leaves_of((args, kwargs))
        told = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        return model is not None and model.training, told

    def _take(self) -> None:
        """Store the last step's measurements, unless it replanned or had no backward."""
        step, self._step = self._step, None
        peak_bytes = step.close() if step is not None else None
        if self._running.plan is not self._plan:
            self._plan, self._peak_bytes = self._running.plan, None
            self._seconds.clear()
        elif step is not None and peak_bytes is not None and self._plan is not None:
            self._peak_bytes = peak_bytes + self._plan.total_static_bytes
            self._records_next = False
        elif step is not None and step.seconds is not None and not step.recorded:
            self._seconds.append(step.seconds)


class _Step:
    """A step that has begun. Recording makes it slower, so it is then not timed.

    A profiler that was started outside of a backward must be stopped outside of it: what comes after is not counted.
    """

    def __init__(self, device: torch.device, *, recorded: bool) -> None:
        self.recorded = recorded
        self.seconds: float | None = None
        self._device = device
        self._stack = ExitStack()
        self._recording: Recording | None = None
        self._before_bytes = self._peak_bytes = 0
        if recorded and device.type == "cuda":
            self._before_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        elif recorded:
            self._recording = self._stack.enter_context(record())
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Record the end of the backward; a second backward of the same step does not count."""
        if self.seconds is not None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before_bytes
        elif self.recorded:
            with torch.profiler.record_function(_END):
                pass
        self.seconds = time.perf_counter() - self._begun

    def close(self) -> int | None:
        """Return the step's peak above the memory before it, if it was recorded to its end."""
        self._stack.close()
        if not self.recorded or self.seconds is None:
            return None
        if self._recording is None:
            return self._peak_bytes
        if _END not in self._recording.windows:  # a profiler that was started inside took it all
            return None
        return self._recording.peak_bytes(until=_END)


def metered(model: nn.Module, running: PlannedModel) -> Meter:
    """Return the existing meter of a model's calls, or a new one."""
    return running if isinstance(running, Meter) else Meter(model, running)
