"""Says when a call begins while the backward of an earlier one is still to come: a budget is for one call."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

from torch import nn

from planner.capture.inputs import differentiable_in


class _Open:
    """A call whose backward has not begun: hooks on its graph hold this, so it lives as long as the graph does."""

    def __init__(self, calls: OpenCalls) -> None:
        self.of = weakref.ref(calls)
        self.has_begun = False

    def begin(self, _gradients: Any) -> None:
        self.has_begun = True


_all: weakref.WeakSet[_Open] = weakref.WeakSet()
"""Of all wrapped models."""
_one_at_a_time = threading.Lock()


class OpenCalls:
    """The calls of one wrapped model, each of which should be over before the next one begins."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self._last: weakref.ref[_Open] | None = None
        self._is_said = False
        self._said_of_others = False

    def check(self) -> None:
        """Warn, once, if the last call still waits for its backward, and once if one of another model does."""
        last = self._last() if self._last is not None else None
        if last is not None and not last.has_begun and not self._is_said:
            self._is_said = True
            warnings.warn(
                f"{self.name} is called again before the backward of its last call. What each of them saves is held "
                "together, and the budget is that of one: call it once with all inputs, run each backward before the "
                "next call, or leave room in the budget",
                stacklevel=7,
            )
        if not self._said_of_others and (others := self._others()):
            self._said_of_others = True
            warnings.warn(
                f"{self.name} is called before the backward of {others[0]}, which is planned too. What both save is "
                "held together, and each budget is that of one: give them activation_budget=, which add up to what "
                "there is, or wrap a module that contains both",
                stacklevel=7,
            )

    def _others(self) -> list[str]:
        with _one_at_a_time:
            calls = [call.of() for call in _all if not call.has_begun]
        return [other.name for other in calls if other is not None and other is not self]

    def begun(self, outputs: Any) -> None:
        """Watch for the backward of a call that gave these outputs."""
        call = _Open(self)
        for output in differentiable_in(outputs):
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(call.begin)
        self._last = weakref.ref(call)
        with _one_at_a_time:
            _all.add(call)
