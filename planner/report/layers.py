"""What a plan does with each layer: rows in which equal layers are one, the tree of modules, what checkpoints keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rich.console import Group
from rich.text import Text

from planner.common.units import format_bytes, format_seconds, in_unit_of
from planner.ir.graph import named_by, operator_name
from planner.ir.layers import collapse
from planner.plans.plan import LayerPlacement, Plan
from planner.report.style import one_line

T = TypeVar("T")

NUMBERS = ("saved", "freed", "recomputed", "added", "freed/ms")
_OF_SCREEN = (0, 1, 3)
"""Those of the numbers for which the screen has room."""

_LABEL_AT_MOST = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layer, or several that are alike, with the sums of their :data:`NUMBERS`.

    ``positions`` says which layers of the plan these are, ``why`` what is recomputed, or why nothing is.
    """

    label: str
    positions: tuple[int, ...]
    numbers: tuple[str, ...]
    why: str


def rows(plan: Plan) -> list[Row]:
    """Return the rows of the placement in forward order, and last the sum of all of them."""
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


def render(plan: Plan, most: int | None = None) -> Group | None:
    """Show the layers, each with a line that says why; or in one line each the ``most`` that free and save most."""
    if not plan.placement:
        return None
    shown, which, title = rows(plan), tuple(range(len(NUMBERS))), "layer"
    if most is not None:

        def gain(row: Row) -> tuple[int, int]:
            members = [plan.placement[position] for position in row.positions]
            return sum(layer.freed_bytes for layer in members), sum(layer.saved_bytes for layer in members)

        title = f"Layers, {most} of {len(shown) - 1}" if len(shown) - 1 > most else "Layers"
        shown, which = sorted(shown[:-1], key=gain, reverse=True)[:most], _OF_SCREEN
    cells = [(title, *(NUMBERS[i] for i in which))]
    cells += [(fitting(row.label, _LABEL_AT_MOST), *(row.numbers[i] for i in which)) for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *lines = (
        "  ".join((f"{label:<{widths[0]}}", *(f"{n:>{w}}" for n, w in zip(numbers, widths[1:], strict=True)))).rstrip()
        for label, *numbers in cells
    )
    if most is not None:
        said = [one_line(f"{line}  {row.why}") for line, row in zip(lines, shown, strict=True)]
        return Group(one_line(f"{head}  what is recomputed", style="bold"), *said)
    parts = [Text("Placement, layer by layer", style="bold"), one_line(head, style="bold")]
    for line, row in zip(lines, shown, strict=True):
        parts.append(one_line(line, style="" if row.why else "bold"))
        if row.why:
            parts.append(one_line(f"  {row.why}", style="dim"))
    return Group(*parts, Text("A row for several layers (xN) shows their sums."))


def fitting(label: str, length: int) -> str:
    """Cut a path that is too long from the left, whole names while two of them are left.

    >>> fitting("bert.encoder.layer.0", 16), fitting("averylongname", 8)
    ('…encoder.layer.0', '…ongname')
    """
    cut = label
    while len(cut) >= length and cut.count(".") > 1:
        cut = cut.partition(".")[2]
    return label if len(label) <= length else f"…{cut[-(length - 1) :]}"


def _row(label: str, positions: Sequence[int], layers: Sequence[LayerPlacement], largest_bytes: int) -> Row:
    saved_bytes = sum(layer.saved_bytes for layer in layers)
    freed_bytes = sum(layer.freed_bytes for layer in layers)
    offloaded_bytes = sum(layer.offloaded_bytes for layer in layers)
    added_seconds = sum(layer.added_seconds for layer in layers)
    on_host = [f"{format_bytes(offloaded_bytes)} offloaded"] if offloaded_bytes else []
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
    """Say what is recomputed, or what saving the rest is worth."""
    targets: Counter[str] = Counter()
    for layer in layers:
        for target, count in layer.targets.items():
            targets[operator_name(target)] += count
    names = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in targets.most_common())
    if names:
        return names if freed_bytes > 0 else f"{names}: recomputed for others"
    if saved_bytes:
        seconds = sum(layer.forward_seconds for layer in layers)
        return f"all saved: recomputing it costs up to {format_seconds(seconds)}"
    return "nothing is saved"


def render_kept(plan: Plan) -> Text | None:
    """Name the operators whose results checkpointed modules keep, modules that are alike in one line."""
    if not plan.kept:
        return None
    named = [
        ", ".join(f"{operator_name(operator)} #{n}" for operator, numbers in operators.items() for n in numbers)
        for operators in plan.kept.values()
    ]
    text = Text("Kept in checkpointed modules", style="bold")
    for label, positions in collapse(list(plan.kept), named):
        text.append(f"\n{label}: {named[positions[0]]}", style="not bold")
    return text.append("\nOf an operator that a module calls more than once, #0 is the first call.", style="not bold")


@dataclass
class Module:
    """A module in the tree of modules."""

    own: LayerPlacement | None = None
    """What the plan does with what it computes itself, outside of its children."""
    parts: dict[str, Module] = field(default_factory=dict)

    def all(self) -> list[LayerPlacement]:
        """Return what the plan does with it and its children."""
        inside = [layer for part in self.parts.values() for layer in part.all()]
        return inside if self.own is None else [self.own, *inside]


def module_tree(layers: Iterable[LayerPlacement]) -> Module:
    """Return the root of the tree of modules."""
    root = Module()
    for layer in layers:
        at = root
        for name in filter(None, layer.module.split(".")):
            at = at.parts.setdefault(name, Module())
        at.own = layer
    return root


def alike(
    values: Sequence[T], place_of: Callable[[T], tuple[str, int | None, str]], signature_of: Callable[[T], object]
) -> Iterator[tuple[str, list[T]]]:
    """Group values that are the same in every layer of a row of blocks: a label, and the values it stands for.

    A place is the key of an operation, which of its results is meant, and the path of its block; the signature is what
    else must be equal for two to be shown as one.

    >>> keys = [f"h.{i}.mlp|aten.mm.default|f0" for i in range(3)]
    >>> [label for label, _ in alike(keys, lambda key: (key, 0, key[:3]), lambda key: "2" in key)]
    ['h 0-1 (x2) · mlp · mm', 'h.2.mlp · mm']
    """
    places = [place_of(value) for value in values]
    within = [
        (key[len(block) :], output, signature_of(value))
        for value, (key, output, block) in zip(values, places, strict=True)
    ]
    for label, members in collapse([block for _, _, block in places], within):
        key, output, block = places[members[0]]
        module, _ = named_by(key)
        parts = [label, module[len(block) + 1 :]] if len(members) > 1 else [module or "(model)"]
        yield " · ".join([*filter(None, parts), result_name(key, output)]), [values[i] for i in members]


def result_name(key: str, output: int | None) -> str:
    """Name a result by its operator, and by its number if it is not the first.

    >>> result_name("h.0|aten.mm.default|forward+0", 0), result_name("h.0|aten.max.dim|forward+0", 1)
    ('mm', 'max, result 2')
    """
    name = operator_name(named_by(key)[1])
    return f"{name}, result {output + 1}" if output else name
