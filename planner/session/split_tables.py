"""The table of a model for a search over splits, from one captured sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

from torch import fx, nn

from planner.analysis.splits.table import Layer, ModelTable
from planner.analysis.splits.tabulate import ATTENTION, Facts, OwnWeights, layer_of
from planner.capture.inputs import Inputs, LossFunction, check_module
from planner.capture.joint import JointGraph, tensors_of
from planner.capture.torch_internals import OpOverload, declared_arguments, in_memory, storage_id
from planner.common.options import Training
from planner.errors import UsageError
from planner.ir.graph import Operation, OperationCost, TrainingGraph
from planner.ir.in_place import InPlace, joined
from planner.ir.layers import find_layers, layer_among
from planner.measure.optimizers import optimizer_memory
from planner.plans.pipeline_stages import Stage, cut
from planner.session.pipelining import storages_read
from planner.session.step import LoweredStep, Options, captured, cost, lower_step, with_loss
from planner.transforms.local_graph import part_of
from planner.transforms.operators import shape_of
from planner.transforms.tensor_parallel import Sharding, find_sharding

_DEGREES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""By how many devices layers are tried to be shared."""

_SMALL = 0.01
"""Of a layer's weights: a router's product, say, is computed whole, each device for its own tokens."""

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
        self.sharding = {degree: find_sharding(self.joint, degree) for degree in _DEGREES}

    def table(self, tokens: int | None) -> ModelTable:
        degrees = self._degrees()
        facts = self._facts(self.sharding[degrees[1]] if len(degrees) > 1 else None)
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

    def _degrees(self) -> tuple[int, ...]:
        """Return by how many devices each layer can be shared: all of its products divide, but for small ones."""
        return (1, *(degree for degree, found in self.sharding.items() if found.rows and self._divides(found)))

    def _divides(self, sharding: Sharding) -> bool:
        operations = self._operations

        def weight(nodes: Iterable[fx.Node]) -> int:
            inside = (n for n in nodes if n in operations and layer_among(operations[n].module, self.blocks))
            return sum(prod(shape_of(source)) for node in inside for source in node.all_input_nodes[-1:])

        whole, spread = weight(sharding.whole), weight((*sharding.columns, *sharding.rows))
        return whole <= _SMALL * (whole + spread)

    def _facts(self, sharding: Sharding | None) -> Facts:
        operations = self._operations
        summed = sharding.summed if sharding else frozenset()
        return Facts(
            summed={
                operation.key: sum(tensor.nbytes for tensor in tensors_of(node))
                for node, operation in operations.items()
                if node in summed
            },
            causal={o.key for node, o in operations.items() if ATTENTION in o.target and _is_causal(node)},
            ring={o.key: _keys_and_values(node) for node, o in operations.items() if ATTENTION in o.target},
            experts={o.key for node, o in operations.items() if self._expert_weight(node) is not None},
        )

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
        part = part_of(self.model, {}, storages)
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


def _keys_and_values(node: fx.Node) -> int:
    """Return the bytes of what each token is compared with, and of what it takes."""
    return sum(
        tensor.nbytes for source in node.args[1:3] if isinstance(source, fx.Node) for tensor in tensors_of(source)
    )


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
