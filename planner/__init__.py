"""Automatic activation-checkpoint placement: one number in, a model that fits out.

``import planner`` is quick: torch and the solvers are imported when first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import auto_wrap as auto_wrap
    from planner.api import plan as plan
    from planner.api import profile as profile
    from planner.api import verify as verify
    from planner.asking import what_if as what_if
    from planner.audit_types import Audit as Audit
    from planner.auditing import audit as audit
    from planner.comparing import diff as diff
    from planner.diagnose.check import check as check
    from planner.explaining import explain as explain
    from planner.export_types import Export as Export
    from planner.exporters import export as export
    from planner.instances import load_instance as load_instance
    from planner.pipeline_types import PipelinePlan as PipelinePlan
    from planner.pipelining import plan_pipeline as plan_pipeline
    from planner.plan_types import Plan as Plan
    from planner.plan_types import Verification as Verification
    from planner.profile_file import load as load_profile
    from planner.profile_file import save as save_profile
    from planner.solvers import solve as solve
    from planner.study_types import Study as Study
    from planner.studying import study as study
    from planner.trade_off.types import TradeOffCurve as TradeOffCurve
    from planner.wrapped import plan_of as plan_of
    from planner.wrapped import unwrap as unwrap

__version__ = "0.1.0"

_HOME = {
    "Audit": "planner.audit_types",
    "Export": "planner.export_types",
    "PipelinePlan": "planner.pipeline_types",
    "Plan": "planner.plan_types",
    "Study": "planner.study_types",
    "TradeOffCurve": "planner.trade_off.types",
    "Verification": "planner.plan_types",
    "audit": "planner.auditing",
    "auto_wrap": "planner.api",
    "check": "planner.diagnose.check",
    "diff": "planner.comparing",
    "explain": "planner.explaining",
    "export": "planner.exporters",
    "load_instance": "planner.instances",
    "plan": "planner.api",
    "plan_of": "planner.wrapped",
    "plan_pipeline": "planner.pipelining",
    "profile": "planner.api",
    "solve": "planner.solvers",
    "study": "planner.studying",
    "unwrap": "planner.wrapped",
    "verify": "planner.api",
    "what_if": "planner.asking",
}

__all__ = [
    "Audit",
    "Export",
    "PipelinePlan",
    "Plan",
    "Study",
    "TradeOffCurve",
    "Verification",
    "__version__",
    "audit",
    "auto_wrap",
    "check",
    "diff",
    "explain",
    "export",
    "load_instance",
    "load_profile",
    "plan",
    "plan_of",
    "plan_pipeline",
    "profile",
    "save_profile",
    "solve",
    "study",
    "unwrap",
    "verify",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name in ("load_profile", "save_profile"):
        return getattr(import_module("planner.profile_file"), name.removesuffix("_profile"))
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
