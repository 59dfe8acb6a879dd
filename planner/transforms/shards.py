"""How a tensor is spread over devices that share each layer, and one call that reads such tensors.

A tensor is whole on each device, or :class:`Shard` along one dimension, or :class:`Partial`: each
device has a summand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.transforms.operators import argument, shape_of


@dataclass(frozen=True, slots=True)
class Shard:
    """Divided along one dimension."""

    dim: int
    blocks: tuple[int, ...]
    """Lengths of consecutive parts of that dimension, each of which is divided evenly: queries, keys and values of one
    product are three."""
    origins: frozenset[fx.Node]
    """The column-parallel products that it comes from."""

    def at(self, dim: int) -> Shard:
        """Return the same along another dimension."""
        return Shard(dim, self.blocks, self.origins)

    def is_like(self, other: State) -> bool:
        """Whether another tensor is divided in the same way, wherever it comes from."""
        return isinstance(other, Shard) and (self.dim, self.blocks) == (other.dim, other.blocks)


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device has a summand of it."""

    origins: frozenset[fx.Node]


State = Shard | Partial | None
"""None: whole on each device."""


def origins_of(states: Iterable[State]) -> frozenset[fx.Node]:
    """Return the column-parallel products that any of some tensors comes from."""
    return frozenset[fx.Node]().union(*(state.origins for state in states if state))


class NeedsRedistribute(Exception):
    """The operator mixes what is on different devices.

    ``states`` are of what it reads; ``cuts`` are where blocks would have to end along the sharded dimension for it not
    to mix.
    """

    def __init__(self, states: Iterable[State], cuts: Iterable[int] = ()) -> None:
        super().__init__()
        known = list(states)
        self.origins = origins_of(known)
        self.length = next((sum(state.blocks) for state in known if isinstance(state, Shard)), 0)
        self.cuts = frozenset(cuts)


@dataclass(frozen=True)
class Call:
    """One node with the states of what it reads; partial sums only where the rule takes them."""

    node: fx.Node
    devices: int
    states: dict[fx.Node, State]
    is_backward: bool

    def __getitem__(self, position: int) -> State:
        """Return the state of a positional argument."""
        given = self.argument(position)
        return self.states.get(given) if isinstance(given, fx.Node) else None

    def shard(self, position: int = 0) -> Shard:
        """Return how a positional argument is divided; raises NeedsRedistribute if it is not."""
        state = self[position]
        if not isinstance(state, Shard):
            raise self.mixes()
        return state

    def shape(self, position: int) -> torch.Size:
        """Return the shape of a positional argument."""
        return shape_of(self.node.args[position])  # type: ignore[arg-type]

    def argument(self, position: int, default: Any = None) -> Any:
        """Return a positional argument."""
        return argument(self.node, position, default)

    def each(self, state: State) -> Any:
        """Return a state for each output: a list of them where the operator has several."""
        val = self.node.meta.get("val")
        return [state] * len(val) if isinstance(val, (list, tuple)) else state

    def mixes(self, cuts: Iterable[int] = ()) -> NeedsRedistribute:
        """Say that this call mixes what it reads."""
        return NeedsRedistribute(self.states.values(), cuts)


Rule = Callable[[Call], Any]
"""From a call to the state of its output, or a list of them."""


def merge(call: Call, dims: int) -> Shard:
    """Return the state of what broadcasts together: all sharded alike, and the rest of length 1 there."""
    at = {node: state.at(state.dim + dims - len(shape_of(node))) for node, state in call.states.items() if state}  # type: ignore[union-attr]
    first = next(iter(at.values()))
    for node in call.states:
        if node in at:
            agrees = first.is_like(at[node])
        else:
            dim = first.dim - dims + len(shape_of(node))
            agrees = dim < 0 or shape_of(node)[dim] == 1
        if not agrees:
            raise call.mixes()
    return Shard(first.dim, first.blocks, origins_of(at.values()))
