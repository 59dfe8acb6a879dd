"""FLOPs and memory traffic of one aten operator, from the shapes it is called with.

Conventions are those of ``torch.utils.flop_counter``: a multiply-add counts as two, biases as
nothing, and attention as if there were no causal mask (kernels skip about half of the work there).
What has no formula counts the elements of its largest output, which never outweighs its traffic.

Nothing is read but shapes, strides and storages, so fake tensors will do. torch is imported on
the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MATRIX_OPERANDS = {"mm": 2, "addmm": 3, "bmm": 2, "baddbmm": 3, "_scaled_mm": 2}
"""Leading arguments that matter; overloads with ``out_dtype`` have more than torch's formulas take."""

_ATTENTION_KERNELS = ("flash", "efficient", "cudnn")
"""Each has a forward and, with the gradient of the output before the query, a backward."""

_GATHERED = {
    "aten.embedding": 0,
    "aten._embedding_bag": 0,
    "aten._embedding_bag_forward_only": 0,
    "aten.gather": 0,
    "aten.index": 0,
    "aten.index_select": 0,
    "aten.take": 0,
    "aten._unsafe_index": 0,
    "aten._unsafe_masked_index": 0,
}
"""Operators that read no more of one argument, at this position, than they return."""

_UNREAD = {
    "aten.bernoulli.p": 0,
    "aten.full_like": 0,
    "aten.max_pool2d_with_indices_backward": 1,
    "aten.nll_loss_backward": 1,
    "aten.nll_loss_forward": 0,
    "aten.nll_loss2d_backward": 1,
    "aten.nll_loss2d_forward": 0,
    "aten.new_full": 0,
    "aten.new_ones": 0,
    "aten.new_zeros": 0,
    "aten.ones_like": 0,
    "aten.rand_like": 0,
    "aten.randint_like": 0,
    "aten.randn_like": 0,
    "aten.zeros_like": 0,
}
"""Operators, or overloads, that take only the shape of one argument, at this position, or next to nothing of it."""


_UNWRITTEN = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
"""Operators that write nothing into what they make."""


def count_flops(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    """Count the floating-point operations of one call, given its (fake) tensors; what makes no tensor counts nothing.

    Examples
    --------
    >>> import torch
    >>> a, b = torch.empty(4, 8), torch.empty(8, 16)
    >>> count_flops(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    1024
    """
    packet = getattr(target, "overloadpacket", target)
    if _moves_nothing(target):
        return 0
    formula = _formulas().get(packet) or _OF_OUR_OWN.get(str(packet))
    if formula is None:
        return max((_numel(tensor) for tensor in _tensors(output)), default=0)
    args, kwargs, output = _without_symbols((tuple(args), dict(kwargs), output))
    return int(formula(*args, **kwargs, out_val=output))


def moved_bytes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    """Count the bytes that one call has to read and write, given its (fake) tensors.

    Every storage is read once, of a view no more than it shows, and every output is written once. What is gathered
    from (an embedding's table) counts as much as is taken out of it.

    Examples
    --------
    >>> import torch
    >>> a = torch.empty(1000)
    >>> moved_bytes(torch.ops.aten.add.Tensor, (a, a), {}, a + a)
    8000
    """
    if _moves_nothing(target):
        return 0
    written = _distinct_bytes(_tensors(output))
    total = written + _distinct_bytes(read_whole(target, args, kwargs))
    gathered = _position(_GATHERED, target)
    if gathered is not None and gathered < len(args):
        total += min(_distinct_bytes(_tensors(args[gathered])), written)
    return total


def read_whole(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call that are read from end to end, not only for their shape or a few rows.

    Examples
    --------
    >>> import torch
    >>> table, rows = torch.empty(1000, 8), torch.tensor([3, 5])
    >>> [tensor.shape for tensor in read_whole(torch.ops.aten.embedding.default, (table, rows), {})]
    [torch.Size([2])]
    """
    if _moves_nothing(target):
        return []
    elsewhere = _position(_GATHERED, target), _position(_UNREAD, target)
    read = [argument for position, argument in enumerate(args) if position not in elsewhere]
    return _tensors((read, dict(kwargs)))


def _position(table: Mapping[str, int], target: Any) -> int | None:
    """Return where an operator has the argument that a table is about."""
    return table.get(str(getattr(target, "overloadpacket", target)), table.get(str(target)))


def _moves_nothing(target: Any) -> bool:
    return _is_view(target) or str(getattr(target, "overloadpacket", target)) in _UNWRITTEN


def _is_view(target: Any) -> bool:
    # Autograd must not know _unsafe_view for a view, but it copies nothing either.
    return getattr(target, "is_view", False) or str(target).startswith("aten._unsafe_view")


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    import torch
    from torch.utils import flop_counter

    aten = torch.ops.aten
    formulas = dict(flop_counter.flop_registry)
    for name, count in _MATRIX_OPERANDS.items():
        packet = getattr(aten, name)
        formulas[packet] = _with_leading(formulas[packet], count)
    for kernel in _ATTENTION_KERNELS:
        forward = f"_scaled_dot_product_{kernel}_attention"
        for packet, query_position in ((getattr(aten, forward), 0), (getattr(aten, f"{forward}_backward"), 1)):
            formulas[packet] = _with_repeated_heads(formulas[packet], query_position)
    flash, overridable = "_scaled_dot_product_flash_attention", "_scaled_dot_product_fused_attention_overrideable"
    formulas |= {
        aten.convolution_backward: _convolution_backward,
        getattr(aten, f"{flash}_for_cpu"): formulas[getattr(aten, flash)],
        getattr(aten, f"{flash}_for_cpu_backward"): formulas[getattr(aten, f"{flash}_backward")],
        getattr(aten, overridable): formulas[getattr(aten, flash)],
        getattr(aten, f"{overridable}_backward"): formulas[getattr(aten, f"{flash}_backward")],
        aten._addmm_activation: formulas[aten.addmm],
        aten.addmm_: formulas[aten.addmm],
        aten._grouped_mm: _rows_by_columns,
        aten._scaled_grouped_mm: _rows_by_columns,
        aten.linear: lambda a, weight, *_, **__: 2 * a.numel() * weight.shape[0],
        aten.mv: lambda a, *_, **__: 2 * a.numel(),
        aten.dot: lambda a, *_, **__: 2 * a.numel(),
        aten.addmv: lambda _, a, *__, **___: 2 * a.numel(),
    }
    return formulas


def _with_leading(formula: Callable[..., int], count: int) -> Callable[..., int]:
    def leading(*args: Any, out_val: Any, **_: Any) -> int:
        return formula(*args[:count], *([None] * (4 - count) if formula.__name__ == "_scaled_mm_flop" else ()))

    return leading


def _with_repeated_heads(formula: Callable[..., int], query_position: int) -> Callable[..., int]:
    """Torch's formulas of 2.11 refuse keys and values with fewer heads than the query; later ones count this."""
    first = query_position + 1

    def repeated(*args: Any, out_val: Any, **kwargs: Any) -> int:
        heads = args[query_position].shape[1]
        # The formulas take a shape as well as a tensor.
        shapes = [(tensor.shape[0], heads, *tensor.shape[2:]) for tensor in args[first : first + 2]]
        return formula(*args[:first], *shapes, *args[first + 2 :], out_val=out_val, **kwargs)

    return repeated


def _convolution_backward(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Torch's formula, save that it forgets the groups in the gradient of the weight."""
    from torch.utils import flop_counter

    formula = flop_counter.flop_registry[flop_counter.aten.convolution_backward]
    input_mask, weight_mask = [args[10][0], False, False], [False, args[10][1], False]
    of_input = formula(*args[:10], input_mask, out_val=out_val)
    of_weight = formula(*args[:10], weight_mask, out_val=out_val)
    return int(of_input + of_weight // args[9])


def _backward_of_rows_by_columns(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * _rows_by_columns(a, b)


def _rows_by_columns(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Each row is multiplied with one of the matrices, whichever it is."""
    return int(2 * a.numel() * b.shape[-1])


def _lstm_layer(x: torch.Tensor, w0: torch.Tensor, w1: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every step multiplies its input and the state before it with their weights."""
    return 2 * x.shape[0] * x.shape[1] * (w0.numel() + w1.numel())


def _backward_of_lstm_layer(x: torch.Tensor, w0: torch.Tensor, w1: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * _lstm_layer(x, w0, w1)


def _cudnn_rnn(x: torch.Tensor, parameters: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * sum(p.numel() for p in parameters if p.dim() > 1)


def _backward_of_cudnn_rnn(x: torch.Tensor, parameters: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    return 2 * _cudnn_rnn(x, parameters)


def _tensors(tree: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _hint(size: Any) -> int:
    """Return the value that a symbolic size was traced with; ``int`` of it would add a guard."""
    return int(size.node.hint) if hasattr(size, "node") else int(size)


def _numel(tensor: torch.Tensor) -> int:
    return prod(_hint(size) for size in tensor.shape)


def _without_symbols(tree: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return _hint(leaf)
        if isinstance(leaf, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in leaf.shape):
            return torch.empty([_hint(size) for size in leaf.shape], dtype=leaf.dtype, device="meta")
        return leaf

    return tree_map(replaced, tree)


def _distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes that tensors show of their storages, each storage at most once."""
    shown: dict[int, dict[Any, int]] = {}
    size: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is not _strided():
            continue
        storage = tensor.untyped_storage()
        key = id(storage)  # torch gives one Python object for each storage as long as that lives
        strides = tuple(_hint(stride) for stride in tensor.stride())
        shape = tuple(_hint(length) for length in tensor.shape)
        # An expanded dimension has stride 0: the same bytes over and over.
        elements = prod(length for length, stride in zip(shape, strides, strict=True) if stride or not length)
        view = (_hint(tensor.storage_offset()), shape, strides)
        shown.setdefault(key, {})[view] = elements * tensor.element_size()
        size[key] = _hint(storage.nbytes())
    return sum(min(sum(views.values()), size[key]) for key, views in shown.items())


@cache
def _strided() -> Any:
    import torch

    return torch.strided


_OF_OUR_OWN: dict[str, Callable[..., int]] = {
    "aten._cudnn_rnn": _cudnn_rnn,
    "aten._cudnn_rnn_backward": _backward_of_cudnn_rnn,
    "aten.mkldnn_rnn_layer": _lstm_layer,
    "aten.mkldnn_rnn_layer_backward": _backward_of_lstm_layer,
    "transformers.grouped_mm_fallback": _rows_by_columns,
    "transformers.grouped_mm_fallback_backward": _backward_of_rows_by_columns,
}
"""Formulas where torch has none, by the operator's name: some are there once their module is imported."""
