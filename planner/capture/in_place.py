"""Find operations that can write their result over an input, and their in-place forms.

The numbers must be those of a result made anew. They are where each element is computed from the elements at its own
place, which torch's tag ``pointwise`` says; in softmax and its backward on a CPU, which go row by row and read a row
before they write it; and in what copies its first input, and then writes into the copy.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from planner.capture.autograd_accumulation import look_at
from planner.capture.joint import (
    SYMBOLIC_VALUE,
    is_backward,
    is_random,
    run_on_recorded,
    storages_of,
    tensors_of,
    values_of,
    written_by,
)
from planner.capture.lowering import LoweredGraph
from planner.capture.operands import is_opaque
from planner.capture.torch_internals import OpOverload, form_in_place, outside_tracing, storage_id

aten = torch.ops.aten

_OF_ROWS = ("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data")
_BY_ROW = {getattr(aten, name).default for name in _OF_ROWS}

_WINDOWS: dict[Any, Any] = {
    aten.as_strided_scatter.default: aten.as_strided.default,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
}
"""Operators that write a part of a copy, and the views that show that part."""

_OF_ANY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
_MADE_OF_NOTHING = {*_OF_ANY, aten.full.default, aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}
"""Operators that read no elements."""

_INTO_A_COPY = {
    *_WINDOWS,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_put.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_scatter.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}
"""Of their first input. Derivatives of indexing and of ``gather`` do so with zeros, which eager writes into."""


_NORM, _NEW_STATISTICS = aten._native_batch_norm_legit_functional.default, (3, 4)
"""BatchNorm, and where it gives new running statistics, and is given the old ones."""


def may_overwrite(lowered: LoweredGraph, *, on_cpu: bool) -> dict[int, tuple[int, ...]]:
    """Return, by operation, the values whose memory its single result can reuse; O(nodes)."""
    operations = lowered.graph.operations
    # Of the storages that the step writes into the readers must not be moved.
    written = storages_of(argument for node in lowered.joint.graph.nodes for argument in written_by(node))
    found: dict[int, tuple[int, ...]] = {}
    for index, node in enumerate(lowered.operation_nodes):
        if node is None or len(operations[index].outputs) != 1 or not _goes_by_place(node, on_cpu=on_cpu):
            continue
        if not written.isdisjoint(storages_of(node.all_input_nodes)):
            continue
        makers = ((u, lowered.operation_nodes[lowered.graph.producer[u]]) for u in operations[index].inputs)
        values = tuple(u for u, made_by in makers if _is_ours(made_by) and overwritten_argument(lowered, node, u))
        if values:
            found[index] = values
    return found


def overwritten_argument(lowered: LoweredGraph, node: fx.Node, value: int) -> fx.Node | None:
    """Return the argument with all of a value in the layout of the node's result; None if there is none."""
    shown = [argument for argument in node.all_input_nodes if value in lowered.storage_of.get(argument, ())]
    if len(shown) != 1 or shown[0] not in node.args:
        return None
    if node.target not in _WINDOWS and form_in_place(node.target, node.args[:1] == (shown[0],)) is None:
        return None
    if node.target in _INTO_A_COPY and node.args[0] is not shown[0]:
        return None
    read, (made,) = tensors_of(shown[0]), tensors_of(node)
    return shown[0] if len(read) == 1 and _layout(read[0]) == _layout(made) else None


def write_over(graph: fx.Graph, node: fx.Node, argument: fx.Node, resolve: Any) -> fx.Node:
    """Add a call of a node's operator to a graph, with arguments of that graph, that writes over one of them."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), resolve)
    over: Any = resolve(argument)
    if node.target in _WINDOWS:
        window = graph.call_function(_WINDOWS[node.target], (over, *args[2:]), kwargs)
        graph.call_function(aten.copy_.default, (window, args[1]))
        return over
    if node.target is aten.index_put.default and is_backward(node):  # the forward has looked whether indices are valid
        return graph.call_function(aten._index_put_impl_.default, (*args, *[False] * (4 - len(args)), True), kwargs)
    form = form_in_place(node.target, node.args[:1] == (argument,))
    assert form is not None
    called, keyword = form
    return graph.call_function(called, args, {**kwargs, keyword: over} if keyword else kwargs)


def called_over(node: fx.Node, argument: fx.Node, args: Any, kwargs: Any) -> Callable[[], Any]:
    """Return what calls a node's operator with tensors in place of its arguments, and writes over one of them."""
    pairs = zip(pytree.tree_leaves((node.args, node.kwargs)), pytree.tree_leaves((args, kwargs)), strict=True)
    given = {asked: tensor for asked, tensor in pairs if isinstance(asked, fx.Node)}
    graph = fx.Graph()
    operands = {asked: graph.placeholder(asked.name) for asked in given}
    graph.output(write_over(graph, node, argument, operands.__getitem__))
    return partial(fx.GraphModule({}, graph).forward, *given.values())


def update_in_place(graph: fx.Graph) -> None:
    """Write into inputs where the forward does, as eager does.

    Tracing makes a new tensor of each write into an input, and copies it over the input at the end. It is written in
    place where nothing reads the input later.
    """
    statistics: defaultdict[Any, list[Any]] = defaultdict(list)
    copy: Any
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        given, made = copy.args
        source: Any = made.args[0] if made.args else None
        if copy.users or len(made.users) > 1:
            continue
        if made.target is operator.getitem and source.target is _NORM and made.args[1] in _NEW_STATISTICS:
            statistics[source].append(copy)
        elif source is given and _can_write_over(made) and _is_last(made, copy):
            with graph.inserting_before(made):
                written = write_over(graph, made, given, lambda argument: argument)
            if written is not given:
                written.meta = {**made.meta, "val": given.meta["val"]}
            _erase_unread(graph, copy)
    for norm, copies in statistics.items():
        taken = sorted((copy.args[1].args[1], copy.args[0]) for copy in copies)
        if taken == [(at, norm.args[at]) for at in _NEW_STATISTICS] and all(_is_last(norm, copy) for copy in copies):
            norm.target = aten._native_batch_norm_legit.default
            norm.meta |= {key: made[:3] for key, made in norm.meta.items() if key in ("val", SYMBOLIC_VALUE)}
            for copy in copies:
                _erase_unread(graph, copy)


def _can_write_over(node: fx.Node) -> bool:
    """Whether an operation can write its result over its first argument."""
    has_form = node.target in _WINDOWS or form_in_place(node.target, True) is not None
    layouts = {_layout(tensor) for each in (node, node.all_input_nodes[0]) for tensor in tensors_of(each)}
    return _goes_by_place(node, on_cpu=False) and has_form and len(layouts) == 1


def _is_last(node: fx.Node, copy: fx.Node) -> bool:
    """Whether nothing reads what is copied over at the end, or looks at its memory, after a node."""
    given: Any = copy.args[0]
    storage = storage_id(given.meta["val"])
    return all(
        user < node and all(storage_id(tensor) != storage for tensor in tensors_of(user))
        for user in given.users.keys() - {node, copy}
    )


def merge_windows(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Let what is written into a part of a tensor be written there at once, where tracing copies it on the way.

    Where it is written over all of a tensor it takes that tensor's place: so does the gradient of global pooling whose
    channels come last. Sizes become numbers of this capture, so it is not for graphs that other sizes are to run.
    """
    given = graph.find_nodes(op="placeholder")
    outside = [*given, *graph.find_nodes(op="get_attr"), *graph.output_node().all_input_nodes]
    shared = {storage_id(t) for node in outside for t in tensors_of(node) if t.layout is torch.strided}
    numbers: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target not in _INTO_A_COPY:
            continue
        base: Any = node.args[0]
        if node.target in _WINDOWS:
            while _merge(module, graph, node, numbers):
                pass
            if _is_whole(node, shared):
                value = node.meta["val"]
                node.target, node.args = aten.as_strided.default, (node.args[1], [*value.shape], [*value.stride()], 0)
                look_at(node, value, run_on_recorded(node))
                _erase_unread(graph, base)
                continue
        known = {*node.all_input_nodes, *given}
        if base.target in _MADE_OF_NOTHING and len(base.users) == 1 and known.issuperset(base.all_input_nodes):
            node.prepend(base)  # as what is written is there before, it is written into the base once that is made


def _merge(module: fx.GraphModule, graph: fx.Graph, node: fx.Node, numbers: dict[Any, fx.Node]) -> bool:
    """Take out one copy of what a node writes into a part of its first argument; False if there is none."""
    made: Any
    base, made, *place = node.args
    if len(made.users) > 1 or node.kwargs or not made.args:
        return False
    written: Any = made.meta["val"]
    source, *others = made.args
    if made.target is aten.copy.default and _kind(others[0]) == _kind(made):
        node.args = (base, others[0], *place)
    elif made.target is aten.fill.Tensor and (number := _constant(module, others[0])) is not None:
        options = {"dtype": written.dtype, "device": written.device}
        key = repr(number), written.dtype, is_backward(made)
        with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")), written.fake_mode:
            if key not in numbers:
                numbers[key] = graph.call_function(aten.full.default, ([], number), options)
                numbers[key].meta = {**made.meta, "val": run_on_recorded(numbers[key])}
        with graph.inserting_before(node):
            spread = graph.call_function(aten.expand.default, (numbers[key], [*written.shape]))
        spread.meta = {**made.meta, "val": run_on_recorded(spread)}
        node.args = (base, spread, *place)
    elif made.target in _WINDOWS and (source.target, source.args) == (_WINDOWS[node.target], (base, *place)):
        part = _WINDOWS[made.target](source.meta["val"], *others[1:])
        node.target = aten.as_strided_scatter.default
        node.args = (base, others[0], [*part.shape], [*part.stride()], part.storage_offset())
    else:
        return False
    _erase_unread(graph, made)
    return True


def _is_whole(node: fx.Node, shared: set[int]) -> bool:
    """Whether a node writes over all of a tensor, in its order, what is all of a tensor made in the step."""
    base, written, *place = values_of(node.args)
    window = _WINDOWS[node.target](base, *place, **node.kwargs)
    tensors = (written, node.meta["val"], window)
    strides = zip(written.shape, written.stride(), window.stride(), strict=True)
    if not shared.isdisjoint(map(storage_id, tensors[:2])) or any(size > 1 and a != b for size, a, b in strides):
        return False
    sizes_bytes = {size for t in tensors for size in (t.nbytes, t.untyped_storage().nbytes())}
    return written.is_contiguous() and len(sizes_bytes) == 1 and not any(t.storage_offset() for t in tensors)


def _kind(node: Any) -> Any:
    return [(tensor.dtype, tensor.device, tensor.shape) for tensor in tensors_of(node)]


def _constant(module: fx.GraphModule, node: Any) -> Any:
    """Return the number that a graph has as a tensor on the CPU; None for any other tensor."""
    source = node.args[0] if node.target is aten.lift_fresh_copy.default else node
    held = getattr(module, str(source.target), None) if source.op == "get_attr" else None
    if not isinstance(held, torch.Tensor) or held.dim() or held.device.type != "cpu":
        return None
    with outside_tracing():
        return held.item()


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node, and what was made for it alone."""
    pending = [node]
    while pending:
        unread = pending.pop()
        if not unread.users and unread.op != "placeholder":
            pending += unread.all_input_nodes
            graph.erase_node(unread)


def _goes_by_place(node: fx.Node, *, on_cpu: bool) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or is_random(node):  # a random one that runs again is called in another way
        return False
    return torch.Tag.pointwise in target.tags or target in _INTO_A_COPY or (on_cpu and target in _BY_ROW)


def _is_ours(maker: fx.Node | None) -> bool:
    """Whether an operation's output is unshared: a custom operator may keep it."""
    target = maker.target if maker is not None else None
    return isinstance(target, OpOverload) and target.namespace == "aten" and not is_opaque(target)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()
