"""Plans in other training loops and compilers; a module that imports its framework is imported when first used.

Here is what the loops share, and torchtitan's converter, which needs nothing of torchtitan's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from planner import api
from planner.common.options import OPTIMIZERS, Budget
from planner.common.units import Size
from planner.errors import UsageError
from planner.plans.plan import Plan

__all__ = ["PlanCallback", "PlanConverter", "PlanLightning"]

_MODULE_OF = {"PlanCallback": "huggingface", "PlanLightning": "lightning"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'planner.integrations' has no attribute {name!r}")
    return getattr(import_module(f"planner.integrations.{_MODULE_OF[name]}"), name)


class BudgetedLoop:
    """A budget for the model of another training loop: wraps it, and checks once that the loop runs its plan."""

    def __init__(self, budget: Budget | Plan | Size, options: dict[str, Any]) -> None:
        self._budget, self._options = Budget.of(budget), options
        self._budget.check(or_none=self._budget.plan is not None)
        self._unseen: nn.Module | None = None
        """What was wrapped, until it has run its plan."""

    def wrap(self, model: nn.Module, **read: Any) -> None:
        """Wrap a model with what is ``read`` from the loop; what the user gave takes precedence."""
        self._unseen = api.auto_wrap(model, budget=self._budget, **read | self._options)

    def check(self, loop: str) -> None:
        """Raise a UsageError if the loop took a step, and that did not call the wrapped model."""
        model, self._unseen = self._unseen, None
        running = None if model is None else api.running_on(model)
        if model is not None and (running is None or running.plan is None):
            raise UsageError(
                f"{loop} took a step and did not call the wrapped {type(model).__name__}, so no budget is kept: it "
                "calls another module, or a copy. Pass what it calls to planner.auto_wrap"
            )


def name_of(optimizer: Any, asked: str = "", *, is_found: bool) -> str:
    """Return the name under which an optimizer is counted.

    ``asked`` is what the loop calls it. ``"none"`` if ``auto_wrap`` finds it in this process, with its own settings, or
    if it is none of those that are known, which are counted once they have stepped.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's stands around
    name = type(optimizer).__name__.lower()
    if type(optimizer).__module__.startswith("torch.optim."):
        if is_found:
            return "none"
        name = "momentum" if name == "sgd" and optimizer.defaults["momentum"] else name
    elif "8bit" in asked:
        name = f"{name.removesuffix('8bit')}8bit"
    return name if name in OPTIMIZERS and "paged" not in asked else "none"  # what is paged moves to the host


class PlanConverter:
    """A ``ModelConverter`` of torchtitan's that keeps a memory budget.

    It may stand in the list of converters, where torchtitan builds them of configurations, or be registered by a
    function that makes one. torchtitan calls it while the model is on the meta device, before it shards: the first
    training step is planned, for the model as it is sharded by then. Set torchtitan's activation checkpointing to none.

    Parameters
    ----------
    budget : int, float, str, Budget or Plan
        Of one rank; see :func:`planner.plan`.
    **options
        Keywords of :func:`planner.auto_wrap`: ``training``, ``loss_fn``.

    Raises
    ------
    UsageError
        After the first step, if it ran without a plan: pipeline stages are copies of the model.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    >>> PlanConverter("8GiB", training="adamw").convert(model)
    """

    def __init__(self, budget: Budget | Plan | Size, **options: Any) -> None:
        self._loop = BudgetedLoop(budget, options)

    def build(self, **_surroundings: Any) -> PlanConverter:
        """Return itself: it is its own configuration."""
        return self

    def convert(self, model: nn.Module) -> None:
        """Wrap the model."""
        self._loop.wrap(model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Check once that the plan ran."""
        self._loop.check("torchtitan")

    def key_filter(self) -> None:
        """Return None: names of parameters stay as they are."""

    state_dict_transform = format_adapter = key_filter
