"""Lightning's Trainer: a callback that keeps a budget."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from planner.common.options import Budget, Training
from planner.common.units import Size
from planner.errors import UsageError
from planner.integrations import BudgetedLoop, name_of
from planner.plans.plan import Plan

_Callback: Any = import_module("lightning.pytorch").Callback


class PlanLightning(_Callback):  # type: ignore[misc]
    """Keeps a memory budget while Lightning trains.

    When training begins, the module that ``training_step`` calls is wrapped: a part of the ``LightningModule``, as
    Lightning calls ``training_step`` and not the module itself. Lightning frees gradients after the forward, so that
    the plan counts those of the step before.

    Parameters
    ----------
    budget : int, float, str, Budget or Plan
        See :func:`planner.plan`.
    module : str, optional
        Path of the module that ``training_step`` calls, ``""`` if it calls ``self(...)``. By default the only part
        that has parameters to train.
    **options
        Keywords of :func:`planner.auto_wrap`, which replace what is read from the Trainer.

    Raises
    ------
    UsageError
        As training begins, if it is not clear which module to wrap; after the first batch, if it ran without a plan.

    Examples
    --------
    >>> callback = PlanLightning("8GiB", module="model")  # for lightning.Trainer(callbacks=[callback])
    """

    def __init__(self, budget: Budget | Plan | Size, module: str | None = None, **options: Any) -> None:
        self._loop, self._module = BudgetedLoop(budget, options), module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wrap the module."""
        parts = [n for n, part in pl_module.named_children() if any(p.requires_grad for p in part.parameters())]
        if self._module is None and len(parts) != 1:
            raise UsageError(
                f"{type(pl_module).__name__} trains {len(parts)} parts ({', '.join(parts)}): pass PlanLightning(..., "
                "module=...), the path of the one that training_step calls, or '' if it calls self(...)"
            )
        optimizer = next(iter(trainer.optimizers), None)
        training = Training(name_of(optimizer, is_found=trainer.world_size == 1), gradient_accumulation=True)
        self._loop.wrap(pl_module.get_submodule(parts[0] if self._module is None else self._module), training=training)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check once that the plan ran."""
        self._loop.check("Lightning")
