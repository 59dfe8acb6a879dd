"""Write the forward and backward fx graphs that carry out a schedule.

Nodes are emitted in the schedule's order. A view is made again from the current copy of its
storage where it is first read, so it never holds a copy longer than the simulator says. What
crosses from forward to backward is saved: one tensor for each storage. Of an offloaded value that is
its place in the host's memory.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner.capture.in_place import overwritten_argument, write_over
from planner.capture.joint import is_batch_norm, is_random
from planner.capture.lowering import LoweredGraph
from planner.capture.programs import ON_HOST
from planner.capture.symbolic import is_symbolic
from planner.capture.torch_internals import OpOverload, SavedOutput, run_and_save_rng_state, run_with_rng_state
from planner.ir.schedule import Schedule
from planner.rewrite import host_copies

aten = torch.ops.aten

_WITHOUT_STATISTICS: dict[Any, tuple[Any, tuple[None, ...], int]] = {
    aten._native_batch_norm_legit.default: (aten._native_batch_norm_legit.no_stats, (), 3),
    aten._native_batch_norm_legit_functional.default: (aten._native_batch_norm_legit.no_stats, (), 3),
    aten.cudnn_batch_norm.default: (aten.cudnn_batch_norm.default, (None, None), 4),
}
"""BatchNorm that leaves running statistics alone: its operator, what that takes in their place, how many results."""


def _group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
    """Compute GroupNorm's backward of a gradient of any layout: CPU kernels up to torch 2.13 do not look at it.

    In eager, derivatives copy such a gradient first. In a captured step tracing settled whether to, by the layouts that
    it saw; where a step's own differ all the same, the copy is made here.
    """
    layouts = zip(x.shape, gradient.stride(), x.stride(), strict=True)
    if any(size > 1 and own != wanted for size, own, wanted in layouts):
        gradient = torch.empty_like(x).copy_(gradient)
    return aten.native_group_norm_backward.default(gradient, x, *others)


_OF_ANY_LAYOUT: dict[Any, Any] = {aten.native_group_norm_backward.default: _group_norm_backward}
"""What is called in place of an operator."""

_RESHAPES = {aten.view.default, aten._unsafe_view.default}


def extract_fwd_bwd(
    lowered: LoweredGraph, schedule: Schedule, over: Mapping[int, int] | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Write the forward and backward graph modules of a schedule that the simulator accepts, in O(runs x arguments).

    ``over`` names, for operations that write over an input, the value whose place their result takes: nobody reads it
    after them. The graphs have the signatures that AOTAutograd expects of a partition: the forward gives its outputs
    and then what it saves; the backward takes what was saved and then the tangents. Saved numbers come last in the
    forward, and first in the backward.
    """
    boundary = schedule.order.index(lowered.graph.loss_index)
    forward_outputs, _ = lowered.joint.outputs
    forward_descriptors, backward_descriptors = lowered.joint.output_descriptors
    again = (index for index, runs in Counter(schedule.order).items() if runs > 1)
    replayed = {i for i in again if (node := lowered.operation_nodes[i]) is not None and is_random(node)}
    skipped = dead_recomputes(lowered, schedule)

    over = over or {}
    forward = _Emitter(lowered, schedule, replayed, over, already_run=set(), arriving=set())
    for node in lowered.joint.arguments:
        forward.take(node)
    forward.run(range(boundary), skipped)
    forward.move(boundary)

    ran, arriving = forward.already_run, forward.arriving
    backward = _Emitter(lowered, schedule, replayed, over, already_run=ran, arriving=arriving)
    for node in lowered.joint.tangents:
        backward.take(node)
    backward.run(range(boundary + 1, len(schedule.order)), skipped)
    backward_results = backward.resolve_gradients(lowered.joint.outputs[1])

    for value, place in forward.places.items():
        if value not in backward.taken_places:
            forward.copy(host_copies.keep, place)
    results = [forward.resolve_output(node) for node in forward_outputs]
    tangents = [backward.taken.pop(node) for node in lowered.joint.tangents]
    numbers = [node for node in backward.taken if is_symbolic(node.meta["val"])]
    of_numbers = [(forward.resolve(node), backward.taken.pop(node)) for node in numbers]
    saved = [
        *((forward.resolve(node), taken) for node, taken in backward.taken.items()),
        *((forward.states[index], taken) for index, taken in backward.taken_states.items()),
        *((forward.places[value], taken) for value, taken in backward.taken_places.items()),
        *of_numbers,
    ]
    forward.graph.output((*results, *(node for node, _ in saved)))
    forward.graph.output_node().meta["desc"] = [*forward_descriptors, *(SavedOutput(i) for i in range(len(saved)))]
    backward.graph.output(backward_results)
    backward.graph.output_node().meta["desc"] = backward_descriptors
    tensors = saved[: len(saved) - len(of_numbers)]
    for taken in reversed([*(taken for _, taken in (*of_numbers, *tensors)), *tangents]):
        next(iter(backward.graph.nodes)).prepend(taken)
    halves = (forward.graph, "PlannedForward"), (backward.graph, "PlannedBackward")
    planned_forward, planned_backward = (fx.GraphModule(lowered.joint.module, *half) for half in halves)
    return planned_forward, planned_backward


def dead_recomputes(lowered: LoweredGraph, schedule: Schedule) -> set[int]:
    """Return the positions of recomputed operations whose outputs are unused, once BatchNorm's read no statistics.

    A schedule runs again what an operation reads. BatchNorm that is run again leaves running statistics alone and does
    not read them, so what only prepares those, as their conversion to another element type, is not needed. If it ran
    all the same, it would read statistics of the first run, and hold them until then. Whatever else a schedule runs for
    nothing stays: it is what was asked for, and counted.
    """
    return _unread(lowered, schedule, without_statistics=True) - _unread(lowered, schedule, without_statistics=False)


def _unread(lowered: LoweredGraph, schedule: Schedule, *, without_statistics: bool) -> set[int]:
    operations, values = lowered.graph.operations, lowered.graph.values
    backwards = [*enumerate(schedule.order)][::-1]
    first = {index: position for position, index in backwards}
    returning = schedule.returning(lowered.graph)
    unread: set[int] = set()
    wanted: set[int] = set()
    for position, index in backwards:
        made = {value for value in operations[index].outputs if not values[value].retained}
        again = position > first[index]
        if again and wanted.isdisjoint(made):
            unread.add(position)
        else:
            wanted = wanted - made | _read(lowered, index, but_statistics=again and without_statistics)
        wanted.difference_update(returning.get(position, ()))
    return unread


def _read(lowered: LoweredGraph, index: int, *, but_statistics: bool) -> set[int]:
    node = lowered.operation_nodes[index]
    if node is None or not but_statistics or not is_batch_norm(node):
        return set(lowered.graph.operations[index].inputs)
    statistics = node.args[3:5]
    others = [argument for argument in node.all_input_nodes if argument not in statistics]
    return {value for argument in others for value in lowered.storage_of.get(argument, ())}


class _Emitter:
    """Writes one of the two graphs, keeping for each joint node its current copy."""

    def __init__(
        self,
        lowered: LoweredGraph,
        schedule: Schedule,
        replayed: set[int],
        over: Mapping[int, int],
        already_run: set[int],
        arriving: set[int],
    ) -> None:
        self.lowered, self.order, self.replayed, self.over = lowered, schedule.order, replayed, over
        self.already_run, self.arriving = set(already_run), set(arriving)
        """The latter are values that are being fetched, and that nobody has read yet."""
        self.graph = fx.Graph()
        self.current: dict[fx.Node, fx.Node] = {}
        self.taken: dict[fx.Node, fx.Node] = {}
        """Joint node to the placeholder that brings it in."""
        self.states: dict[int, fx.Node] = {}
        self.taken_states: dict[int, fx.Node] = {}
        self.places: dict[int, fx.Node] = {}
        """Offloaded value to its place in the host's memory."""
        self.taken_places: dict[int, fx.Node] = {}
        self._offloaded = {offload.value for offload in schedule.offloads}
        self._leaving: defaultdict[int, list[int]] = defaultdict(list)
        for offload in schedule.offloads:
            self._leaving[offload.leaves].append(offload.value)
        self._returning = schedule.returning(lowered.graph)
        self._views: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._elements = _elements(lowered)

    def run(self, positions: Iterable[int], skipped: Container[int]) -> None:
        for position in positions:
            self.move(position)
            if position in skipped:
                continue
            index = self.order[position]
            made = self.lowered.graph.operations[index].outputs
            sent = [value for value in made if value in self._offloaded and index not in self.already_run]
            self._run(index)
            for value in sent:
                node = self.lowered.value_nodes[value]
                self.places[value] = self.copy(host_copies.offload, self.current[node], meta=self._meta_of_place(value))

    def move(self, position: int) -> None:
        """Let offloaded values leave and return that do so right before a run."""
        for value in self._leaving.pop(position, ()):
            node = self.lowered.value_nodes[value]
            self.copy(host_copies.wait_offload, self._place(value), self.resolve(node))
            self.current.pop(node)
            self._forget_views(value)
        for value in self._returning.get(position, ()):
            node = self.lowered.value_nodes[value]
            self._forget_views(value)
            self.current[node] = self.copy(host_copies.reload, self._place(value), meta=node.meta)
            self.arriving.add(value)

    def copy(self, function: Any, *tensors: fx.Node, meta: Mapping[str, Any] = MappingProxyType({})) -> fx.Node:
        """Emit a call of a function of host copies; where Inductor compiles it, of its operator."""
        if not self.lowered.is_compiled:
            return self._call(meta, function, *tensors)
        more: tuple[Any, ...] = ()
        if function is host_copies.offload:
            more = (meta["val"].nbytes,)
        elif function is host_copies.reload:
            more = (meta["val"].size(), meta["val"].stride(), meta["val"].dtype, meta["val"].device)
        node = self._call(meta, host_copies.OPERATORS[function], *tensors, *more)
        # By these Inductor keeps what is given in the layout of eager.
        node.meta["eager_input_vals"] = ((*(tensor.meta["val"] for tensor in tensors), *more), {})
        return node

    def _place(self, value: int) -> fx.Node:
        """Return the place of an offloaded value; in the backward it is one of the inputs."""
        if value not in self.places:
            name = f"place_of_{self.lowered.value_nodes[value].name}"
            self.places[value] = self.taken_places[value] = self._placeholder(name, self._meta_of_place(value))
        return self.places[value]

    def _meta_of_place(self, value: int) -> dict[str, Any]:
        val = self.lowered.value_nodes[value].meta["val"]
        with val.fake_mode:
            of = torch.empty_strided(val.size(), val.stride(), dtype=val.dtype) if self.lowered.is_compiled else val
            return {"val": torch.empty(of.untyped_storage().nbytes() // val.itemsize, dtype=val.dtype), ON_HOST: True}

    def _call(self, meta: Mapping[str, Any], function: Any, *arguments: Any) -> fx.Node:
        node = self.graph.call_function(function, arguments)
        node.meta = dict(meta)
        return node

    def _forget_views(self, value: int) -> None:
        for view in self._views.pop(value, ()):
            self.current.pop(view, None)

    def resolve_output(self, node: Any) -> Any:
        """Return the graph's outputs, as the views that AOTAutograd traced."""
        if not isinstance(node, fx.Node):
            return node
        same = self.resolve(node)
        stands_for_another = self._is_view(node) and _shown_before(node) is not None
        return self.graph.node_copy(node, self.resolve) if stands_for_another else same

    def resolve_gradients(self, nodes: Sequence[Any]) -> tuple[Any, ...]:
        """Return what leaves the backward: what two gradients look at, or what came in, leaves as a view of it."""
        given: dict[Any, fx.Node | None] = {None: None}
        taken: set[fx.Node] = set()
        for node in nodes:
            if node not in given:
                found = self.resolve(node)
                is_taken = found.op == "placeholder" or found in taken
                given[node] = self.resolve_output(node) if is_taken else found
                taken.add(found)
        return tuple(given[node] for node in nodes)

    def _is_view(self, node: fx.Node) -> bool:
        return node in self.lowered.alias_nodes and node not in self._elements

    def resolve(self, node: fx.Node) -> fx.Node:
        """Return the current copy of a joint node: made before, viewed now, or taken in as an input."""
        if node in self.current:
            return self.current[node]
        if node.op == "get_attr":
            self.current[node] = self.graph.node_copy(node)
        elif self._is_view(node):
            same = _shown_before(node)
            self.current[node] = self._view(node) if same is None else self.resolve(same)
            for value in self.lowered.storage_of[node]:
                self._views[value].append(node)
        else:
            self.take(node)
        return self.current[node]

    def _view(self, node: fx.Node) -> fx.Node:
        """Emit the view of a joint node; a reshape that has not run yet is emitted as one."""
        if node.target not in _RESHAPES:
            return self.graph.node_copy(node, self.resolve)
        source = node.all_input_nodes[0]
        while source.target in _RESHAPES and self._is_view(source) and source not in self.current:
            further = source.all_input_nodes[0]
            if not further.meta["val"].is_contiguous():
                break
            source = further
        return self._call(node.meta, aten.view.default, self.resolve(source), node.args[1])

    def take(self, node: fx.Node) -> None:
        """Make a joint node an input of the graph."""
        name = node.name if node.op == "placeholder" else f"saved_{node.name}"
        self.current[node] = self.taken[node] = self._placeholder(name, node.meta)

    def _placeholder(self, name: str, meta: dict[str, Any]) -> fx.Node:
        # Placeholders stand before everything else, in the order in which they were taken.
        first_other = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with nullcontext() if first_other is None else self.graph.inserting_before(first_other):
            placeholder = self.graph.placeholder(name)
        # fx renames a node whose name is taken, and then the generated code mixes up its arguments.
        assert placeholder.name == placeholder.target, f"two nodes are called {name}"
        placeholder.meta = dict(meta)
        return placeholder

    def _run(self, index: int) -> None:
        node = self.lowered.operation_nodes[index]
        if node is None:
            return  # autograd runs it, not the graph
        for value in self.arriving.intersection(self.lowered.graph.operations[index].inputs):
            self.arriving.remove(value)
            fetched = self.resolve(self.lowered.value_nodes[value])
            self.copy(host_copies.wait_reload, fetched, self._place(value))
        again = index in self.already_run
        self.already_run.add(index)
        if again and is_batch_norm(node):
            # Running statistics were updated by the first run; a second update would be wrong.
            x, weight, bias, _mean, _variance, *others = node.args
            arguments = fx.map_arg((x, weight, bias, *others), self.resolve)
            again_by, none, _count = _WITHOUT_STATISTICS[node.target]
            new = self.graph.call_function(again_by, (*arguments[:3], *none, *arguments[3:]))
        elif index in self.replayed:
            new = self._replay(index, node) if again else self._run_and_save_state(index, node)
        elif index in self.over:
            argument = overwritten_argument(self.lowered, node, self.over[index])
            assert argument is not None
            new = write_over(self.graph, node, argument, self.resolve)
        else:
            new = self.graph.node_copy(node, self.resolve)
            new.target = _OF_ANY_LAYOUT.get(node.target, node.target)
        self._adopt(index, node, new, again)

    def _adopt(self, index: int, node: fx.Node, new: fx.Node, again: bool) -> None:
        operation, values = self.lowered.graph.operations[index], self.lowered.graph.values
        renewed = {v for v in operation.outputs if not (again and values[v].retained)}
        new.meta = dict(node.meta)
        for value in renewed:
            self._forget_views(value)
        elements = [user for user in node.users if user in self._elements]
        if not elements and (renewed or not operation.outputs):
            self.current[node] = new
        results = _WITHOUT_STATISTICS[node.target][-1] if again and is_batch_norm(node) else None
        for element in elements:
            looks_at = self.lowered.storage_of[element]
            position: int = element.args[1]  # type: ignore[assignment]
            if not element.users or (results is not None and position >= results):
                continue
            if not looks_at or not renewed.isdisjoint(looks_at):
                self.current[element] = self._call(element.meta, operator.getitem, new, position)

    def _run_and_save_state(self, index: int, node: fx.Node) -> fx.Node:
        if not self.lowered.is_compiled:
            self.states[index] = self._call(_state_meta(node), _random_state, _drawn(node).device.type)
            return self.graph.node_copy(node, self.resolve)
        pair = self._call_by(run_and_save_rng_state, node)
        self.states[index] = self._call(_state_meta(node), operator.getitem, pair, 0)
        return self.graph.call_function(operator.getitem, (pair, 1))

    def _replay(self, index: int, node: fx.Node) -> fx.Node:
        if index not in self.states:
            state = self._placeholder(f"random_state_{node.name}", _state_meta(node))
            self.states[index] = self.taken_states[index] = state
        if self.lowered.is_compiled:
            return self._call_by(run_with_rng_state, node, self.states[index])
        return self._call_by(_run_with_state, node, _drawn(node).device.type, self.states[index])

    def _call_by(self, function: Any, node: fx.Node, *state: Any) -> fx.Node:
        """Let a function call a node's operator."""
        called: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.resolve)
        return self.graph.call_function(function, (*state, called, *args), kwargs)


def _run_with_state(kind: str, state: torch.Tensor, called: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator from a saved random state, as torch's higher-order operator does.

    That one takes 25 us; with its twin in the forward over 100 us inside a step, which leaves little of it in caches.
    """
    now = _random_state(kind)
    _random(kind).set_rng_state(state)
    result = called(*args, **kwargs)
    _random(kind).set_rng_state(now)
    return result


def _random_state(kind: str) -> Any:
    """Return the random state of a kind of device; a graph that calls torch's own function runs above autograd."""
    return _random(kind).get_rng_state()


def _random(kind: str) -> Any:
    """Return the module that has a kind of device's random state."""
    return torch.cuda if kind == "cuda" else torch


def _elements(lowered: LoweredGraph) -> set[fx.Node]:
    """Return the ``getitem`` nodes that take an operation's (not a view's) output apart."""
    return {n for n in lowered.alias_nodes if n.target is operator.getitem and n.args[0] not in lowered.alias_nodes}


def _shown_before(view: fx.Node) -> fx.Node | None:
    """Return what a view of a view shows again, as ``detach`` and the transpose of a transpose do; None if it does not.

    Tracing leaves many of them, and in a step of small tensors each takes as long as any other operation.
    """
    source = view
    while isinstance(source.target, OpOverload) and source.target.is_view and len(source.all_input_nodes) == 1:
        (source,) = source.all_input_nodes
        if _shows(source) is not None and _shows(source) == _shows(view):
            return source
    return None


def _shows(node: fx.Node) -> tuple[Any, ...] | None:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    return val.dtype, val.shape, val.stride(), val.storage_offset(), val.is_conj(), val.is_neg()


def _drawn(node: fx.Node) -> torch.Tensor:
    val = node.meta["val"]
    return val[0] if isinstance(val, (list, tuple)) else val


def _state_meta(node: fx.Node) -> dict[str, Any]:
    like: Any = _drawn(node)
    return {"val": like.fake_mode.from_tensor(_random(like.device.type).get_rng_state())}
