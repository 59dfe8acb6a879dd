"""What happens to each layer, and what modules that run again keep; identical ones shown as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions
from rich.text import Text

from planner.common.units import format_bytes, format_seconds, in_unit_of
from planner.ir.graph import operator_name
from planner.ir.layers import collapse
from planner.plans.plan import LayerPlacement, Plan

NUMBERS = ("saved", "freed", "again", "added", "freed/ms")
_GAP = "  "
_LABEL_AT_LEAST, _LABEL_AT_MOST = 16, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the placement: a layer, or several that are alike, with the sums of their :data:`NUMBERS`.

    ``positions`` says which layers of the plan these are, ``why`` what is recomputed, or why nothing is.
    """

    label: str
    positions: tuple[int, ...]
    numbers: tuple[str, ...]
    why: str


def render(plan: Plan) -> Placement | None:
    """Show saved, freed, recomputed and added by layer; a row for several layers shows their sums."""
    return Placement(rows(plan)) if plan.placement else None


class Placement:
    """The table of the layers, with a line beneath each row that says why; the last row adds up the others."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        columns = list(zip(NUMBERS, *(row.numbers for row in self._rows), strict=True))
        widths = [max(map(len, column)) for column in columns]
        if options.max_width < _LABEL_AT_LEAST + sum(len(_GAP) + width for width in widths):
            widths.pop()  # what a layer frees for each millisecond can be worked out
        room = options.max_width - sum(len(_GAP) + width for width in widths)
        room = min(max(room, _LABEL_AT_LEAST), _LABEL_AT_MOST)
        labels = [fitting(row.label, room) for row in self._rows]
        room = max(map(len, (*labels, "layer")))

        def line(label: str, numbers: Sequence[str], style: str = "") -> Text:
            shown = (f"{number:>{width}}" for number, width in zip(numbers, widths, strict=False))
            return Text(_GAP.join((f"{label:<{room}}", *shown)).rstrip(), style=style)

        yield Text("Placement, layer by layer", style="bold")
        yield line("layer", NUMBERS, "bold")
        for label, row in zip(labels, self._rows, strict=True):
            yield line(label, row.numbers, "" if row.why else "bold")
            if row.why:
                yield Text(f"{_GAP}{row.why}", style="dim", no_wrap=True, overflow="ellipsis")
        yield Text("Of several layers (xN) a row shows the sums; 'again' counts runs beyond the first.")


def rows(plan: Plan) -> list[Row]:
    """Return the rows of the placement in forward order, and last all of them together."""
    layers = plan.placement
    largest_bytes = max((abs(size) for layer in layers for size in (layer.saved_bytes, layer.freed_bytes)), default=0)
    signatures = [
        (layer.saved_bytes, layer.freed_bytes, tuple(layer.targets.items())) if layer.block else position
        for position, layer in enumerate(layers)
    ]
    found = [
        _row(label, positions, [layers[i] for i in positions], largest_bytes)
        for label, positions in collapse([layer.module for layer in layers], signatures)
    ]
    return [*found, replace(_row("all", range(len(layers)), layers, largest_bytes), why="")]


def fitting(label: str, length: int) -> str:
    """Cut a path that is too long from the left, whole names while two of them are left.

    >>> fitting("bert.encoder.layer.0", 16), fitting("averylongname", 8)
    ('…encoder.layer.0', '…ongname')
    """
    cut = label
    while len(cut) >= length and cut.count(".") > 1:
        cut = cut.partition(".")[2]
    if len(label) <= length:
        return label
    return f"…{cut[-(length - 1) :]}"


def _row(label: str, positions: Sequence[int], layers: Sequence[LayerPlacement], largest_bytes: int) -> Row:
    saved_bytes = sum(layer.saved_bytes for layer in layers)
    freed_bytes = sum(layer.freed_bytes for layer in layers)
    offloaded_bytes = sum(layer.offloaded_bytes for layer in layers)
    added_seconds = sum(layer.added_seconds for layer in layers)
    on_host = [f"{format_bytes(offloaded_bytes)} waits on the host"] if offloaded_bytes else []
    is_paid = added_seconds > 0 and freed_bytes > offloaded_bytes
    return Row(
        label=label,
        positions=tuple(positions),
        numbers=(
            in_unit_of(saved_bytes, largest_bytes),
            in_unit_of(freed_bytes, largest_bytes),
            str(sum(layer.recomputed for layer in layers)),
            format_seconds(added_seconds) if added_seconds else "-",
            format_bytes((freed_bytes - offloaded_bytes) / added_seconds / 1000) if is_paid else "-",
        ),
        why="; ".join([*on_host, _why(layers, saved_bytes, freed_bytes - offloaded_bytes)]),
    )


def _why(layers: Sequence[LayerPlacement], saved_bytes: int, freed_bytes: int) -> str:
    """Say what is recomputed, or what keeping saves."""
    targets: Counter[str] = Counter()
    for target, count in layers[0].targets.items():
        targets[operator_name(target)] += count
    names = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in targets.most_common())
    if names:
        return names if freed_bytes > 0 else f"{names}: others need it again"
    if saved_bytes:
        return f"kept: recomputing all costs up to {format_seconds(sum(layer.forward_seconds for layer in layers))}"
    return "nothing to keep"


def render_kept(plan: Plan) -> Text | None:
    """Name the operators whose results modules that run again keep, modules that are alike in one line."""
    if not plan.kept:
        return None
    named = [
        ", ".join(f"{operator_name(operator)} #{n}" for operator, numbers in operators.items() for n in numbers)
        for operators in plan.kept.values()
    ]
    text = Text("Kept in modules that run again", style="bold")
    for label, positions in collapse(list(plan.kept), named):
        text.append(f"\n{label}: {named[positions[0]]}", style="not bold")
    return text.append("\nOf an operator that a module calls more than once, #0 is the first call.", style="not bold")
