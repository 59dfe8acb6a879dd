"""How a tensor that is spread over devices passes an operator: one rule for each kind of operator.

A rule says how the output is spread, or raises :class:`~planner.transforms.shards.NeedsRedistribute` where
the operator needs parts that other devices have.
"""

from __future__ import annotations

from typing import Any

import torch

from planner.transforms.operators import SOFTMAX_DIM, dims_of, shape_of
from planner.transforms.shard_views import PASSES_SUMS, VIEW_RULES
from planner.transforms.shards import Call, Partial, Rule, Shard, State, merge, origins_of

aten = torch.ops.aten


def state_after(call: Call) -> Any:
    """Return the state of a call's output, or a list of states where it has several; may raise NeedsRedistribute."""
    target = call.node.target
    if not any(call.states.values()):
        return call.each(None)
    if target in PASSES_SUMS and isinstance(call[0], Partial):
        return call[0]
    if target in RULES:
        return RULES[target](call)
    if "scaled_dot_product" in str(target):
        return _attention(call)
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        raise call.mixes()
    return _pointwise(call)


def _pointwise(call: Call) -> Any:
    return call.each(merge(call, len(shape_of(call.node))))


def _reduced(adds: bool) -> Rule:
    """Make the rule of a sum, a mean, a maximum; sums over what is divided are allowed in the backward."""

    def rule(call: Call) -> State:
        state = call.shard()
        dims = dims_of(call.argument(1), len(call.shape(0)))
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


def _norm(call: Call) -> Any:
    state = call.shard()
    if state.dim >= len(call.shape(0)) - len(call.argument(1)):
        raise call.mixes()
    return call.each(state)


def _norm_backward(call: Call) -> list[State]:
    state = call.shard()
    is_normalized = state.dim >= len(call.shape(0)) - len(call.argument(2))
    if not call.is_backward or not state.is_like(call[1]) or is_normalized:
        raise call.mixes()
    return [state, *(Partial(state.origins) for _ in call.node.meta["val"][1:])]


def product(call: Call, left: int) -> State:
    """Multiply matrices, the left one at a position among the arguments."""
    rows, columns = call[left], call[left + 1]
    match rows, columns:
        case Shard(dim=0), None:
            return rows
        case None, Shard(dim=1):
            return columns
        case Shard(dim=1), Shard(dim=0) if rows.blocks == columns.blocks:
            return Partial(rows.origins | columns.origins)
    raise call.mixes()


def _addmm(call: Call) -> State:
    state = product(call, 1)
    bias, dims = call[0], len(call.shape(0))
    if isinstance(state, Partial):
        fits = bias is None
    else:
        assert isinstance(state, Shard)
        dim = state.dim - 2 + dims
        fits = (
            (bias is None and (dim < 0 or call.shape(0)[dim] == 1))
            or state.at(dim).is_like(bias)
        )  # fmt: skip
    if not fits:
        raise call.mixes()
    return state


def _bmm(call: Call) -> State:
    first, second = call.shard(), call.shard(1)
    if first.dim or not first.is_like(second):
        raise call.mixes()
    return Shard(0, first.blocks, first.origins | second.origins)


def _attention(call: Call) -> list[State]:
    """Heads are independent of each other: dimension 1 of all that has heads."""
    heads = set()
    for node, state in call.states.items():
        shape = shape_of(node)
        if isinstance(state, Shard) and state.dim == 1 and len(state.blocks) == 1:
            heads.add(shape[1])
        elif state is not None or (len(shape) >= 3 and shape[1] > 1):
            raise call.mixes()
    origins = origins_of(call.states.values())
    outputs: list[State] = []
    for tensor in call.node.meta["val"]:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 3:
            outputs.append(None)
        elif tensor.shape[1] in heads:
            outputs.append(Shard(1, (tensor.shape[1],), origins))
        else:
            raise call.mixes()
    return outputs


RULES: dict[Any, Rule] = {
    **VIEW_RULES,
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), _reduced(adds=True)),
    **dict.fromkeys((aten.mean.dim, aten.amax.default), _reduced(adds=False)),
    **{target: _along(position) for target, position in SOFTMAX_DIM.items()},
    **dict.fromkeys((aten.native_dropout.default, aten.native_dropout_backward.default), _pointwise),
    **dict.fromkeys((aten.native_layer_norm.default, aten._fused_rms_norm.default), _norm),
    **dict.fromkeys((aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default), _norm_backward),
    aten.mm.default: lambda call: product(call, 0),
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
}
