"""Automatic activation-checkpoint placement: one number in, a model that fits out.

``import planner`` is quick: torch and the solvers are imported when first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.analysis.audit import Audit as Audit
    from planner.analysis.diff import diff as diff
    from planner.analysis.explain import explain as explain
    from planner.analysis.study import Study as Study
    from planner.analysis.trade_off.types import TradeOffCurve as TradeOffCurve
    from planner.api import auto_wrap as auto_wrap
    from planner.api import plan as plan
    from planner.api import profile as profile
    from planner.api import verify as verify
    from planner.diagnose.check import check as check
    from planner.exporters import export as export
    from planner.exporters._export import Export as Export
    from planner.ir.instances import load_instance as load_instance
    from planner.plans.pipeline_types import PipelinePlan as PipelinePlan
    from planner.plans.plan import Plan as Plan
    from planner.plans.plan import Verification as Verification
    from planner.plans.profile_file import load as load_profile
    from planner.plans.profile_file import save as save_profile
    from planner.session.pipelining import plan_pipeline as plan_pipeline
    from planner.session.studying import audit as audit
    from planner.session.studying import study as study
    from planner.session.studying import what_if as what_if
    from planner.solvers import solve as solve
    from planner.wrapped import plan_of as plan_of
    from planner.wrapped import unwrap as unwrap

__version__ = "0.1.0"

_HOME = {
    "Audit": "planner.analysis.audit",
    "Export": "planner.exporters._export",
    "PipelinePlan": "planner.plans.pipeline_types",
    "Plan": "planner.plans.plan",
    "Study": "planner.analysis.study",
    "TradeOffCurve": "planner.analysis.trade_off.types",
    "Verification": "planner.plans.plan",
    "audit": "planner.session.studying",
    "auto_wrap": "planner.api",
    "check": "planner.diagnose.check",
    "diff": "planner.analysis.diff",
    "explain": "planner.analysis.explain",
    "export": "planner.exporters",
    "load_instance": "planner.ir.instances",
    "plan": "planner.api",
    "plan_of": "planner.wrapped",
    "plan_pipeline": "planner.session.pipelining",
    "profile": "planner.api",
    "solve": "planner.solvers",
    "study": "planner.session.studying",
    "unwrap": "planner.wrapped",
    "verify": "planner.api",
    "what_if": "planner.session.studying",
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
        return getattr(import_module("planner.plans.profile_file"), name.removesuffix("_profile"))
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
