"""Rules for computing an operator on some rows of its inputs: one for each kind of operator.

A number of rows is given, tokens or batch entries. A rule looks at shapes, and at what is known of a
call's tensors, and says which of them hold the rows and what the call then gives for some of the rows
alone; or nothing, where the operator mixes rows, draws random numbers, or is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture.joint import is_random, mutates, tensors_of
from planner.capture.torch_internals import OpOverload

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
TRANSPOSITIONS = (aten.t.default, aten.transpose.int, aten.permute.default)

SOFTMAX_DIM = {
    aten._softmax.default: 1,
    aten._safe_softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
"""Operators that mix one dimension, and the position of the argument that names it."""

SHAPE_ARGUMENT = {
    **dict.fromkeys(VIEWS, 1),
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.new_zeros.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
}
"""Operators that are told the shape of their output, and at which position."""


class Form(Enum):
    """How a tensor depends on the rows."""

    ROWS = "rows"
    """Its leading dimensions hold them."""
    COLUMNS = "columns"
    """A matrix whose last dimension holds them."""
    SUM = "sum"
    """Some of the rows give a summand of it."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Which leading dimensions hold the rows."""

    dims: int
    each: int
    """How many consecutive entries of these dimensions, taken as one, belong to a row."""


def lead_of(shape: Sequence[int], rows: int) -> Lead | None:
    """Say how a shape holds so many rows in front, if it does.

    >>> lead_of((4, 16, 8), 64), lead_of((64, 8), 4), lead_of((8, 3), 64)
    (Lead(dims=2, each=1), Lead(dims=1, each=16), None)
    """
    entries = 1
    for dims, size in enumerate(shape, 1):
        entries *= size
        if entries and entries % rows == 0:
            return Lead(dims, entries // rows)
    return None


def part_of_shape(shape: Sequence[int], lead: Lead, rows: int) -> list[int]:
    """Return the shape of some of the rows: as many dimensions, the leading ones taken as one."""
    return [1] * (lead.dims - 1) + [rows * lead.each, *shape[lead.dims :]]


@dataclass(frozen=True, slots=True)
class Split:
    """How one call is computed for some of the rows: ``gives`` is of its outputs."""

    gives: tuple[Form, ...]
    takes: Mapping[fx.Node, Form] = field(default_factory=dict)
    """What it reads in parts; everything else it reads whole."""


@dataclass(frozen=True)
class Call:
    """One call, with what is known of the tensors around it."""

    node: fx.Node
    rows: int
    forms: Mapping[fx.Node, Form]

    def argument(self, position: int, default: Any = None) -> Any:
        """Return a positional argument."""
        return self.node.args[position] if position < len(self.node.args) else default

    def lead(self, node: fx.Node) -> Lead | None:
        """Say how a node's first tensor holds the rows."""
        return lead_of(shape_of(node), self.rows)

    def gives_rows(self, lead: Lead | None, takes: Iterable[fx.Node]) -> Split | None:
        """Return the split of a call that passes rows on, if every output holds them in the same way."""
        outputs = tensors_of(self.node)
        if lead is None or any(lead_of(tensor.shape, self.rows) != lead for tensor in outputs):
            return None
        return Split((Form.ROWS,) * len(outputs), dict.fromkeys(takes, Form.ROWS))


Rule = Callable[[Call], Split | None]
"""From a call to how it is computed for some of the rows; None where it cannot be."""


def split_of(node: fx.Node, rows: int, forms: Mapping[fx.Node, Form]) -> Split | None:
    """Say how a call is computed for some of the rows, if it can be."""
    if not isinstance(node.target, OpOverload) or not tensors_of(node) or mutates(node) or is_random(node):
        return None
    rule = RULES.get(node.target)
    if rule is None:
        rule = _pointwise if torch.Tag.pointwise in node.target.tags else None
    return rule(Call(node, rows, forms)) if rule else None


def _pointwise(call: Call) -> Split | None:
    shape, lead = shape_of(call.node), call.lead(call.node)
    if lead is None:
        return None
    takes = []
    for source in call.node.all_input_nodes:
        own = shape_of(source)
        missing = len(shape) - len(own)
        if not missing and own[: lead.dims] == shape[: lead.dims]:
            takes.append(source)
        elif any(size != 1 for size in own[: max(lead.dims - missing, 0)]):
            return None  # the same for some rows and not for others
    return call.gives_rows(lead, takes)


def _view(call: Call) -> Split | None:
    source = call.argument(0)
    return call.gives_rows(call.lead(call.node), [source]) if call.lead(source) else None


def _transposed(call: Call) -> Split | None:
    source, before = call.argument(0), dims_before(call.node)
    if before == [1, 0]:
        if call.forms.get(source) is Form.ROWS or call.forms.get(call.node) is Form.COLUMNS:
            return Split((Form.COLUMNS,), {source: Form.ROWS}) if _is_first(call.lead(source)) else None
        if call.forms.get(source) is Form.COLUMNS or call.forms.get(call.node) is Form.ROWS:
            return Split((Form.ROWS,), {source: Form.COLUMNS}) if _is_first(call.lead(call.node)) else None
        return None
    lead = call.lead(source)
    stays = lead is not None and before[: lead.dims] == [*range(lead.dims)]
    return call.gives_rows(lead, [source]) if stays else None


def _is_first(lead: Lead | None) -> bool:
    return lead is not None and lead.dims == 1


def _product(call: Call) -> Split | None:
    left, right = call.argument(0), call.argument(1)
    if left is right:
        return None
    if Form.ROWS in (call.forms.get(call.node), call.forms.get(left)):
        lead = call.lead(left)
        return call.gives_rows(lead, [left]) if _is_first(lead) else None
    if call.forms.get(left) is Form.COLUMNS or call.forms.get(right) is Form.ROWS:
        return Split((Form.SUM,), {left: Form.COLUMNS, right: Form.ROWS}) if _is_first(call.lead(right)) else None
    return None


def _product_with_bias(call: Call) -> Split | None:
    bias, left, right = (call.argument(position) for position in range(3))
    lead = call.lead(left)
    if not _is_first(lead) or len({bias, left, right}) < 3:
        return None
    shape = shape_of(bias)
    if len(shape) == 2 and shape[0] != 1:
        return call.gives_rows(lead, [bias, left]) if shape == shape_of(call.node) else None
    return call.gives_rows(lead, [left])


def _batched_product(call: Call) -> Split | None:
    lead = call.lead(call.argument(0))
    return call.gives_rows(lead, call.node.all_input_nodes) if _is_first(lead) else None


def _along(call: Call, position: int, default: int | None = None, of: int | None = 0) -> Split | None:
    """Follow an operator that mixes, takes apart or joins dimensions, which an argument names.

    ``of`` is the argument whose dimensions are counted; None stands for the output.
    """
    counted = call.node if of is None else call.argument(of)
    sources = call.node.all_input_nodes
    lead = call.lead(sources[0])
    named = call.argument(position, default)
    if lead is None or named is None:
        return None
    if any(dim < lead.dims for dim in dims_of(named, len(shape_of(counted)))):
        return None
    fronts = {shape_of(node)[: lead.dims] for node in (call.node, *sources)}
    return call.gives_rows(lead, sources) if len(fronts) == 1 else None


def _reduced(call: Call, *, adds: bool) -> Split | None:
    """Follow a sum, a mean, a maximum: over the rows only if what the rows give can be added up."""
    source = call.argument(0)
    lead = call.lead(source)
    if lead is None:
        return None
    dims = dims_of(call.argument(1), len(shape_of(source)))
    if dims.isdisjoint(range(lead.dims)):
        return call.gives_rows(lead, [source])
    if not adds or not dims.issuperset(range(lead.dims)):
        return None
    if call.node.target in MEANS and not _is_wide_float(call.node):
        return None
    return Split((Form.SUM,), {source: Form.ROWS})


def _is_wide_float(node: fx.Node) -> bool:
    """Whether sums that are divided in the end neither overflow nor lose what their mean would keep."""
    return tensors_of(node)[0].dtype in (torch.float32, torch.float64)


def _norm(call: Call) -> Split | None:
    source = call.argument(0)
    return call.gives_rows(_lead_of_norm(call, source, call.argument(1)), [source])


def _lead_of_norm(call: Call, source: fx.Node, normalized: Sequence[int]) -> Lead | None:
    """Say how what is normalized over its last dimensions holds the rows, if those are others."""
    lead = call.lead(source)
    return lead if lead and lead.dims <= len(shape_of(source)) - len(normalized) else None


def _norm_backward(call: Call, *statistics: int) -> Split | None:
    rows = [call.argument(position) for position in (0, 1, *statistics)]
    lead = _lead_of_norm(call, rows[0], call.argument(2))
    given = call.node.meta["val"]
    if not lead or not isinstance(given[0], torch.Tensor) or any(call.lead(source) != lead for source in rows):
        return None
    return Split((Form.ROWS, *(Form.SUM for _ in given[1:])), dict.fromkeys(rows, Form.ROWS))


_MEAN, _SUM = 1, 2
"""Reductions of a loss; 0 is none."""


def _loss(call: Call) -> Split | None:
    logarithms, target, reduction = call.argument(0), call.argument(1), call.argument(3)
    if call.lead(logarithms) != Lead(1, 1) or reduction not in (_MEAN, _SUM) or not _is_wide_float(logarithms):
        return None
    elements = {user.args[1] for user in call.node.users if user.target is operator.getitem}
    if reduction == _MEAN and elements != {0, 1}:
        return None  # the mean is over the weights that the other element adds up to
    return Split((Form.SUM, Form.SUM), {logarithms: Form.ROWS, target: Form.ROWS})


def _loss_backward(call: Call) -> Split | None:
    logarithms, target, reduction = call.argument(1), call.argument(2), call.argument(4)
    if call.lead(logarithms) != Lead(1, 1) or reduction not in (_MEAN, _SUM):
        return None
    return Split((Form.ROWS,), {logarithms: Form.ROWS, target: Form.ROWS})


def _made(call: Call) -> Split | None:
    return call.gives_rows(call.lead(call.node), [])


MEANS = {aten.mean.dim: aten.sum.dim_IntList, aten.mean.default: aten.sum.default}
"""Means, and the sums that are added up in their place."""

RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default), _pointwise),
    **dict.fromkeys((aten.expand.default, aten.native_dropout_backward.default), _pointwise),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(TRANSPOSITIONS, _transposed),
    aten.mm.default: _product,
    aten.addmm.default: _product_with_bias,
    aten.bmm.default: _batched_product,
    **{target: partial(_along, position=position) for target, position in SOFTMAX_DIM.items()},
    **dict.fromkeys((aten.gather.default, aten.scatter_add.default, aten.select.int), partial(_along, position=1)),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), partial(_along, position=1)),
    aten.slice.Tensor: partial(_along, position=1, default=0),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), partial(_along, position=2, default=0)),
    aten.unsqueeze.default: partial(_along, position=1, of=None),
    **dict.fromkeys((aten.slice_backward.default, aten.select_backward.default), partial(_along, position=2, of=None)),
    aten.cat.default: partial(_along, position=1, default=0, of=None),
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default, *MEANS), partial(_reduced, adds=True)),
    aten.amax.default: partial(_reduced, adds=False),
    **dict.fromkeys((aten.native_layer_norm.default, aten._fused_rms_norm.default), _norm),
    aten.native_layer_norm_backward.default: lambda call: _norm_backward(call, 3, 4),
    aten._fused_rms_norm_backward.default: lambda call: _norm_backward(call, 3),
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
    **dict.fromkeys((aten.full.default, aten.zeros.default, aten.new_zeros.default), _made),
}


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node's first tensor."""
    return tensors_of(node)[0].shape


def dims_of(given: int | Sequence[int] | None, count: int) -> set[int]:
    """Return the dimensions that an argument names, counted from the front: all where it names none.

    >>> dims_of(-1, 3), dims_of([0, -1], 3), dims_of(None, 2)
    ({2}, {0, 2}, {0, 1})
    """
    named = [given] if isinstance(given, int) else given or range(count)
    return {dim % count for dim in named}


def dims_before(node: fx.Node) -> list[int]:
    """Return where each dimension of what a transposition or permutation gives was before."""
    source, *named = node.args
    order = list(range(len(shape_of(source))))  # type: ignore[arg-type]
    if node.target is aten.permute.default:
        return [order[dim] for dim in named[0]]  # type: ignore[union-attr, index]
    first, second = named or (0, -1)
    if order:
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
    return order
