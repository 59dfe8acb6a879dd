"""What runtimes share: the calls of one wrapped model, and how they start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

if TYPE_CHECKING:
    from torch import nn

    from planner.capture.inputs import Inputs
    from planner.plans.plan import Plan
    from planner.runtimes import Prepare, Running
    from planner.session.step import Options


class Settings(TypedDict, total=False):
    """How a runtime starts; see :meth:`planner.runtimes.Runtime.start`."""

    plan: Plan | None
    replan: bool
    prepare: Prepare | None


class PlannedCalls:
    """The calls of one wrapped model: the plan in force, and what was asked of it, from one input size to the next."""

    def __init__(self, model: nn.Module, options: Options, **settings: Unpack[Settings]) -> None:
        self.model = model
        self.options = options
        self.plan = settings.get("plan")
        self.prepare = settings.get("prepare")
        self.is_confirmed = False
        """Whether the model was seen to be what the first plan is for."""
        self._must_match = self.plan is not None and not settings.get("replan", True)

    @property
    def must_match(self) -> bool:
        """Whether the plan that the caller gave may not be replaced: the first step must be the one it is for."""
        return self._must_match and not self.is_confirmed

    def stop(self) -> None:
        """Do nothing: between calls the model's parts are as they were."""

    def complete_options(self, inputs: Inputs) -> None:
        """Complete the options for these inputs; what a percentage came to before still holds."""
        if self.prepare is not None:
            self.options = replace(self.prepare(inputs), budget=self.options.budget)

    def put_in_force(self, plan: Plan) -> None:
        """Let a new plan be the one in force: a percentage is then of its step at least."""
        self.plan = plan
        self.options = self.options.after(plan)


class StartsCalls:
    """A runtime whose calls are those of one class."""

    calls: ClassVar[Any]

    def start(self, model: nn.Module, options: Options, **settings: Unpack[Settings]) -> Running:
        """Start the calls; see :meth:`planner.runtimes.Runtime.start`."""
        running: Running = self.calls(model, options, **settings)
        return running
