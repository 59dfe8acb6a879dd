"""The report as one HTML page that needs nothing beside itself: no network, no other file.

The template writes everything down, escaped; the script only shows what is under the pointer and
which layer was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jinja2

from planner.common.units import format_bytes, format_percent, format_seconds
from planner.ir.graph import operator_name
from planner.plans.plan import LayerPlacement, Plan
from planner.report import comparisons, layers, verdict
from planner.report.layers import module_tree
from planner.report.page import charts
from planner.report.peak import in_order
from planner.report.style import at_least_percent, signed_percent


def to_html(plan: Plan, to_copy: comparisons.ToCopy = comparisons.OF_A_PLAN) -> str:
    """Return the page of a plan; names in it come from the model, and are escaped."""
    rows = layers.rows(plan) if plan.placement else []
    return fill("page.html.j2", plan=plan, rows=rows, to_copy=to_copy, data=_data(plan, rows))


def fill(template: str, **context: Any) -> str:
    """Write a page from a template of this package; everything that is put in is escaped, unless the template says."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "charts": charts, "comparisons": comparisons, "layers": layers, "verdict": verdict, "in_order": in_order,
    }  # fmt: skip
    written: dict[str, Callable[[Any], str]] = {
        "bytes": format_bytes, "seconds": format_seconds, "percent": format_percent, "signed": signed_percent,
        "at_least": at_least_percent, "short": operator_name,
    }  # fmt: skip
    environment.filters |= {name: partial(_known, write) for name, write in written.items()}
    return environment.get_template(template).render(context) + "\n"


def _known(write: Callable[[Any], str], content: Any) -> str:
    return "-" if content is None else write(content)


def _data(plan: Plan, rows: Sequence[layers.Row]) -> dict[str, Any]:
    row_of = {position: number for number, row in enumerate(rows[:-1]) for position in row.positions}
    layers = [
        {"name": layer.module or "(model)", "row": row_of[position], "text": _layer_text(layer)}
        for position, layer in enumerate(plan.placement)
    ]
    lines: dict[str, Any] = {}
    if plan.details is not None:
        for name, line in (("before", plan.details.before), ("after", plan.details.after)):
            lines[name] = [
                [p.seconds, p.size_bytes, f"{operator_name(p.operation)} in {p.module or 'the model'}", p.phase]
                for p in line.points
            ]
        lines["end_seconds"] = max(plan.details.before.step_seconds, plan.details.after.step_seconds)
    return {"layers": layers, "lines": lines, "modules": _modules(plan)}


def _modules(plan: Plan) -> dict[str, Any] | None:
    """Return the tree of modules, if something is saved or freed in it."""
    if plan.details is None:
        return None
    root = charts.flame(plan.model or "the model", module_tree(plan.details.modules))
    return root if root["width"] else None


def _layer_text(layer: LayerPlacement) -> str:
    text = f"saves {format_bytes(layer.saved_bytes)}, frees {format_bytes(layer.freed_bytes)}"
    if not layer.recomputed:
        return f"{text}; nothing is recomputed"
    names = ", ".join(f"{operator_name(name)} x{count}" for name, count in layer.targets.items())
    return f"{text}; {layer.recomputed} operations recomputed, {format_seconds(layer.added_seconds)}: {names}"
