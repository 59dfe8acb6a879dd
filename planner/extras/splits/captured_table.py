"""The table of a model for a search over splits, from one captured sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import fx, nn

from planner.capture.inputs import Inputs, LossFunction, check_module
from planner.capture.joint import JointGraph, parameter_nodes, tensors_of
from planner.capture.lowering import LoweredGraph
from planner.capture.torch_internals import OpOverload, declared_arguments, in_memory, storage_id
from planner.common.limits import SolveLimits
from planner.common.options import Training
from planner.errors import InfeasibleBudgetError, UsageError
from planner.extras.pipelines.stages import Stage
from planner.extras.splits.layers import cut
from planner.extras.splits.table import FULL, KEEP, Choice, Layer, ModelTable, Work, divisors, merged
from planner.ir.graph import Operation, Phase, TrainingGraph
from planner.ir.in_place import joined
from planner.ir.layers import find_layers, layer_among
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import simulate
from planner.measure.optimizers import optimizer_memory
from planner.session.step import Options, captured, cost, lower_step, with_loss
from planner.solvers import solved

KEPT_SHARES = (0.75, 0.5, 0.25)
"""Between a layer that keeps all and one that runs wholly again, plans are made that keep these shares."""

ATTENTION = "scaled_dot_product"

aten = torch.ops.aten

_LEFT: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Products with a parameter, and at which position their left factor stands."""

_SMALL = 0.01
"""Of the largest product's weight: smaller ones, a router's say, are computed whole, by each device for its tokens."""


def split_table(
    model: nn.Module, inputs: Inputs, loss_fn: LossFunction | None, options: Options, *, tokens: int | None
) -> ModelTable:
    """Capture one sample, and tabulate the model; ``tokens`` is the length of its sequence, None if it is none.

    Raises
    ------
    CaptureError
        If the model cannot be captured as one graph.
    UsageError
        If it has no repeated layers.
    """
    return _Tabulation(model, _WholeStep(model, inputs, loss_fn, options), options.training).table(tokens)


class _WholeStep:
    """A step of a whole model, captured with nothing around it, to be cut: its graph, costs, and what it reads."""

    def __init__(self, model: nn.Module, inputs: Inputs, loss_fn: LossFunction | None, options: Options) -> None:
        check_module(model)
        options = with_loss(model, replace(options, training=Training()), loss_fn, inputs)
        self.step = lower_step(model, captured(model, inputs, options), options)
        costs = cost(model, self.step.lowered, self.step.spec, options).costs
        in_place = joined(self.step.lowered.graph, self.step.may_overwrite, costs)
        self.graph, self.costs = in_place.graph, in_place.costs(costs)
        single = _storages_read(self.step.lowered)
        self._reads = [set[int]().union(*(single[part] for part in parts)) for parts in in_place.parts]

    def storages_read(self, stages: Sequence[Stage]) -> set[int]:
        """Return the storages of the step's inputs that stages read, directly or through views."""
        operations = (index for stage in stages for index in stage.operations if index < len(self._reads))
        return set[int]().union(*(self._reads[index] for index in operations))


class _Tabulation:
    def __init__(self, model: nn.Module, whole: _WholeStep, training: Training) -> None:
        self.model, self.whole, self.training = model, whole, training
        graph, lowered = whole.graph, whole.step.lowered
        self.joint: JointGraph = lowered.joint
        self.name, layers = graph.name, find_layers(graph)
        self.blocks = layers.blocks
        if len(self.blocks) < 2:
            raise UsageError(f"{graph.name} has no row of repeated layers: its devices can only be copies")
        self.stages = cut(graph, whole.costs)
        pairs = zip(lowered.operation_nodes, lowered.graph.operations, strict=True)
        operations = {node: operation for node, operation in pairs if node is not None}
        # What is known of operations by their keys, which stages have too.
        in_layers = [
            node
            for node, operation in operations.items()
            if operation.phase is Phase.FORWARD and layer_among(operation.module, self.blocks)
        ]
        products = _Products(in_layers, self._given, self.joint)
        self.tensor_degrees = products.degrees()
        self.summed, self.gradients_summed = (
            {operations[node].key: size_bytes for node, size_bytes in sizes.items()} for sizes in products.summed()
        )
        attention = {node: operation.key for node, operation in operations.items() if ATTENTION in operation.target}
        self.causal = {key for node, key in attention.items() if _is_causal(node)}

    def table(self, tokens: int | None) -> ModelTable:
        """Tabulate all layers; those before the row, and those after it, as one."""
        first, row, last = list[Stage](), list[Layer](), list[Stage]()
        planned: dict[Layer, Layer] = {}
        for stage in self.stages:
            if set(stage.layers) & set(self.blocks):
                kind = self._layer(stage)
                if kind not in planned:  # plans are made for each kind once
                    planned[kind] = self._layer(stage, plans=True)
                row.append(planned[kind])
            else:
                (last if row else first).append(stage)
        kinds = list(dict.fromkeys(row))
        return ModelTable(
            name=self.name,
            first=self._together(first),
            last=self._together(last),
            kinds=tuple(kinds),
            row=tuple(map(kinds.index, row)),
            tokens=tokens or 1,
            tensor_degrees=self.tensor_degrees,
            tied_bytes=self._weights_of(self._storages(first) & self._storages(last))["parameter_bytes"],
        )

    def _layer(self, stage: Stage, *, plans: bool = False) -> Layer:
        """Tabulate a stage of one layer; with ``plans`` also for what it could run again."""
        graph = _without_gradients(stage.graph)
        running = [operation for operation in graph.operations if _runs(operation)]
        forward = [operation for operation in running if operation.phase is Phase.FORWARD]
        backward = [operation for operation in running if operation.phase is not Phase.FORWARD]
        sends = (operation for operation in stage.graph.operations if operation.name == "activations sent")
        sent_bytes = max((graph.values[value].size_bytes for one in sends for value in one.inputs), default=0)
        return Layer(
            forward=self._works(forward, graph),
            backward=self._works(backward, graph),
            choices=tuple(self._choices(replace(stage, graph=graph), plans)),
            boundary_bytes=sent_bytes,
            summed_forward_bytes=_told(forward, self.summed),
            summed_backward_bytes=_told(forward, self.gradients_summed),
            **self._weights_of(self._storages([stage])),
        )

    def _together(self, stages: Sequence[Stage]) -> Layer:
        """Tabulate as one layer what stands before or after the row: all is kept, and the largest is at work."""
        layers = [self._layer(stage) for stage in stages]
        kept = [layer.choices[0] for layer in layers]
        saved_bytes = sum(choice.saved_bytes for choice in kept)
        working_bytes = max((choice.working_bytes for choice in kept), default=0)
        return Layer(
            forward=tuple(work for layer in layers for work in layer.forward),
            backward=tuple(work for layer in layers for work in layer.backward),
            choices=(Choice(name=KEEP, saved_bytes=saved_bytes, working_bytes=working_bytes),),
            boundary_bytes=layers[-1].boundary_bytes if layers else 0,
            **self._weights_of(self._storages(stages)),
        )

    def _works(self, operations: Iterable[Operation], graph: TrainingGraph) -> tuple[Work, ...]:
        """Tell what moves for each token from what moves for weights: the rest beyond the values read and made."""

        def work(operation: Operation) -> Work:
            tokens_bytes = sum(graph.values[value].size_bytes for value in {*operation.inputs, *operation.outputs})
            moved_bytes = min(operation.moved_bytes, tokens_bytes)
            return Work(
                target=operation.target,
                flops=operation.flops // (2 if _among(self.causal, operation) else 1),
                moved_bytes=moved_bytes,
                weight_bytes=operation.moved_bytes - moved_bytes,
                dtype=operation.dtype,
            )

        return merged(map(work, operations))

    def _choices(self, stage: Stage, plans: bool) -> Iterator[Choice]:
        """Yield the choices of a layer: keep all, plans in between, and run all again; the fewest bytes last."""
        graph = stage.graph
        keep = least = self._choice(KEEP, Schedule.keep_all(graph), stage)
        yield keep
        if not plans:
            return
        again = (one for one in graph.operations[: stage.wait] if _runs(one) and one.recomputable)
        all_again = recompute_lazily(graph, {stage.wait: {value for one in again for value in one.outputs}})
        full = self._choice(FULL, all_again, stage)
        effort = SolveLimits(time_limit_seconds=1.0, deterministic=True)
        for share in KEPT_SHARES:
            most_bytes = int(full.saved_bytes + share * (keep.saved_bytes - full.saved_bytes))
            problem = stage.problem(2 * (keep.saved_bytes + keep.working_bytes), most_saved_bytes=most_bytes)
            try:
                schedule = solved(problem, "auto", effort=effort).schedule
            except InfeasibleBudgetError:
                schedule = all_again
            made = self._choice(f"plan {share:.0%}", schedule, stage)
            # Each keeps no more than the one before it.
            least = made if made.saved_bytes <= least.saved_bytes else replace(least, name=made.name)
            yield least
        yield full

    def _choice(self, name: str, schedule: Schedule, stage: Stage) -> Choice:
        found = simulate(stage.graph, stage.costs, schedule)
        saved_bytes = found.timeline_bytes[schedule.order.index(stage.wait)]
        again = [stage.graph.operations[index] for before in schedule.recomputations().values() for index in before]
        return Choice(
            name=name,
            saved_bytes=saved_bytes,
            working_bytes=found.peak_bytes - saved_bytes,
            reruns=self._works(again, stage.graph),
            summed_bytes=_told(again, self.summed),
        )

    def _storages(self, stages: Sequence[Stage]) -> set[int]:
        """Return the storages of parameters that stages read."""
        return self.whole.storages_read(stages) & {storage_id(parameter) for parameter in self.model.parameters()}

    def _weights_of(self, storages: set[int]) -> dict[str, Any]:
        """Return what a layer that reads parameters of these storages has of the model, and what training holds."""
        own = [parameter for parameter in self.model.parameters() if storage_id(parameter) in storages]
        memory = optimizer_memory(
            own,
            self.training.optimizer,
            alignment_bytes=1,
            device_kind=self.whole.step.spec.kind,
            master_weights=self.training.master_weights,
        )
        sizes = {storage_id(p): in_memory(p).nbytes for p in own}
        return {
            "parameter_bytes": sum(sizes.values()),
            "gradient_bytes": sum(in_memory(p).nbytes for p in own if p.requires_grad),
            "optimizer_bytes": memory.state_bytes + memory.master_bytes,
        }

    def _given(self, node: fx.Node) -> Any:
        """Return the parameter that a node is, or is made of alone."""
        parameters = {id(parameter) for parameter in self.model.parameters()}
        known = dict(zip(self.joint.placeholders, self.joint.inputs, strict=True))
        while node not in known and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        tensor = known.get(node)
        return tensor if tensor is not None and id(tensor) in parameters else None


def _storages_read(lowered: LoweredGraph) -> list[set[int]]:
    """Return for each operation the storages of the step's inputs that it reads."""
    given = zip(lowered.joint.placeholders, lowered.joint.inputs, strict=True)
    looks_at: dict[fx.Node, set[int]] = {node: {storage_id(tensor)} for node, tensor in given}

    def read(node: fx.Node) -> set[int]:
        return set[int]().union(*(looks_at.get(source, set()) for source in node.all_input_nodes))

    for node in lowered.joint.graph.nodes:
        if node in lowered.alias_nodes:
            looks_at[node] = read(node)
    return [read(node) if node is not None else set() for node in lowered.operation_nodes]


def _runs(operation: Operation) -> bool:
    return bool(operation.dtype) and operation.phase is not Phase.LOSS


def _among(keys: Iterable[str], operation: Operation) -> bool:
    return not set(operation.keys).isdisjoint(keys)


def _told(operations: Iterable[Operation], bytes_of: Mapping[str, int]) -> int:
    return sum(bytes_of.get(key, 0) for operation in operations for key in operation.keys)


def _without_gradients(graph: TrainingGraph) -> TrainingGraph:
    """Return a graph in which gradients of parameters take nothing: they are counted as resident."""
    values = (
        replace(value, size_bytes=0) if value.retained and value.kind == "gradient" else value for value in graph.values
    )
    return replace(graph, values=tuple(values))


class _Products:
    """Products of layers with a parameter, as tensor parallelism has them: column-parallel, then row-parallel.

    A row-parallel product reads what column-parallel products or attention give, and nothing that is whole on each
    device; its result is summed. Heads are divided with the products that attention reads. Source: Shoeybi et al.,
    "Megatron-LM", 2019.
    """

    def __init__(self, nodes: Sequence[fx.Node], given: Callable[[Any], Any], joint: JointGraph) -> None:
        weights = {node: given(node.args[_LEFT[node.target] + 1]) for node in nodes if node.target in _LEFT}
        sizes = {node: weight.numel() for node, weight in weights.items() if weight is not None}
        self.large = {node for node, size in sizes.items() if size > _SMALL * max(sizes.values())}
        self.attention = [node for node in nodes if ATTENTION in str(node.target)]
        self.parameters = parameter_nodes(joint)
        self.rows: dict[fx.Node, None] = {}
        for node in nodes:
            if node in self.large and not any(self._is_whole(source) for source in self._sources(_input(node))):
                self.rows[node] = None
        self.columns = [node for node in nodes if node in self.large and node not in self.rows]

    def _sources(self, node: Any) -> Iterator[fx.Node]:
        """Yield the large products, attention and inputs of the step that a node depends on, past all else."""
        waiting, seen = [node], {node}
        while waiting:
            node = waiting.pop()
            if node in self.large or node in self.attention or node.op == "placeholder":
                yield node
                continue
            waiting += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)

    def _is_whole(self, source: fx.Node) -> bool:
        return source in self.rows or (source.op == "placeholder" and source not in self.parameters)

    def degrees(self) -> tuple[int, ...]:
        """Return by how many devices all of them can be divided, heads included."""
        units = [_shape(node)[-1] for node in self.columns]
        for attention in self.attention:
            _, heads, _, head_size = _shape(attention.args[0])
            units.append(heads)
            read = {source for one in attention.args[:3] for source in self._sources(one) if source in self.large}
            units += [_shape(node)[-1] // head_size for node in read]
        return divisors(gcd(*units)) if self.rows and units else (1,)

    def summed(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """Return the bytes that are summed over the devices in the forward, and in the backward, by product."""
        inputs = {_input(node): node for node in reversed(self.columns)}
        return {node: _bytes(node) for node in self.rows}, {node: _bytes(source) for source, node in inputs.items()}


def _shape(node: Any) -> torch.Size:
    return tensors_of(node)[0].shape


def _bytes(node: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(node))


def _input(product: fx.Node) -> fx.Node:
    """Return the left factor of a product."""
    left = product.args[_LEFT[product.target]]
    assert isinstance(left, fx.Node)
    return left


def _is_causal(node: fx.Node) -> bool:
    """Whether attention hides what comes later by itself, and so skips it."""
    assert isinstance(node.target, OpOverload)
    names = [name for name, _ in declared_arguments(node.target)]
    if "is_causal" not in names:
        return False
    at = names.index("is_causal")
    return bool(node.kwargs.get("is_causal", node.args[at] if at < len(node.args) else False))
