"""The whole of a plan, where that is asked for: its modules as a tree, and every operation of the step."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from planner.common.units import format_bytes, format_seconds
from planner.ir.layers import collapse
from planner.plans.plan import Plan
from planner.report.module_tree import Module, module_tree
from planner.report.style import compact_count, table


def render_modules(plan: Plan) -> RenderableType | None:
    """Show what each module saves, frees and adds, the parts of it included; equal modules in a row are one branch."""
    if plan.details is None or not plan.details.modules:
        return None
    root = module_tree(plan.details.modules)
    tree = Tree(_label(plan.model or "the model", [root]))
    _grow(tree, root)
    return Group(Text("Modules: saved, freed, added", style="bold"), tree)


def _grow(tree: Tree, module: Module) -> None:
    names, parts = list(module.parts), list(module.parts.values())
    paths = [f"#.{name}" if name.isdigit() else name for name in names]  # numbers are a row of equals
    for label, positions in collapse(paths, [part.signature() for part in parts]):
        members = [parts[position] for position in positions]
        branch = tree.add(_label(label.removeprefix("#.").removeprefix("# "), members))
        _grow(branch, members[0])


def _label(name: str, modules: Sequence[Module]) -> Text:
    layers = [layer for module in modules for layer in module.all()]
    saved_bytes = sum(layer.saved_bytes for layer in layers)
    freed_bytes = sum(layer.freed_bytes for layer in layers)
    added_seconds = sum(layer.added_seconds for layer in layers)
    label = Text.assemble((name, "bold"), f"  saved {format_bytes(saved_bytes)}")
    if freed_bytes:
        label.append(f", freed {format_bytes(freed_bytes)}", style="green")
    if added_seconds:
        label.append(f", added {format_seconds(added_seconds)}", style="yellow")
    return label


def render_operations(plan: Plan) -> Table:
    """Show FLOPs, bytes and seconds of every operation in base order; the last row adds them up."""
    everything = ("all, each once", "", ""), plan.operations
    return table(
        f"Operations, {len(plan.operations)}",
        [*(((row.operation, row.module, row.phase), [row]) for row in plan.operations), everything],
        ("operation", lambda row: row[0][0], str),
        ("module", lambda row: row[0][1], str),
        ("phase", lambda row: row[0][2], str),
        ("FLOPs", lambda row: sum(one.flops for one in row[1]), compact_count),
        ("bytes moved", lambda row: sum(one.moved_bytes for one in row[1]), format_bytes),
        ("time", lambda row: sum(one.seconds for one in row[1]), format_seconds),
        ("runs", lambda row: sum(one.runs for one in row[1]), str),
        text_columns=3,
        bold=lambda row: row is everything,
    )
