"""What one plan does otherwise than another: the answer, what they were made for, layers, values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from planner.analysis.diff import Difference, LayerDifference, Move
from planner.common.units import format_bytes, format_seconds
from planner.ir.layers import collapse
from planner.report.alike import alike
from planner.report.placement import fitting
from planner.report.style import cells, in_unit_of, signed_percent, table
from planner.report.verdict import print_verdict

_MOST_ROWS, _LABEL_AT_MOST = 30, 25


def render(difference: Difference, console: Console) -> None:
    """Print a difference."""
    print_verdict(answer(difference), console, style="bold")
    for part in (_header(difference), _layers(difference), _moves(difference)):
        if part is not None:
            console.print()
            console.print(part)
    for note in _notes(difference):
        console.print()
        console.print(Text(note))


def answer(difference: Difference) -> str:
    """Return the answer as one line."""
    noun = "value" if difference.by_value else "operation"
    count = len(difference.moves)
    if not count and not difference.layers and not difference.peak_bytes:
        return f"B does what A does: no {noun} moved"
    in_layers = f" in {_counted(difference.moved_layers, 'layer')}" if count else ""
    return f"B {_peak(difference)}{_host(difference)} and {_time(difference)}; {_counted(count, noun)} moved{in_layers}"


def _peak(difference: Difference) -> str:
    if not difference.peak_bytes:
        return "peaks the same"
    return f"peaks {format_bytes(abs(difference.peak_bytes))} {'lower' if difference.peak_bytes < 0 else 'higher'}"


def _host(difference: Difference) -> str:
    change = difference.host_bytes
    return f", offloads {format_bytes(abs(change))} {'less' if change < 0 else 'more'}" if change else ""


def _time(difference: Difference) -> str:
    a, b = difference.a, difference.b
    if not difference.same_costs:
        return f"pays {signed_percent(b.overhead)} of its step time, A {signed_percent(a.overhead)} of its own"
    if not difference.added_seconds:
        return f"pays the same {signed_percent(b.overhead)} step time"
    change = b.overhead - a.overhead
    return f"pays {signed_percent(abs(change))} {'more' if change > 0 else 'less'} step time"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _header(difference: Difference) -> Table | None:
    if not difference.header:
        return None
    shown = table("", "A", "B", title="Made otherwise", text_columns=3)
    for name, (a, b) in difference.header.items():
        shown.add_row(*cells(name.removesuffix("_bytes"), _entry(name, a), _entry(name, b)))
    return shown


def _entry(name: str, content: Any) -> str:
    return f"{format_bytes(content)} ({content:,} bytes)" if name.endswith("_bytes") else str(content) or "-"


def _layers(difference: Difference) -> Group | None:
    layers = difference.layers
    if not layers:
        return None
    shown = table("layer", "saved", "change", "again", "added", "change", title="Layers that change")
    largest_bytes = max(max(layer.a.saved_bytes, layer.b.saved_bytes) for layer in layers)
    signatures = [
        (layer.a.saved_bytes, layer.b.saved_bytes, _targets(layer.a.targets), _targets(layer.b.targets))
        if layer.block
        else position
        for position, layer in enumerate(layers)
    ]
    for label, members in collapse([layer.module for layer in layers], signatures):
        shown.add_row(*cells(*_row(fitting(label, _LABEL_AT_MOST), [layers[i] for i in members], largest_bytes)))
    shown.add_row(*cells(*_row("all of these", list(layers), largest_bytes), style="bold"))
    return Group(shown, Text("'saved', 'again' (runs beyond the first) and 'added' are of B, 'change' is from A to B."))


def _targets(targets: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(targets.items()))


def _row(label: str, layers: list[LayerDifference], largest_bytes: int) -> list[str]:
    saved_bytes, added_seconds = (
        sum(layer.saved_bytes for layer in layers),
        sum(layer.added_seconds for layer in layers),
    )
    sign = "+" if saved_bytes > 0 else ""
    return [
        label,
        in_unit_of(sum(layer.b.saved_bytes for layer in layers), largest_bytes),
        f"{sign}{in_unit_of(saved_bytes, largest_bytes)}",
        f"{sum(layer.b.recomputed for layer in layers)} ({sum(layer.recomputed for layer in layers):+})",
        format_seconds(sum(layer.b.added_seconds for layer in layers)),
        f"{'+' if added_seconds > 0 else ''}{format_seconds(added_seconds)}",
    ]


def _moves(difference: Difference) -> Group | None:
    moves = difference.moves
    if not moves:
        return None
    noun = "Values" if difference.by_value else "Operations"
    shown = table("value" if difference.by_value else "operation", "bytes", "A", "B", title=f"{noun} that moved")
    places = [(move.operation, move.output, move.block) for move in moves]
    groups = [
        (label, [moves[i] for i in members])
        for label, members in alike(places, [(move.size_bytes, move.before, move.after) for move in moves])
    ]
    groups.sort(key=lambda group: (group[1][0].before, group[1][0].after, -_bytes(group[1])))
    for label, members in groups[:_MOST_ROWS]:
        size = format_bytes(_bytes(members)) if members[0].size_bytes is not None else "-"
        shown.add_row(*cells(label, size, members[0].before, members[0].after))
    notes = [Text("Of several layers (xN) a row shows the sum.")]
    if len(groups) > _MOST_ROWS:
        notes.append(Text(f"{len(groups) - _MOST_ROWS} rows are left out; --json has all of them."))
    return Group(shown, *notes)


def _bytes(moves: list[Move]) -> int:
    return sum(move.size_bytes or 0 for move in moves)


def _notes(difference: Difference) -> Iterator[str]:
    for plan, blocks in (("A", difference.only_in_a), ("B", difference.only_in_b)):
        if blocks:
            labels = ", ".join(label for label, _ in collapse(blocks, [0] * len(blocks)))
            yield f"Only in {plan}, and left out of the tables: {labels}."
    if not difference.same_inputs:
        yield (
            "The plans are for inputs of other sizes: bytes and times are of different steps, and what moved is "
            "compared by operation."
        )
    elif not difference.same_costs:
        yield (
            "The plans count with other times, of another device, cost model or model; times are as each plan has them."
        )
    if not difference.by_value:
        without = " and ".join(
            name for name, plan in (("A", difference.a), ("B", difference.b)) if plan.values is None
        )  # fmt: skip
        yield (f"No table of values in {without}, so operations are compared; plans that 'plan --save' makes have one.")
