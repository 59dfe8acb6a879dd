"""Print how two plans differ: the answer, the settings, the layers, the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from planner.analysis.diff import Difference, LayerDifference, Move
from planner.common.units import format_bytes, format_seconds
from planner.ir.layers import collapse
from planner.report.layers import alike, fitting
from planner.report.style import Write, counted, print_report, signed_percent, sizes, table

_MOST_ROWS, _LABEL_AT_MOST = 30, 25


def render(difference: Difference, console: Console) -> None:
    """Print a difference."""
    parts = _header(difference), _layers(difference), _moves(difference), *map(Text, _notes(difference))
    print_report(console, answer(difference), *parts)


def answer(difference: Difference) -> str:
    """Return the answer as one line."""
    noun = "value" if difference.by_value else "operation"
    count = len(difference.moves)
    if not count and not difference.layers and not difference.peak_bytes:
        return f"B does what A does: no {noun} moved"
    in_layers = f" in {counted(difference.moved_layers, 'layer')}" if count else ""
    change = difference.host_bytes
    host = f", offloads {format_bytes(abs(change))} {'less' if change < 0 else 'more'}" if change else ""
    return f"B {_peak(difference)}{host} and {_time(difference)}; {counted(count, noun)} moved{in_layers}"


def _peak(difference: Difference) -> str:
    if not difference.peak_bytes:
        return "peaks the same"
    return f"peaks {format_bytes(abs(difference.peak_bytes))} {'lower' if difference.peak_bytes < 0 else 'higher'}"


def _time(difference: Difference) -> str:
    a, b = difference.a, difference.b
    if not difference.same_costs:
        return f"pays {signed_percent(b.overhead)} of its step time, A {signed_percent(a.overhead)} of its own"
    if not difference.added_seconds:
        return f"pays the same {signed_percent(b.overhead)} step time"
    change = b.overhead - a.overhead
    return f"pays {signed_percent(abs(change))} {'more' if change > 0 else 'less'} step time"


def _header(difference: Difference) -> Table | None:
    if not difference.header:
        return None
    return table(
        "Made otherwise",
        difference.header.items(),
        ("", lambda row: row[0].removesuffix("_bytes"), str),
        ("A", lambda row: _entry(row[0], row[1][0]), str),
        ("B", lambda row: _entry(row[0], row[1][1]), str),
        text_columns=3,
    )


def _entry(name: str, content: Any) -> str:
    return f"{format_bytes(content)} ({content:,} bytes)" if name.endswith("_bytes") else str(content) or "-"


def _layers(difference: Difference) -> Group | None:
    layers = difference.layers
    if not layers:
        return None
    signatures = [
        (layer.a.saved_bytes, layer.b.saved_bytes, *(frozenset(of.targets.items()) for of in (layer.a, layer.b)))
        if layer.block
        else position
        for position, layer in enumerate(layers)
    ]
    everything = "all of these", layers
    rows = [
        *(
            (fitting(label, _LABEL_AT_MOST), [layers[i] for i in members])
            for label, members in collapse([layer.module for layer in layers], signatures)
        ),
        everything,
    ]
    size = sizes(max(layer.a.saved_bytes, layer.b.saved_bytes) for layer in layers)
    shown = table(
        "Layers that change",
        rows,
        ("layer", lambda row: row[0], str),
        ("saved", lambda row: sum(layer.b.saved_bytes for layer in row[1]), size),
        ("change", lambda row: sum(layer.saved_bytes for layer in row[1]), partial(_signed, size)),
        ("again", _runs_again, str),
        ("added", lambda row: sum(layer.b.added_seconds for layer in row[1]), format_seconds),
        ("change", lambda row: sum(layer.added_seconds for layer in row[1]), partial(_signed, format_seconds)),
        bold=lambda row: row is everything,
    )
    return Group(shown, Text("'saved', 'again' (runs beyond the first) and 'added' are of B, 'change' is from A to B."))


def _runs_again(row: tuple[str, Sequence[LayerDifference]]) -> str:
    return f"{sum(layer.b.recomputed for layer in row[1])} ({sum(layer.recomputed for layer in row[1]):+})"


def _signed(write: Write, change: float) -> str:
    return f"{'+' if change > 0 else ''}{write(change)}"


def _moves(difference: Difference) -> Group | None:
    moves = difference.moves
    if not moves:
        return None
    groups = sorted(
        alike(
            moves,
            lambda move: (move.operation, move.output, move.block),
            lambda move: (move.size_bytes, move.before, move.after),
        ),
        key=lambda group: (group[1][0].before, group[1][0].after, -_bytes(group[1])),
    )
    noun = "value" if difference.by_value else "operation"
    shown = table(
        f"{noun.capitalize()}s that moved",
        groups[:_MOST_ROWS],
        (noun, lambda group: group[0], str),
        ("bytes", lambda group: None if group[1][0].size_bytes is None else _bytes(group[1]), format_bytes),
        ("A", lambda group: group[1][0].before, str),
        ("B", lambda group: group[1][0].after, str),
    )
    notes = [Text("Of several layers (xN) a row shows the sum.")]
    if len(groups) > _MOST_ROWS:
        notes.append(Text(f"{len(groups) - _MOST_ROWS} rows are left out; --json has all of them."))
    return Group(shown, *notes)


def _bytes(moves: Sequence[Move]) -> int:
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
        plans = (("A", difference.a), ("B", difference.b))
        without = " and ".join(name for name, plan in plans if plan.values is None)
        yield (f"No table of values in {without}, so operations are compared; plans that 'plan --save' makes have one.")
