"""Runtimes: ways to run a model under a plan, each found by its file.

Every public module of this package defines one ``RUNTIME``; dropping a file in is all it takes to
add one. Each plans what it can carry out, by the same simulator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from planner.common.registry import files, unknown

if TYPE_CHECKING:
    from torch import nn

    from planner.capture.inputs import Inputs
    from planner.plans.plan import Plan
    from planner.session.step import Options

Prepare = Callable[["Options", "Inputs"], "Options"]
"""Completes options for new input sizes: what a loss outside the model needs depends on them."""


@runtime_checkable
class PlannedModel(Protocol):
    """What ``model(...)`` runs while a plan is in force."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force: that of the input sizes that ran last."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, planned if gradients are on."""

    def stop(self) -> None:
        """Restore the model's submodules; the caller restores the model's own call."""


class ReplannedModel(PlannedModel, Protocol):
    """One that may be planned again between two steps."""

    def plan_for(self, inputs: Inputs) -> Plan:
        """Plan a call ahead of it; nothing of it runs."""

    @property
    def is_searching(self) -> bool:
        """Whether a background search for a better plan is running."""

    def plan_anew(self, options: Options) -> bool:
        """Plan the next call under other options, with what was captured; False if a new capture is needed."""


@runtime_checkable
class RuntimePlugin(Protocol):
    """What a runtime module's ``RUNTIME`` offers."""

    name: str
    """The name that users pass as ``runtime=``."""
    summary: str
    """One line on what it does."""
    tolerance: float
    """How far loss, gradients and buffers may be from those of its own step without recompute; 0 means equal to the
    last bit. See :func:`planner.diagnose.verification.compare`."""
    exact_peak: bool
    """Whether the predicted peak is the measured one, and not an upper bound."""
    runs_sharded: bool
    """Whether it runs a model whose parameters are sharded already."""
    runs_compiled_parts: bool
    """Whether code made by a submodule's own ``compile()`` runs; other runtimes replace it by planned graphs."""

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        """Plan one step without running it; see :func:`planner.session.step_planning.plan_step` for the last two."""

    def start(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> ReplannedModel:
        """Return what runs instead of the model's call, under ``plan`` if one is given.

        Without ``replan`` a plan that does not match the model raises PlanMismatchError instead of being replaced.
        """


def names() -> list[str]:
    """Return the names of all runtimes."""
    return files(__path__)


def check(name: str) -> None:
    """Raise UsageError with similar names if no runtime has this name; needs no torch."""
    if name not in names():
        raise unknown("runtime", name, names())


@cache
def get(name: str) -> RuntimePlugin:
    """Return a runtime by its name, which is that of its file, or raise UsageError."""
    check(name)
    runtime = getattr(importlib.import_module(f"{__name__}.{name}"), "RUNTIME", None)
    if not isinstance(runtime, RuntimePlugin) or runtime.name != name:
        raise TypeError(f"planner/runtimes/{name}.py has no RUNTIME of that name with the attributes of RuntimePlugin")
    return runtime
