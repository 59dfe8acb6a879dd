"""Values that are the same in every layer of a row of blocks, shown as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.ir.graph import named_by, operator_name
from planner.ir.layers import collapse


def alike(
    places: Sequence[tuple[str, int | None, str]], signatures: Sequence[object]
) -> Iterator[tuple[str, list[int]]]:
    """Group values by what they are inside their blocks: a label, and the positions of the values it stands for.

    A place is the key of an operation, which of its results is meant, and the path of its block; signatures are what
    else must be equal for two to be shown as one.

    Examples
    --------
    >>> keys = [f"h.{i}.mlp|aten.mm.default|forward+0" for i in range(3)] + ["|aten.add.Tensor|forward+0"]
    >>> list(alike([(key, 0, key.partition(".mlp")[0] if "h." in key else "") for key in keys], [1, 1, 2, 1]))
    [('h 0-1 (x2) · mlp · mm', [0, 1]), ('h.2.mlp · mm', [2]), ('(model) · add', [3])]
    """
    within = [
        (key[len(block) :], output, signature)
        for (key, output, block), signature in zip(places, signatures, strict=True)
    ]
    for label, members in collapse([block for _, _, block in places], within):
        key, output, block = places[members[0]]
        module, _ = named_by(key)
        parts = [label, module[len(block) + 1 :]] if len(members) > 1 else [module or "(model)"]
        yield " · ".join([*filter(None, parts), result_name(key, output)]), members


def result_name(key: str, output: int | None) -> str:
    """Name a result by its operator, and by its number if it is not the first.

    Examples
    --------
    >>> result_name("h.0|aten.mm.default|forward+0", 0), result_name("h.0|aten.max.dim|forward+0", 1)
    ('mm', 'max, result 2')
    """
    name = operator_name(named_by(key)[1])
    return f"{name}, result {output + 1}" if output else name
