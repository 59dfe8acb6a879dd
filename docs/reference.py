"""Build the API reference from the docstrings: ``python docs/reference.py build/docs``."""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc

import planner

MODULES = (
    "planner",
    "planner.errors",
    "planner.capture.joint_capture",
    "planner.capture.memory",
    "planner.common.options",
    "planner.plans.plan",
    "planner.analysis.study",
    "planner.analysis.trade_off.types",
    "planner.analysis.audit",
    "planner.exporters._export",
    "planner.findings.finding",
    "planner.ir.graph",
    "planner.ir.schedule",
    "planner.ir.simulator",
    "planner.ir.problem",
    "planner.common.limits",
    "planner.solvers",
    "planner.runtimes",
    "planner.integrations",
    "planner.commands",
    "planner.report",
    "cost_models",
    r"!.*\._",  # helpers
)
"""What people call, what they get back, and what they write new parts against."""


def main(folder: str) -> None:
    """Write one page for each module."""
    for package in (planner, planner.integrations):
        for name in package.__all__:
            setattr(package, name, getattr(package, name))  # found when first asked for, which pdoc does not do
    pdoc.render.configure(docformat="numpy", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
