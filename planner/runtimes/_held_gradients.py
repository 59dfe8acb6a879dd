"""Says when a call begins beside gradients that its budget has no room for: a step is planned to begin without any."""

from __future__ import annotations

import warnings
import weakref

from torch import Tensor, nn

from planner.common.units import format_bytes
from planner.ir.static_memory import FINDS
from planner.plans.plan import Plan
from planner.session.step import Options


class HeldGradients:
    """The gradients that the calls of one wrapped model begin with."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._name = type(model).__name__
        # A budget for what a step adds is not for what is there before it; a pipeline's plan counts its micro-batches.
        adds_up = options.training.gradient_accumulation or options.is_stage
        self._is_counted = adds_up or options.budget.budget is None
        self._is_said = False
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        """Those of the last plan: to look for them in every step takes as long as a dozen small operations."""
        self._plan: Plan | None = None

    def bytes_of(self, model: nn.Module, plan: Plan | None) -> int:
        """Return what the gradients of earlier backwards take, where nobody counts them, under the plan in force."""
        if self._is_counted or self._is_said:
            return 0
        if plan is None or plan is not self._plan:
            # What torch.func.functional_call puts in their place may be computed, and is then no leaf.
            leaves = (p for p in model.parameters() if p.is_leaf)
            self._parameters, self._plan = [*map(weakref.ref, leaves)], plan
        gradients = [p.grad for reference in self._parameters if (p := reference()) is not None]
        return sum(gradient.nbytes for gradient in gradients if type(gradient) is Tensor)

    def check(self, held_bytes: int, plan: Plan | None) -> None:
        """Warn, once, if a plan breaks its budget beside so much."""
        if plan is None or not held_bytes or plan.peak_bytes + held_bytes <= plan.budget_bytes:
            return
        if FINDS in plan.fingerprint or plan.static_bytes.get("gradients"):
            return  # it was made for a step that begins with them
        self._is_said = True
        warnings.warn(
            f"{self._name} is called while it holds {format_bytes(held_bytes)} of gradients of earlier backwards. Its "
            f"plan has {format_bytes(plan.budget_bytes - plan.peak_bytes)} of the budget left for them: pass "
            "gradient_accumulation=True to auto_wrap, or free them before each step with zero_grad(set_to_none=True)",
            stacklevel=7,
        )
