"""Automatic activation checkpointing for PyTorch: give a memory budget, and train a model that keeps it.

``import planner`` is quick: torch and the solvers are imported when first needed.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.analysis.audit import Audit
    from planner.analysis.explain import explain
    from planner.analysis.study import Study
    from planner.analysis.trade_off.types import TradeOffCurve
    from planner.api import auto_wrap, backend, plan, plan_of, profile, status, unwrap, verify
    from planner.capture.inputs import Inputs
    from planner.common.options import Budget, Offload, Runtime, Search, Target, Training
    from planner.diagnose.check import check
    from planner.diagnose.status import Status
    from planner.errors import (
        CaptureError,
        InfeasibleBudgetError,
        PlanFileError,
        PlanMismatchError,
        PlannerError,
        RuntimeUnsupportedError,
        UsageError,
    )
    from planner.exporters import export
    from planner.exporters._export import Export
    from planner.integrations.partitioner_internals import knapsack
    from planner.ir.instances import load_instance
    from planner.ir.policy import PolicyOperation
    from planner.plans.plan import Plan, Verification
    from planner.plans.profile_file import load as load_profile
    from planner.plans.profile_file import save as save_profile
    from planner.session.studying import audit, study, what_if
    from planner.solvers import solve

__version__ = "0.1.0"

_NAMES = {
    "planner.analysis.audit": "Audit",
    "planner.analysis.explain": "explain",
    "planner.analysis.study": "Study",
    "planner.analysis.trade_off.types": "TradeOffCurve",
    "planner.api": "auto_wrap backend plan plan_of profile status unwrap verify",
    "planner.capture.inputs": "Inputs",
    "planner.common.options": "Budget Offload Runtime Search Target Training",
    "planner.diagnose.check": "check",
    "planner.diagnose.status": "Status",
    "planner.errors": "CaptureError InfeasibleBudgetError PlanFileError PlanMismatchError PlannerError "
    "RuntimeUnsupportedError UsageError",
    "planner.exporters": "export",
    "planner.exporters._export": "Export",
    "planner.integrations.partitioner_internals": "knapsack",
    "planner.ir.instances": "load_instance",
    "planner.ir.policy": "PolicyOperation",
    "planner.plans.plan": "Plan Verification",
    "planner.plans.profile_file": "load_profile save_profile",  # there without the last word
    "planner.session.studying": "audit study what_if",
    "planner.solvers": "solve",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

_PACKAGES = ("integrations", "report")
"""Found as attributes too; the second one can be called."""

__all__ = [
    "Audit", "Budget", "CaptureError", "Export", "InfeasibleBudgetError", "Inputs", "Offload", "Plan",
    "PlanFileError", "PlanMismatchError", "PlannerError", "PolicyOperation", "Runtime", "RuntimeUnsupportedError",
    "Search", "Status", "Study", "Target", "TradeOffCurve", "Training", "UsageError", "Verification", "__version__",
    "audit", "auto_wrap", "backend", "check", "explain", "export", "knapsack", "load_instance",
    "load_profile", "plan", "plan_of", "profile", "save_profile", "solve", "status", "study", "unwrap", "verify",
    "what_if",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES and name not in _MODULE_OF:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    drawn = random.getstate()
    try:
        if name in _PACKAGES:
            return import_module(f"planner.{name}")
        return getattr(import_module(_MODULE_OF[name]), name.removesuffix("_profile"))
    finally:
        random.setstate(drawn)  # rich draws from it when it is imported
