"""Layers as people name them: the repeated blocks of a model, and what stands beside them.

A *block* is what every part of the planner means by that word: what reports show in a row, what established systems
checkpoint, what is compiled on its own and what FSDP2 shards. It is told from the modules that run something in the
forward, and from their classes where these are known:

- its name ends in a number, ``transformer.h.3``, and it has parts; where no such module has any, as in a row of linear
  layers, its name is a mere number;
- its class occurs more than once in its row, the modules of that name but for the number, or it is alone there: the
  attention and the perceptron that a block of T5 holds as ``layer.0`` and ``layer.1`` are parts of it;
- it is no shelf: ``resnet.encoder.stages.2`` computes nothing itself, and most of what runs inside of it runs in the
  blocks ``resnet.encoder.stages.2.layers.5``;
- it is in no other block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile

from planner.common.recent import recent
from planner.ir.checkpoints import BOOKKEEPING
from planner.ir.graph import Operation, Phase, TrainingGraph


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a graph."""

    of: tuple[str, ...]
    """For each operation, the path of its layer; ``""`` for what the model does outside its modules."""
    blocks: tuple[str, ...]
    """Paths of the layers that are blocks, in forward order."""


def find_layers(graph: TrainingGraph) -> Layers:
    """Say which layer each operation belongs to. O(operations x depth of the module tree).

    A module outside all blocks is named by as much of its path as sets it apart from the
    rows of blocks: ``bert.embeddings.word_embeddings`` belongs to ``bert.embeddings`` where
    the blocks are ``bert.encoder.layer.0`` and so on.

    Steps of other sizes share their operations: the last answers are kept.
    """
    return _layers_of(graph.operations, graph.kinds)


@recent
def _layers_of(operations: Sequence[Operation], kinds: Mapping[str, str]) -> Layers:
    run = (op for op in operations if op.phase is Phase.FORWARD and op.target not in BOOKKEEPING)
    forward = Counter(module for op in run for module in op.modules)
    names = {module for op in operations for module in op.modules}
    numbered = _Numbered(forward, kinds)
    block_of = {name: block for name in names if (block := numbered.block(name))}
    spine = _spine(names, block_of.values())
    beside = {name: next((prefix for prefix in path_prefixes(name) if prefix not in spine), name) for name in names}
    layer_of = beside | block_of
    blocks = dict.fromkeys(block_of[name] for name in forward if name in block_of)
    return Layers(tuple(layer_of[op.module] for op in operations), tuple(blocks))


def find_blocks(forward: Mapping[str, int], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Give the paths of the blocks among modules, by how many operations each runs itself, in the forward's order.

    >>> find_blocks({"wte": 1, "h.0.attn": 4, "h.0": 1, "h.1.attn": 4, "h.1": 1, "head": 1}, {})
    ('h.0', 'h.1')
    """
    numbered = _Numbered(forward, kinds)
    return tuple(dict.fromkeys(block for module in forward if (block := numbered.block(module))))


def forward_of_blocks(graph: TrainingGraph, layers: Layers) -> dict[str, tuple[int, ...]]:
    """Return the operations that each block has in the forward, by its path and in the order of the blocks."""
    inside: dict[str, list[int]] = {block: [] for block in layers.blocks}
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.FORWARD and layers.of[index] in inside:
            inside[layers.of[index]].append(index)
    return {block: tuple(operations) for block, operations in inside.items()}


def is_within(module: str, outer: str) -> bool:
    """Whether a module is another, or inside it.

    >>> is_within("h.1.mlp", "h.1"), is_within("h.10", "h.1")
    (True, False)
    """
    return module == outer or module.startswith(f"{outer}.")


def path_prefixes(module: str) -> list[str]:
    """Return the prefixes of a path, shortest first, the path itself last."""
    return list(accumulate(module.split("."), "{}.{}".format)) if module else []


def layer_among(module: str, layers: Collection[str]) -> str:
    """Return the innermost of some layers that a module is in or is, ``""`` if it is in none.

    >>> layer_among("h.1.mlp.0", {"h.1", "h.10"}), layer_among("wte", {"h.1"})
    ('h.1', '')
    """
    return next((prefix for prefix in reversed(path_prefixes(module)) if prefix in layers), "")


class _Numbered:
    """The numbered modules of a forward that have parts; where there are none, those named by a mere number."""

    def __init__(self, forward: Mapping[str, int], kinds: Mapping[str, str]) -> None:
        holders = {prefix for module in forward for prefix in path_prefixes(module)[:-1]}
        leaves = {prefix for module in forward for prefix in path_prefixes(module)}
        numbered = [path for path in kinds if path[-1:].isdigit()]
        rows = Counter(_row(path) for path in numbered)
        alike = Counter((_row(path), kinds[path]) for path in numbered)

        def is_repeated(name: str) -> bool:
            row = _row(name)
            return not kinds or (name in kinds and (rows[row] == 1 or alike[row, kinds[name]] > 1))

        self._numbered = {name for name in holders if name[-1].isdigit() and is_repeated(name)} or {
            name for name in leaves if name.rpartition(".")[2].isdigit() and is_repeated(name)
        }
        inside: Counter[str] = Counter()
        held: Counter[str] = Counter()
        for module, count in forward.items():
            prefixes = self.prefixes(module)
            inside.update(dict.fromkeys(prefixes, count))
            held.update(dict.fromkeys(prefixes[:-1], count))
        self._shelves = {prefix for prefix in held if not forward[prefix] and 2 * held[prefix] > inside[prefix]}

    def prefixes(self, module: str) -> list[str]:
        """Return the numbered modules that a module is in or is, outermost first."""
        return [prefix for prefix in path_prefixes(module) if prefix in self._numbered]

    def block(self, module: str) -> str:
        """Return the block that a module is in, ``""`` if it is in none."""
        return next((prefix for prefix in self.prefixes(module) if prefix not in self._shelves), "")


def _row(path: str) -> str:
    """Give a path without its last number."""
    return path.rstrip("0123456789")


def _spine(names: Iterable[str], blocks: Iterable[str]) -> set[str]:
    """Return the paths that lead to blocks (to all modules if there are no blocks), which name no layer."""
    ends = [block.rpartition(".")[0] for block in blocks]
    if not ends:
        split = [name.split(".") for name in names if name]
        common = takewhile(lambda column: len(set(column)) == 1, zip(*split, strict=False))
        ends = [".".join(column[0] for column in common)] if len(split) > 1 else []
    return {prefix for end in ends for prefix in path_prefixes(end)}


def collapse(names: Sequence[str], signatures: Sequence[object]) -> list[tuple[str, list[int]]]:
    """Group the layers of one row of blocks whose signatures are equal: labels, and the positions each stands for.

    >>> collapse(["wte", "h.0", "h.1", "h.2", "h.3"], ["e", "a", "a", "b", "a"])
    [('wte', [0]), ('h 0-1,3 (x3)', [1, 2, 4]), ('h.2', [3])]
    """
    groups: defaultdict[tuple[str, object], list[int]] = defaultdict(list)
    for position, (name, signature) in enumerate(zip(names, signatures, strict=True)):
        row = _row(name)
        groups[(row, signature) if row != name else (name, position)].append(position)
    return [(_label([names[i] for i in members]), members) for members in groups.values()]


def _label(names: list[str]) -> str:
    if len(names) == 1:
        return names[0] or "(model)"
    row = _row(names[0])
    numbers = sorted(int(name[len(row) :]) for name in names)
    row = row.rstrip("._") or "layers"
    return f"{row} {number_ranges(numbers)} (x{len(numbers)})"


def number_ranges(numbers: list[int]) -> str:
    """Write rising numbers as ranges.

    >>> number_ranges([0, 1, 2, 3, 5])
    '0-3,5'
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
