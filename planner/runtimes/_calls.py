"""What all runtimes share: the plan in force, and what was asked of it, from one set of input sizes to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from planner.capture.inputs import Inputs
    from planner.plans.plan import Plan
    from planner.runtimes import Prepare
    from planner.session.step import Options


class PlannedCalls:
    """The calls of one wrapped model.

    Parameters
    ----------
    model, options, plan, replan, prepare
        See :meth:`planner.runtimes.Runtime.start`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.plan = plan
        self.replan = replan
        self.prepare = prepare

    def complete_options(self, inputs: Inputs) -> None:
        """Complete the options for these inputs; what a percentage came to before still holds."""
        if self.prepare is not None:
            self.options = replace(self.prepare(inputs), budget=self.options.budget)

    def put_in_force(self, plan: Plan) -> None:
        """Let a new plan be the one in force: a percentage is then of its step at least."""
        self.plan = plan
        self.options = self.options.after(plan)
