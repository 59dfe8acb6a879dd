"""What is asked of a wrapped model: its plan, and to be plain again."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from planner.capture.torch_internals import install_call, untraced_call
from planner.errors import UsageError
from planner.plans.plan import Plan
from planner.runtimes import Running

ModelT = TypeVar("ModelT", bound=nn.Module)


def running_on(model: nn.Module) -> Running | None:
    """Return what runs in place of a model's call, if that is ours."""
    running = untraced_call(model)
    return running if isinstance(running, Running) else None


def plan_of(model: nn.Module) -> Plan:
    """Return the plan in force: the one of the input sizes that ran last.

    Parameters
    ----------
    model : torch.nn.Module
        One that :func:`planner.auto_wrap` has wrapped.

    Returns
    -------
    Plan

    Raises
    ------
    UsageError
        If the model is not wrapped, or has not been planned yet.
    """
    running = running_on(model)
    if running is None:
        raise UsageError(f"{type(model).__name__} is not wrapped: call planner.auto_wrap(model, budget=...) first")
    if running.plan is None:
        raise UsageError(f"{type(model).__name__} is not planned yet: that happens at its first training call")
    return running.plan


def unwrap(model: ModelT) -> ModelT:
    """Undo :func:`planner.auto_wrap`; a model that is not wrapped is left as it is.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    torch.nn.Module
        The same object.
    """
    running = running_on(model)
    if running is not None:
        running.stop()
        install_call(model, None)
    return model
