"""How a tensor that is divided over devices passes an operator: rules by dimension, one for each kind of operator.

A tensor is whole on each device, or :class:`Sharded` along one dimension, or :class:`Partial`: each
device has a summand. A rule says what comes out, or raises :class:`Mixes` where the operator needs
parts that other devices have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.joint import tensors_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Sharded:
    """Divided along one dimension.

    Parameters
    ----------
    dim : int
    blocks : tuple of int
        Lengths of consecutive parts of that dimension, each of which is divided evenly: queries, keys and
        values of one product are three.
    origins : frozenset of torch.fx.Node
        The column-parallel products that it comes from.
    """

    dim: int
    blocks: tuple[int, ...]
    origins: frozenset[fx.Node]

    def at(self, dim: int) -> Sharded:
        """Give the same along another dimension."""
        return Sharded(dim, self.blocks, self.origins)


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device has a summand of it."""

    origins: frozenset[fx.Node]


State = Sharded | Partial | None
"""None: whole on each device."""


class Mixes(Exception):  # noqa: N818 - no error, but what a rule finds
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
        self.length = next((sum(state.blocks) for state in known if isinstance(state, Sharded)), 0)
        self.cuts = frozenset(cuts)


@dataclass(frozen=True)
class Call:
    """One node with the states of what it reads; partial sums only where the rule takes them."""

    node: fx.Node
    devices: int
    states: dict[fx.Node, State]
    is_backward: bool

    def __getitem__(self, position: int) -> State:
        """Give the state of a positional argument."""
        argument = self.node.args[position] if position < len(self.node.args) else None
        return self.states.get(argument) if isinstance(argument, fx.Node) else None

    def shape(self, position: int) -> torch.Size:
        """Give the shape of a positional argument."""
        return shape_of(self.node.args[position])  # type: ignore[arg-type]

    def argument(self, position: int, default: Any = None) -> Any:
        """Give a positional argument."""
        return self.node.args[position] if position < len(self.node.args) else default

    def mixes(self, cuts: Iterable[int] = ()) -> Mixes:
        """Say that this call mixes what it reads."""
        return Mixes(self.states.values(), cuts)


Rule = Callable[[Call], Any]
"""From a call to the state of its output, or a list of them."""


def shape_of(node: fx.Node) -> torch.Size:
    """Give the shape of a node's one tensor."""
    (tensor,) = tensors_of(node)
    return tensor.shape


def state_after(call: Call) -> Any:
    """Give the state of a call's output, or a list of states where it has several.

    Raises
    ------
    Mixes
    """
    if all(state is None for state in call.states.values()):
        val = call.node.meta.get("val")
        return [None] * len(val) if isinstance(val, (list, tuple)) else None
    rule = RULES.get(call.node.target)
    if rule is None:
        rule = _attention if "scaled_dot_product" in str(call.node.target) else _by_tag
    return rule(call)


def _by_tag(call: Call) -> Any:
    tags = getattr(call.node.target, "tags", ())
    if torch.Tag.pointwise not in tags:
        raise call.mixes()
    return _pointwise(call)


def _pointwise(call: Call) -> Any:
    tensors = tensors_of(call.node)
    merged = merge(call, tensors[0].dim())
    val = call.node.meta["val"]
    return [merged for _ in val] if isinstance(val, (list, tuple)) else merged


def merge(call: Call, dims: int) -> Sharded:
    """Give the state of what broadcasts together: all sharded alike, and the rest of length 1 there."""
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
    return Sharded(first.dim, first.blocks, frozenset[fx.Node]().union(*(state.origins for state in at.values())))


def _view(call: Call) -> State:
    state = call[0]
    if not isinstance(state, Sharded):
        return state
    before, after = call.shape(0), shape_of(call.node)
    dims_in, dims_out = _group(before, after, state.dim)
    outer = math.prod(before[dims_in.start : state.dim])
    inner = math.prod(before[state.dim + 1 : dims_in.stop])
    blocks = tuple(block * inner for block in state.blocks) * outer
    for dim in dims_out:
        times = math.prod(after[dims_out.start : dim])
        unit = math.prod(after[dim + 1 : dims_out.stop])
        period = blocks[: len(blocks) // times]
        repeats = len(blocks) % times == 0 and blocks == period * times and sum(period) == after[dim] * unit
        if repeats and all(block % (unit * call.devices) == 0 for block in period):
            return Sharded(dim, tuple(block // unit for block in period), state.origins)
    whole = sum(state.blocks)
    parts = after[dims_out.start]
    cuts = range(whole // parts, whole, whole // parts) if outer == inner == 1 and 1 < parts < whole else ()
    raise call.mixes(cuts)


def _group(before: Sequence[int], after: Sequence[int], dim: int) -> tuple[range, range]:
    """Give the dimensions before and after a view that hold the same elements, those around one dimension."""
    at, to = 0, 0
    while True:
        begin, begin_to = at, to
        left, right = before[at], after[to]
        at, to = at + 1, to + 1
        while left != right:
            if left < right:
                left *= before[at]
                at += 1
            else:
                right *= after[to]
                to += 1
        if dim < at:
            return range(begin, at), range(begin_to, to)


def _same(call: Call) -> Any:
    return call[0]


def _moved(places: Callable[[Call, int], Sequence[int]]) -> Rule:
    """Make the rule of an operator that orders dimensions anew: where each new one was before."""

    def rule(call: Call) -> State:
        state = call[0]
        if not isinstance(state, Sharded):
            return state
        dims = len(call.shape(0))
        order = [dim % dims for dim in places(call, dims)]
        return state.at(order.index(state.dim))

    return rule


def _transposed(call: Call, dims: int) -> list[int]:
    order = list(range(dims))
    first, second = call.argument(1), call.argument(2)
    order[first], order[second] = order[second], order[first]
    return order


def _unsqueeze(call: Call) -> State:
    state = call[0]
    if not isinstance(state, Sharded):
        return state
    dim = call.argument(1) % (len(call.shape(0)) + 1)
    return state.at(state.dim + (dim <= state.dim))


def _squeeze(call: Call) -> State:
    state = call[0]
    if not isinstance(state, Sharded):
        return state
    shape = call.shape(0)
    given = call.argument(1)
    dims = {dim % len(shape) for dim in ([given] if isinstance(given, int) else given)}
    gone = {dim for dim in dims if shape[dim] == 1}
    return state.at(state.dim - sum(dim < state.dim for dim in gone))


def _expand(call: Call) -> State:
    state = call[0]
    if not isinstance(state, Sharded):
        return state
    return state.at(state.dim + len(shape_of(call.node)) - len(call.shape(0)))


def _part(call: Call, state: Sharded, pieces: Sequence[tuple[int, int]]) -> list[State]:
    """Give the states of pieces of the sharded dimension, which must begin and end with blocks."""
    ends = [0, *itertools.accumulate(state.blocks)]
    if not all(begin in ends and end in ends for begin, end in pieces):
        raise call.mixes(itertools.chain.from_iterable(pieces))
    return [
        Sharded(state.dim, state.blocks[ends.index(begin) : ends.index(end)], state.origins) for begin, end in pieces
    ]


def _slice(call: Call) -> State:
    state = call[0]
    if not isinstance(state, Sharded) or call.argument(1, 0) % len(call.shape(0)) != state.dim:
        return state
    begin, end, step = piece(call.node, call.shape(0)[state.dim], 2)
    if step != 1:
        raise call.mixes()
    return _part(call, state, [(begin, end)])[0]


def piece(node: fx.Node, length: int, position: int) -> tuple[int, int, int]:
    """Read begin, end and step of a slice, whose arguments stand from a position on."""
    begin, end, step = (*node.args[position:], *(None, None, 1)[len(node.args) - position :])
    return slice(begin, end, step or 1).indices(length)  # type: ignore[arg-type]


def _split(call: Call) -> list[State]:
    state = call[0]
    parts = tensors_of(call.node)
    if not isinstance(state, Sharded):
        raise call.mixes()
    if call.argument(2, 0) % len(call.shape(0)) != state.dim:
        return [state for _ in parts]
    ends = list(itertools.accumulate(part.shape[state.dim] for part in parts))
    return _part(call, state, list(zip([0, *ends[:-1]], ends, strict=True)))


def _without(call: Call) -> Any:
    """``select`` and ``unbind``: a dimension goes."""
    state = call[0]
    if not isinstance(state, Sharded):
        raise call.mixes()
    dim = call.argument(1, 0) % len(call.shape(0))
    if dim == state.dim:
        raise call.mixes()
    moved = state.at(state.dim - (dim < state.dim))
    val = call.node.meta["val"]
    return [moved for _ in val] if isinstance(val, (list, tuple)) else moved


def _select_backward(call: Call) -> State:
    state = call[0]
    if not isinstance(state, Sharded):
        raise call.mixes()
    dim = call.argument(2) % len(call.argument(1))
    return state.at(state.dim + (dim <= state.dim))


def _slice_backward(call: Call) -> State:
    state = call[0]
    if not isinstance(state, Sharded):
        raise call.mixes()
    sizes, dim = call.argument(1), call.argument(2) % len(call.argument(1))
    if dim != state.dim:
        return state
    begin, end, step = piece(call.node, sizes[dim], 3)
    if step != 1:
        raise call.mixes()
    blocks = tuple(block for block in (begin, *state.blocks, sizes[dim] - end) if block)
    if any(block % call.devices for block in blocks):
        raise call.mixes()
    return Sharded(dim, blocks, state.origins)


def _cat(call: Call) -> State:
    states = [call.states.get(node) for node in call.node.args[0]]  # type: ignore[union-attr, arg-type]
    sharded = [state for state in states if isinstance(state, Sharded)]
    dim = call.argument(1, 0) % len(shape_of(call.node))
    if len(sharded) != len(states) or len({state.dim for state in sharded}) > 1:
        raise call.mixes()
    origins = frozenset[fx.Node]().union(*(state.origins for state in sharded))
    if dim == sharded[0].dim:
        return Sharded(dim, tuple(block for state in sharded for block in state.blocks), origins)
    if len({state.blocks for state in sharded}) > 1:
        raise call.mixes()
    return Sharded(sharded[0].dim, sharded[0].blocks, origins)


def _reduced(adds: bool) -> Rule:
    """Make the rule of a sum, a mean, a maximum; sums over what is divided are allowed in the backward."""

    def rule(call: Call) -> State:
        state = call[0]
        assert isinstance(state, Sharded)
        count = len(call.shape(0))
        dims = {dim % count for dim in call.argument(1) or range(count)}
        if state.dim in dims:
            if adds and call.is_backward:
                return Partial(state.origins)
            raise call.mixes()
        keeps = bool(call.argument(2, False))
        return state if keeps else state.at(state.dim - sum(dim < state.dim for dim in dims))

    return rule


def _along(position: int) -> Rule:
    """Make the rule of an operator that mixes one dimension, which an argument names."""

    def rule(call: Call) -> State:
        dims = len(shape_of(call.node))
        state = merge(call, dims)
        if call.argument(position) % dims == state.dim:
            raise call.mixes()
        return state

    return rule


def _norm(call: Call) -> list[State]:
    state = call[0]
    if not isinstance(state, Sharded) or state.dim >= len(call.shape(0)) - len(call.argument(1)):
        raise call.mixes()
    return [state for _ in call.node.meta["val"]]


def _norm_backward(call: Call) -> list[State]:
    if not isinstance(call[0], Sharded) or not isinstance(call[1], Sharded) or not call.is_backward:
        raise call.mixes()
    if (call[0].dim, call[0].blocks) != (call[1].dim, call[1].blocks):
        raise call.mixes()
    if call[0].dim >= len(call.shape(0)) - len(call.argument(2)):
        raise call.mixes()
    return [call[0], *(Partial(call[0].origins) for _ in call.node.meta["val"][1:])]


def product(call: Call, left: int) -> State:
    """Multiply matrices, the left one at a position among the arguments."""
    rows, columns = call[left], call[left + 1]
    match rows, columns:
        case Sharded(dim=0), None:
            return rows
        case None, Sharded(dim=1):
            return columns
        case Sharded(dim=1), Sharded(dim=0) if rows.blocks == columns.blocks:
            return Partial(rows.origins | columns.origins)
    raise call.mixes()


def _addmm(call: Call) -> State:
    state = product(call, 1)
    bias, dims = call[0], len(call.shape(0))
    if isinstance(state, Partial):
        fits = bias is None
    else:
        assert isinstance(state, Sharded)
        dim = state.dim - 2 + dims
        fits = (
            (bias is None and (dim < 0 or call.shape(0)[dim] == 1))
            or (isinstance(bias, Sharded) and (bias.dim, bias.blocks) == (dim, state.blocks))
        )  # fmt: skip
    if not fits:
        raise call.mixes()
    return state


def _bmm(call: Call) -> State:
    first, second = call[0], call[1]
    if not (isinstance(first, Sharded) and isinstance(second, Sharded)):
        raise call.mixes()
    if first.dim or second.dim or first.blocks != second.blocks:
        raise call.mixes()
    return Sharded(0, first.blocks, first.origins | second.origins)


def _attention(call: Call) -> list[State]:
    """Heads are independent of each other: dimension 1 of all that has heads."""
    heads = set()
    for node, state in call.states.items():
        shape = shape_of(node)
        if isinstance(state, Sharded) and state.dim == 1 and len(state.blocks) == 1:
            heads.add(shape[1])
        elif state is not None or (len(shape) >= 3 and shape[1] > 1):
            raise call.mixes()
    origins = call.mixes().origins
    outputs: list[State] = []
    for tensor in call.node.meta["val"]:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 3:
            outputs.append(None)
        elif tensor.shape[1] in heads:
            outputs.append(Sharded(1, (tensor.shape[1],), origins))
        else:
            raise call.mixes()
    return outputs


RULES: dict[Any, Rule] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    aten.t.default: _moved(lambda _, dims: range(dims)[::-1]),
    aten.transpose.int: _moved(_transposed),
    aten.permute.default: _moved(lambda call, _: call.argument(1)),
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _without,
    aten.unbind.int: _without,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
    aten.cat.default: _cat,
    aten.sum.dim_IntList: _reduced(adds=True),
    aten.sum.default: _reduced(adds=True),
    aten.mean.dim: _reduced(adds=False),
    aten.amax.default: _reduced(adds=False),
    aten._softmax.default: _along(1),
    aten._safe_softmax.default: _along(1),
    aten._log_softmax.default: _along(1),
    aten._softmax_backward_data.default: _along(2),
    aten._log_softmax_backward_data.default: _along(2),
    aten.native_dropout.default: _pointwise,
    aten.native_dropout_backward.default: _pointwise,
    aten.native_layer_norm.default: _norm,
    aten._fused_rms_norm.default: _norm,
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._fused_rms_norm_backward.default: _norm_backward,
    aten.mm.default: lambda call: product(call, 0),
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
}

PASSES_SUMS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.alias.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
"""Views that may look at a summand; what else reads one needs the sum, but for additions of two."""
