"""Plans in the training loops and compilers of others: each module imports its framework, once it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.integrations.huggingface import PlanCallback
    from planner.integrations.lightning import PlanLightning
    from planner.integrations.loops import PlanConverter

_MODULE_OF = {"PlanCallback": "huggingface", "PlanConverter": "loops", "PlanLightning": "lightning"}

__all__ = ["PlanCallback", "PlanConverter", "PlanLightning"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'planner.integrations' has no attribute {name!r}")
    return getattr(import_module(f"planner.integrations.{_MODULE_OF[name]}"), name)
