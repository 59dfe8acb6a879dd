"""Transformers' Trainer, and those that derive from it (TRL's): a callback that keeps a budget."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from planner.common.options import Budget, Training
from planner.common.units import Size
from planner.errors import UsageError
from planner.integrations import BudgetedLoop, name_of
from planner.plans.plan import Plan

_log = logging.getLogger(__name__)

_TrainerCallback: Any = import_module("transformers").TrainerCallback


class PlanCallback(_TrainerCallback):  # type: ignore[misc]
    """Keeps a memory budget while a Trainer trains; what a plan must know is read from the Trainer's arguments.

    The model is wrapped when training begins, after accelerate has prepared it, and planned in its first step, under
    the Trainer's autocast. It stays wrapped: ``planner.plan_of(trainer.model)`` has the plan.
    ``gradient_checkpointing`` is replaced by the plan; a warning in the log says so. With ``torch_compile`` Inductor
    compiles what is planned.

    Parameters
    ----------
    budget : int, float, str, Budget or Plan
        See :func:`planner.plan`.
    **options
        Keywords of :func:`planner.auto_wrap`, which replace what is read.

    Raises
    ------
    UsageError
        When the Trainer is made, if its arguments do not go with a plan; after the first step, if it ran without one.

    Examples
    --------
    >>> callback = PlanCallback("8GiB")  # for Trainer(..., callbacks=[callback])
    """

    def __init__(self, budget: Budget | Plan | Size, **options: Any) -> None:
        self._loop, self._budget = BudgetedLoop(budget, options), budget

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse arguments that do not go with a plan."""
        if args.n_gpu > 1:
            raise UsageError(
                "the Trainer replicates the model over the GPUs of one process, which runs no plan: start one process "
                "for each GPU (torchrun), or let it see one GPU"
            )
        if args.deepspeed:
            raise UsageError("DeepSpeed keeps gradients in buffers of its own, which no plan counts: leave it out")
        backend, mode = args.torch_compile_backend, args.torch_compile_mode
        if args.torch_compile and (backend != "inductor" or mode not in (None, "default")):
            raise UsageError(
                f"torch_compile with backend {backend!r} and mode {mode!r}: a planned step is compiled by Inductor in "
                "its default mode. Pass torch_compile=True alone, or leave it out"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Wrap the model."""
        self.on_init_end(args, state, control)
        if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
            newer = getattr(model, "activation_checkpointing_disable", None)
            (newer or model.gradient_checkpointing_disable)()
            _log.warning("gradient_checkpointing is replaced by a plan for the budget (%s)", self._budget)
        several, optim = args.world_size > 1, getattr(args.optim, "value", args.optim)
        training = Training(
            name_of(optimizer, optim, is_found=not several), gradient_accumulation=args.gradient_accumulation_steps > 1
        )
        compiled = "inductor_blocks" if several else "inductor"
        self._loop.wrap(model, training=training, runtime=compiled if args.torch_compile else "auto")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check once that the plan ran."""
        self._loop.check("the Trainer")

    on_substep_end = on_step_end
