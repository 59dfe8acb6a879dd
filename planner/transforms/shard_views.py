"""Rules for operators that look at a tensor otherwise, take pieces of it, or put pieces together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.joint import tensors_of
from planner.transforms.operators import TRANSPOSITIONS, VIEWS, argument, dims_before, dims_of, shape_of
from planner.transforms.shards import Call, Rule, Shard, State, origins_of

aten = torch.ops.aten


def _view(call: Call) -> State:
    state = call.shard()
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
            return Shard(dim, tuple(block // unit for block in period), state.origins)
    whole = sum(state.blocks)
    parts = after[dims_out.start]
    cuts = range(whole // parts, whole, whole // parts) if outer == inner == 1 and 1 < parts < whole else ()
    raise call.mixes(cuts)


def _group(before: Sequence[int], after: Sequence[int], dim: int) -> tuple[range, range]:
    """Return the dimensions before and after a view that hold the same elements, those around one dimension."""
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


def _transposed(call: Call) -> State:
    state = call.shard()
    return state.at(dims_before(call.node).index(state.dim))


def _added(position: int) -> Rule:
    """Make the rule of an operator that adds a dimension, which an argument names."""

    def rule(call: Call) -> State:
        state = call.shard()
        dim = call.argument(position) % len(shape_of(call.node))
        return state.at(state.dim + (dim <= state.dim))

    return rule


_unsqueeze = _added(1)


def _squeeze(call: Call) -> State:
    state, shape = call.shard(), call.shape(0)
    gone = [dim for dim in dims_of(call.argument(1), len(shape)) if shape[dim] == 1]
    return state.at(state.dim - sum(dim < state.dim for dim in gone))


def _expand(call: Call) -> State:
    state = call.shard()
    return state.at(state.dim + len(shape_of(call.node)) - len(call.shape(0)))


def _part(call: Call, state: Shard, pieces: Sequence[tuple[int, int]]) -> list[State]:
    """Return the states of pieces of the sharded dimension, which must begin and end with blocks."""
    ends = [0, *itertools.accumulate(state.blocks)]
    if not all(begin in ends and end in ends for begin, end in pieces):
        raise call.mixes(itertools.chain.from_iterable(pieces))
    return [Shard(state.dim, state.blocks[ends.index(begin) : ends.index(end)], state.origins) for begin, end in pieces]


def _slice(call: Call) -> State:
    state = call.shard()
    if call.argument(1, 0) % len(call.shape(0)) != state.dim:
        return state
    begin, end, step = piece(call.node, call.shape(0)[state.dim], 2)
    if step != 1:
        raise call.mixes()
    return _part(call, state, [(begin, end)])[0]


def piece(node: fx.Node, length: int, position: int) -> tuple[int, int, int]:
    """Read begin, end and step of a slice, whose arguments stand from a position on."""
    return slice(*(argument(node, at) for at in range(position, position + 3))).indices(length)


def _split(call: Call) -> list[State]:
    state, parts = call.shard(), tensors_of(call.node)
    if call.argument(2, 0) % len(call.shape(0)) != state.dim:
        return [state for _ in parts]
    ends = itertools.accumulate((part.shape[state.dim] for part in parts), initial=0)
    return _part(call, state, list(itertools.pairwise(ends)))


def _without(call: Call) -> Any:
    """``select`` and ``unbind``: a dimension goes."""
    state = call.shard()
    dim = call.argument(1, 0) % len(call.shape(0))
    if dim == state.dim:
        raise call.mixes()
    return call.each(state.at(state.dim - (dim < state.dim)))


def _slice_backward(call: Call) -> State:
    state = call.shard()
    sizes, dim = call.argument(1), call.argument(2) % len(call.argument(1))
    if dim != state.dim:
        return state
    begin, end, step = piece(call.node, sizes[dim], 3)
    if step != 1:
        raise call.mixes()
    blocks = tuple(block for block in (begin, *state.blocks, sizes[dim] - end) if block)
    if any(block % call.devices for block in blocks):
        raise call.mixes()
    return Shard(dim, blocks, state.origins)


def _joined(call: Call) -> State:
    """``cat`` and ``stack``."""
    states = [call.states.get(node) for node in call.argument(0)]
    shards = [state for state in states if isinstance(state, Shard)]
    if len(shards) != len(states):
        raise call.mixes()
    dim = call.argument(1, 0) % len(shape_of(call.node))
    first, stacks = shards[0], call.node.target is aten.stack.default
    if not stacks and all(shard.dim == dim for shard in shards):
        return Shard(dim, tuple(block for shard in shards for block in shard.blocks), origins_of(shards))
    if not all(map(first.is_like, shards)):
        raise call.mixes()
    return Shard(first.dim + (stacks and dim <= first.dim), first.blocks, origins_of(shards))


VIEW_RULES: dict[Any, Rule] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default), Call.shard),
    **dict.fromkeys(TRANSPOSITIONS, _transposed),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    **dict.fromkeys((aten.select.int, aten.unbind.int), _without),
    aten.select_backward.default: _added(2),
    aten.slice_backward.default: _slice_backward,
    **dict.fromkeys((aten.cat.default, aten.stack.default), _joined),
}

_WHOLE_VIEWS = (_view, _transposed, _unsqueeze, _squeeze)
PASSES_SUMS = {aten.alias.default, *(target for target, rule in VIEW_RULES.items() if rule in _WHOLE_VIEWS)}
"""Views that may look at a summand; what else reads one needs the sum, but for additions of two."""
