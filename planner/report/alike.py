"""Values that are the same in every layer of a row of blocks, shown as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from planner.ir.graph import named_by, operator_name
from planner.ir.layers import collapse

T = TypeVar("T")


def alike(
    values: Sequence[T], place_of: Callable[[T], tuple[str, int | None, str]], signature_of: Callable[[T], object]
) -> Iterator[tuple[str, list[T]]]:
    """Group values by what they are inside their blocks: a label, and the values it stands for.

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
