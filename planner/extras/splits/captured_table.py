"""The table of a model for a search over splits, from one captured sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from planner.capture.inputs import Inputs, LossFunction, check_module
from planner.capture.joint import JointGraph, parameter_nodes, tensors_of
from planner.capture.torch_internals import OpOverload, declared_arguments, in_memory, storage_id
from planner.common.limits import SolveLimits
from planner.common.options import Training
from planner.errors import InfeasibleBudgetError, UsageError
from planner.extras.pipelines.stages import Stage, cut
from planner.extras.pipelines.whole_model import part_of, storages_read
from planner.extras.splits.table import FULL, KEEP, Choice, Layer, ModelTable, Work, merged
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph
from planner.ir.in_place import InPlace, joined
from planner.ir.layers import find_layers, layer_among
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import simulate
from planner.measure.optimizers import optimizer_memory
from planner.session.step import LoweredStep, Options, captured, cost, lower_step, with_loss
from planner.solvers import solved

KEPT_SHARES = (0.75, 0.5, 0.25)
"""Between a layer that keeps all and one that runs wholly again, plans are made that keep these shares."""

ATTENTION = "scaled_dot_product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of operations from elsewhere, by their keys."""

    summed: Mapping[str, int]
    """Results that devices which share layers sum, and their bytes."""
    gradients_summed: Mapping[str, int]
    """Operations of the forward, the gradients of whose inputs they sum, and the bytes of those."""
    causal: Collection[str] = ()
    """Attention that skips half of its arithmetic."""
    experts: Collection[str] = ()
    """Products with the weights of experts."""
    ring: Mapping[str, int] = field(default_factory=dict)
    """Of attention in the forward, the bytes of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWeights:
    """Bytes of what a layer's operations read of the model, and of what training holds for it."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    expert_share: float = 0.0


def layer_of(stage: Stage, weights: OwnWeights, facts: Facts, *, plans: bool) -> Layer:
    """Tabulate a stage of one layer; with ``plans`` also for what it could run again."""
    graph = _without_gradients(stage.graph)
    operations = [operation for operation in graph.operations if _runs(operation)]
    passes = {
        phase: [operation for operation in operations if (operation.phase is Phase.FORWARD) == phase]
        for phase in (True, False)
    }
    experts = [operation for operation in passes[True] if facts.experts and _is(operation, facts.experts)]
    size = [value.size_bytes for value in graph.values]
    sent_bytes = _sent_bytes(stage.graph)
    # What experts give is summed too where their devices share them.
    summed_by_experts = sent_bytes if experts else 0
    return Layer(
        forward=merged([_work(operation, graph, facts) for operation in passes[True]]),
        backward=merged([_work(operation, graph, facts) for operation in passes[False]]),
        choices=tuple(_choices(stage, graph, facts, plans)),
        parameter_bytes=weights.parameter_bytes,
        gradient_bytes=weights.gradient_bytes,
        optimizer_bytes=weights.optimizer_bytes,
        expert_share=weights.expert_share,
        boundary_bytes=sent_bytes,
        summed_forward_bytes=_told(passes[True], facts.summed) + summed_by_experts,
        summed_backward_bytes=_told(passes[True], facts.gradients_summed) + summed_by_experts,
        ring_bytes=_told(passes[True], facts.ring),
        routed_bytes=max((size[one.inputs[0]] for one in experts if one.inputs), default=0),
    )


def _runs(operation: Operation) -> bool:
    return bool(operation.dtype) and operation.phase is not Phase.LOSS


def _is(operation: Operation, keys: Collection[str]) -> bool:
    return any(key in keys for key in operation.keys)


def _without_gradients(graph: TrainingGraph) -> TrainingGraph:
    """Return a graph in which gradients of parameters take nothing: they are counted as resident."""
    values = (
        replace(value, size_bytes=0) if value.retained and value.kind == "gradient" else value for value in graph.values
    )
    return replace(graph, values=tuple(values))


def _work(operation: Operation, graph: TrainingGraph, facts: Facts) -> Work:
    """Tell what moves for each token from what moves for weights: the rest beyond the values read and made."""
    tokens = sum(graph.values[value].size_bytes for value in {*operation.inputs, *operation.outputs})
    moved_bytes = min(operation.moved_bytes, tokens)
    is_causal = _is(operation, facts.causal)
    return Work(
        target=operation.target,
        flops=operation.flops // 2 if is_causal else operation.flops,
        moved_bytes=moved_bytes,
        weight_bytes=operation.moved_bytes - moved_bytes,
        dtype=operation.dtype,
        is_attention=ATTENTION in operation.target,
        of_experts=_is(operation, facts.experts),
    )


def _sent_bytes(graph: TrainingGraph) -> int:
    sends = (operation for operation in graph.operations if operation.name == "activations sent")
    return max((graph.values[value].size_bytes for one in sends for value in one.inputs), default=0)


def _told(operations: Sequence[Operation], bytes_of: Mapping[str, int]) -> int:
    return sum(bytes_of.get(key, 0) for operation in operations for key in operation.keys)


def _choices(stage: Stage, graph: TrainingGraph, facts: Facts, plans: bool) -> list[Choice]:
    """Return the choices of a layer: keep all, plans in between, and run all again; the fewest bytes last."""
    keep = _choice(KEEP, Schedule.keep_all(graph), stage, graph, facts)
    if not plans:
        return [keep]
    forward = {
        value for operation in graph.operations[: stage.wait] if _again(operation) for value in operation.outputs
    }
    full = _choice(FULL, recompute_lazily(graph, {stage.wait: forward}), stage, graph, facts)
    found = [keep]
    problem = replace(stage, graph=graph).problem
    peak_bytes = 2 * (keep.saved_bytes + keep.working_bytes)
    effort = SolveLimits(time_limit_seconds=1.0, deterministic=True)
    for share in KEPT_SHARES:
        most = int(full.saved_bytes + share * (keep.saved_bytes - full.saved_bytes))
        try:
            schedule = solved(problem(peak_bytes, most_saved_bytes=most), "auto", effort=effort).schedule
        except InfeasibleBudgetError:
            schedule = recompute_lazily(graph, {stage.wait: forward})
        made = _choice(f"plan {share:.0%}", schedule, stage, graph, facts)
        # Each keeps no more than the one before it.
        found.append(made if made.saved_bytes <= found[-1].saved_bytes else replace(found[-1], name=made.name))
    return [*found, full]


def _again(operation: Operation) -> bool:
    return _runs(operation) and operation.recomputable


def _choice(name: str, schedule: Schedule, stage: Stage, graph: TrainingGraph, facts: Facts) -> Choice:
    costs: tuple[OperationCost, ...] = stage.costs
    found = simulate(graph, costs, schedule)
    saved_bytes = found.timeline_bytes[schedule.order.index(stage.wait)]
    again = [graph.operations[index] for before in schedule.recomputations().values() for index in before]
    return Choice(
        name=name,
        saved_bytes=saved_bytes,
        working_bytes=found.peak_bytes - saved_bytes,
        reruns=merged([_work(operation, graph, facts) for operation in again]),
        summed_bytes=_told(again, facts.summed),
    )


aten = torch.ops.aten

_LEFT: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Products with a parameter, and at which position their left factor stands."""

_DEGREES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""By how many devices layers are tried to be shared."""

_SMALL = 0.01
"""Of the largest product's weight: smaller ones, a router's say, are computed whole, by each device for its tokens."""

_EXPERTS = ("grouped_mm", "bmm", "baddbmm")
"""Products of stacked matrices; where one factor is a parameter, that has a matrix for each expert."""


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
    check_module(model)
    training = options.training
    alone = replace(options, training=Training())
    alone = with_loss(model, alone, loss_fn, inputs)
    step = lower_step(model, captured(model, inputs, alone), alone)
    costing = cost(model, step.lowered, step.spec, alone)
    in_place = joined(step.lowered.graph, step.may_overwrite, costing.costs)
    return _Tabulation(model, step, in_place, in_place.costs(costing.costs), training).table(tokens)


class _Tabulation:
    def __init__(
        self,
        model: nn.Module,
        step: LoweredStep,
        in_place: InPlace,
        costs: Sequence[OperationCost],
        training: Training,
    ) -> None:
        self.model, self.step, self.in_place, self.training = model, step, in_place, training
        self.joint: JointGraph = step.lowered.joint
        self.graph: TrainingGraph = in_place.graph
        layers = find_layers(self.graph)
        self.blocks = layers.blocks
        if len(self.blocks) < 2:
            raise UsageError(f"{self.graph.name} has no row of repeated layers: its devices can only be copies")
        forward = dict.fromkeys(name for name in layers.of[: self.graph.loss_index] if name)
        self.stages = cut(self.graph, costs, len(forward))
        single = storages_read(step.lowered)
        self.reads = [set[int]().union(*(single[part] for part in parts)) for parts in in_place.parts]

    def table(self, tokens: int | None) -> ModelTable:
        products = _Products(self._layer_nodes, self._given, self.joint)
        degrees = products.degrees()
        facts = self._facts(products if len(degrees) > 1 else None)
        kinds: dict[Layer, int] = {}
        row: list[int] = []
        plain: dict[Layer, Layer] = {}
        first: list[Layer] = []
        last: list[Layer] = []
        ends: tuple[list[Stage], list[Stage]] = [], []
        for stage in self.stages:
            if not set(stage.layers) & set(self.blocks):
                (ends[1] if row else ends[0]).append(stage)
                (last if row else first).append(layer_of(stage, self._weights([stage]), facts, plans=False))
                continue
            weights = self._weights([stage])
            as_kept = layer_of(stage, weights, facts, plans=False)
            if as_kept not in plain:  # plans are made for each kind once
                plain[as_kept] = layer_of(stage, weights, facts, plans=True)
            row.append(kinds.setdefault(plain[as_kept], len(kinds)))
        tied = self._storages(ends[0]) & self._storages(ends[1])
        return ModelTable(
            name=self.graph.name,
            first=_together(first, self._weights(ends[0])),
            last=_together(last, self._weights(ends[1])),
            kinds=tuple(kinds),
            row=tuple(row),
            tokens=tokens or 1,
            tensor_degrees=degrees,
            splits_sequences=tokens is not None and all(layer.ring_bytes for layer in kinds),
            experts=self._experts(),
            tied_bytes=self._weights_of(tied).parameter_bytes,
        )

    def _facts(self, products: _Products | None) -> Facts:
        operations = self._operations
        summed = products.summed() if products is not None else ({}, {})
        forward, backward = ({operations[node].key: size for node, size in sizes.items()} for sizes in summed)
        return Facts(
            summed=forward,
            gradients_summed=backward,
            causal={o.key for node, o in operations.items() if ATTENTION in o.target and _is_causal(node)},
            ring={o.key: _keys_and_values(node) for node, o in operations.items() if ATTENTION in o.target},
            experts={o.key for node, o in operations.items() if self._expert_weight(node) is not None},
        )

    @cached_property
    def _layer_nodes(self) -> list[fx.Node]:
        """The forward of all layers."""
        return [
            node
            for node, operation in self._operations.items()
            if operation.phase is Phase.FORWARD and layer_among(operation.module, self.blocks)
        ]

    @cached_property
    def _operations(self) -> Mapping[fx.Node, Operation]:
        lowered = self.step.lowered
        pairs = zip(lowered.operation_nodes, lowered.graph.operations, strict=True)
        return {node: operation for node, operation in pairs if node is not None}

    def _storages(self, stages: Sequence[Stage]) -> set[int]:
        """Return the storages of parameters that stages read."""
        read = set[int]().union(
            *(self.reads[index] for stage in stages for index in stage.operations if index < len(self.reads))
        )
        return read & {storage_id(parameter) for parameter in self.model.parameters()}

    def _weights(self, stages: Sequence[Stage]) -> OwnWeights:
        return self._weights_of(self._storages(stages))

    def _weights_of(self, storages: set[int]) -> OwnWeights:
        part = part_of(self.model, storages)
        spec, asked = self.step.spec, self.training
        memory = optimizer_memory(
            part, asked.optimizer, alignment_bytes=1, device_kind=spec.kind, master_weights=asked.master_weights
        )
        sizes = {storage_id(p): in_memory(p).nbytes for p in part.parameters()}
        of_experts = sum(size for storage, size in sizes.items() if storage in self._expert_storages())
        whole = sum(sizes.values())
        return OwnWeights(
            parameter_bytes=whole,
            gradient_bytes=sum(in_memory(p).nbytes for p in part.parameters() if p.requires_grad),
            optimizer_bytes=memory.state_bytes + memory.master_bytes,
            expert_share=of_experts / whole if whole else 0.0,
        )

    def _expert_weight(self, node: fx.Node) -> Any:
        """Return the parameter with a matrix for each expert that a node multiplies with, if it does."""
        if not any(name in str(node.target) for name in _EXPERTS):
            return None
        for source in node.all_input_nodes:
            given = self._given(source)
            if given is not None and given.dim() == 3:
                return given
        return None

    def _given(self, node: fx.Node) -> Any:
        parameters = {id(parameter) for parameter in self.model.parameters()}
        known = dict(zip(self.joint.placeholders, self.joint.inputs, strict=True))
        while node not in known and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        tensor = known.get(node)
        return tensor if tensor is not None and id(tensor) in parameters else None

    @cached_property
    def _expert_tensors(self) -> list[Any]:
        return [found for node in self._operations if (found := self._expert_weight(node)) is not None]

    def _expert_storages(self) -> set[int]:
        return {storage_id(tensor) for tensor in self._expert_tensors}

    def _experts(self) -> int:
        counts = {tensor.shape[0] for tensor in self._expert_tensors}
        return counts.pop() if len(counts) == 1 else 1


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
        return (1, *(n for n in _DEGREES if self.rows and not any(unit % n for unit in units)))

    def summed(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """Return the bytes that are summed over the devices in the forward, and in the backward, by product."""
        inputs = {_input(node): node for node in reversed(self.columns)}
        return {node: _bytes(node) for node in self.rows}, {node: _bytes(source) for source, node in inputs.items()}


def _shape(node: Any) -> torch.Size:
    return tensors_of(node)[0].shape


def _bytes(node: fx.Node) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(node))


def _input(product: fx.Node) -> fx.Node:
    """Return the left factor of a product."""
    left = product.args[_LEFT[product.target]]
    assert isinstance(left, fx.Node)
    return left


def _keys_and_values(node: fx.Node) -> int:
    """Return the bytes of what each token is compared with, and of what it takes."""
    return sum(_bytes(source) for source in node.args[1:3] if isinstance(source, fx.Node))


def _is_causal(node: fx.Node) -> bool:
    """Whether attention hides what comes later by itself, and so skips it."""
    assert isinstance(node.target, OpOverload)
    names = [name for name, _ in declared_arguments(node.target)]
    if "is_causal" not in names:
        return False
    at = names.index("is_causal")
    return bool(node.kwargs.get("is_causal", node.args[at] if at < len(node.args) else False))


def _together(layers: Sequence[Layer], weights: OwnWeights) -> Layer:
    """Return as one layer what stands before or after the row: all is kept, and the largest is at work."""
    if not layers:
        return Layer()
    choices = [layer.choices[0] for layer in layers]
    kept = replace(
        choices[0],
        saved_bytes=sum(choice.saved_bytes for choice in choices),
        working_bytes=max(choice.working_bytes for choice in choices),
    )
    return replace(
        layers[0],
        forward=tuple(work for layer in layers for work in layer.forward),
        backward=tuple(work for layer in layers for work in layer.backward),
        choices=(kept,),
        parameter_bytes=weights.parameter_bytes,
        gradient_bytes=weights.gradient_bytes,
        optimizer_bytes=weights.optimizer_bytes,
        boundary_bytes=layers[-1].boundary_bytes,
    )
