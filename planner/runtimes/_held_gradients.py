"""Says when a call begins beside gradients that its budget has no room for: a step is planned to begin without any."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from planner.common.units import format_bytes
from planner.plans.plan import Plan
from planner.session.step import Options


class HeldGradients:
    """The gradients that the calls of one wrapped model begin with."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._name = type(model).__name__
        # A budget for what a step adds is not for what is there before it.
        self._is_counted = options.training.gradient_accumulation or options.budget.budget is None
        self._is_said = False

    def bytes_of(self, model: nn.Module) -> int:
        """Return what the gradients of earlier backwards take, where nobody counts them."""
        if self._is_counted or self._is_said:
            return 0
        gradients = (parameter.grad for parameter in model.parameters())
        return sum(gradient.nbytes for gradient in gradients if type(gradient) is Tensor)

    def check(self, held_bytes: int, plan: Plan | None) -> None:
        """Warn, once, if a plan breaks its budget beside so much."""
        if plan is None or not held_bytes or plan.peak_bytes + held_bytes <= plan.budget_bytes:
            return
        self._is_said = True
        warnings.warn(
            f"{self._name} is called while it holds {format_bytes(held_bytes)} of gradients of earlier backwards. Its "
            f"plan has {format_bytes(plan.budget_bytes - plan.peak_bytes)} of the budget left for them: pass "
            "gradient_accumulation=True to auto_wrap, or free them before each step with zero_grad(set_to_none=True)",
            stacklevel=7,
        )
