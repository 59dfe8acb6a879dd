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

from planner.capture.joint import tensors_of


@dataclass(frozen=True, slots=True)
class Shard:
    """Divided along one dimension.

    Parameters
    ----------
    blocks : tuple of int
        Lengths of consecutive parts of that dimension, each of which is divided evenly: queries, keys and
        values of one product are three.
    origins : frozenset of torch.fx.Node
        The column-parallel products that it comes from.
    """

    dim: int
    blocks: tuple[int, ...]
    origins: frozenset[fx.Node]

    def at(self, dim: int) -> Shard:
        """Return the same along another dimension."""
        return Shard(dim, self.blocks, self.origins)


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device has a summand of it."""

    origins: frozenset[fx.Node]


State = Shard | Partial | None
"""None: whole on each device."""


class NeedsRedistribute(Exception):
    """The operator mixes what is on different devices.

    Parameters
    ----------
    states : iterable of State
        Of what it reads.
    cuts : iterable of int
        Where blocks would have to end along the sharded dimension for the operator to be one that does not mix.
    """

    def __init__(self, states: Iterable[State], cuts: Iterable[int] = ()) -> None:
        super().__init__()
        known = [state for state in states if state is not None]
        self.origins = frozenset[fx.Node]().union(*(state.origins for state in known))
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
        argument = self.node.args[position] if position < len(self.node.args) else None
        return self.states.get(argument) if isinstance(argument, fx.Node) else None

    def shape(self, position: int) -> torch.Size:
        """Return the shape of a positional argument."""
        return shape_of(self.node.args[position])  # type: ignore[arg-type]

    def argument(self, position: int, default: Any = None) -> Any:
        """Return a positional argument."""
        return self.node.args[position] if position < len(self.node.args) else default

    def mixes(self, cuts: Iterable[int] = ()) -> NeedsRedistribute:
        """Say that this call mixes what it reads."""
        return NeedsRedistribute(self.states.values(), cuts)


Rule = Callable[[Call], Any]
"""From a call to the state of its output, or a list of them."""


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node's one tensor."""
    (tensor,) = tensors_of(node)
    return tensor.shape


def merge(call: Call, dims: int) -> Shard:
    """Return the state of what broadcasts together: all sharded alike, and the rest of length 1 there."""
    at = {node: state.at(state.dim + dims - len(shape_of(node))) for node, state in call.states.items() if state}  # type: ignore[union-attr]
    first = next(iter(at.values()))
    for node in call.states:
        if node in at:
            agrees = (at[node].dim, at[node].blocks) == (first.dim, first.blocks)
        else:
            dim = first.dim - dims + len(shape_of(node))
            agrees = dim < 0 or shape_of(node)[dim] == 1
        if not agrees:
            raise call.mixes()
    return Shard(first.dim, first.blocks, frozenset[fx.Node]().union(*(state.origins for state in at.values())))
