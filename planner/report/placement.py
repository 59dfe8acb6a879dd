"""What happens to each layer, identical ones shown as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from planner.layers import collapse
from planner.plan_parts import LayerPlacement
from planner.plan_types import Plan
from planner.report.style import cells, in_unit_of, table
from planner.units import format_bytes, format_seconds

_LABEL_LENGTH = 25


def render(plan: Plan) -> Group | None:
    """Show saved, freed, recomputed and added by layer; a row for several layers shows their sums."""
    layers = plan.placement
    if not layers:
        return None
    shown = table("layer", "saved", "freed", "again", "added", "why", title="Placement, layer by layer")
    shown.columns[-1].justify = "left"
    shown.columns[-1].no_wrap = False
    shown.columns[-1].overflow = "fold"
    shown.columns[-1].min_width = 16
    largest_bytes = max(abs(size) for layer in layers for size in (layer.saved_bytes, layer.freed_bytes))
    for label, members in collapse([layer.module for layer in layers], _signatures(layers)):
        shown.add_row(*cells(*_row(_fitting(label), [layers[i] for i in members], largest_bytes)))
    total = _row("all", layers, largest_bytes)
    shown.add_row(*cells(*total[:-1], "", style="bold"))
    return Group(shown, Text("Of several layers (xN) a row shows the sums; 'again' counts runs beyond the first."))


def _fitting(label: str) -> str:
    """Cut a long path from the left, whole names only, as long as two of them are left."""
    cut = label
    while len(cut) > _LABEL_LENGTH and cut.count(".") > 1:
        cut = cut.partition(".")[2]
    return cut if cut == label else f"…{cut}"


def _signatures(layers: Sequence[LayerPlacement]) -> list[object]:
    return [
        (layer.saved_bytes, layer.freed_bytes, tuple(layer.targets.items())) if layer.block else position
        for position, layer in enumerate(layers)
    ]


def _row(label: str, layers: Sequence[LayerPlacement], largest_bytes: int) -> list[str]:
    saved_bytes = sum(layer.saved_bytes for layer in layers)
    freed_bytes = sum(layer.freed_bytes for layer in layers)
    added_seconds = sum(layer.added_seconds for layer in layers)
    return [
        label,
        in_unit_of(saved_bytes, largest_bytes),
        in_unit_of(freed_bytes, largest_bytes),
        str(sum(layer.recomputed for layer in layers)),
        format_seconds(added_seconds) if added_seconds else "-",
        _why(layers, saved_bytes, freed_bytes, added_seconds),
    ]


def _why(layers: Sequence[LayerPlacement], saved_bytes: int, freed_bytes: int, added_seconds: float) -> str:
    """Say what is recomputed and what that buys, or what keeping saves."""
    targets: Counter[str] = Counter()
    for target, count in layers[0].targets.items():
        targets[_short(target)] += count
    names = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in targets.most_common())
    if added_seconds > 0 and freed_bytes > 0:
        return f"{names}: frees {format_bytes(freed_bytes / added_seconds / 1000)} per ms"
    if names:
        return f"{names}: needed by others"
    if saved_bytes:
        seconds = sum(layer.forward_seconds for layer in layers)
        return f"kept: recomputing all costs up to {format_seconds(seconds)}"
    return "nothing to keep"


def _short(target: str) -> str:
    """Give an operator's own name: ``aten.mm.default`` is ``mm``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target
