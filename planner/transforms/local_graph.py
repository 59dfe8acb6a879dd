"""The step of one device under tensor parallelism: the captured graph with the sizes that the device has."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from planner.capture.joint import JointGraph, fake_mode_of, run_on_recorded, tensors_of
from planner.capture.provenance import places_of
from planner.capture.torch_internals import storage_id
from planner.common.units import format_bytes
from planner.errors import UsageError
from planner.findings.finding import Finding, Severity, collapsed
from planner.transforms.operators import SHAPE_ARGUMENT, argument, shape_of
from planner.transforms.shard_views import piece
from planner.transforms.shards import Shard
from planner.transforms.tensor_parallel import Sharding, find_sharding

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalStep:
    """What one of several devices computes and holds; the joint graph's inputs are those of the whole step."""

    joint: JointGraph
    stand_ins: Mapping[int, nn.Parameter] = field(default_factory=dict)
    """By storage, the parameters of which the device has a part: tensors of its sizes, without data."""
    notes: tuple[Finding, ...] = ()

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the device has of a parameter; anything else as it is."""
        return self.stand_ins.get(storage_id(tensor), tensor)

    def model(self, model: nn.Module) -> nn.Module:
        """Return a module that holds what the device holds of a model's parameters and buffers."""
        return part_of(model, self.stand_ins) if self.stand_ins else model


def part_of(
    model: nn.Module, stand_ins: Mapping[int, nn.Parameter], storages: Container[int] | None = None
) -> nn.Module:
    """Return a module that holds a model's parameters and buffers of these storages, or what stands in for them."""

    def here(tensor: torch.Tensor) -> bool:
        return storages is None or storage_id(tensor) in storages

    part = nn.Module()
    for number, parameter in enumerate(filter(here, model.parameters())):
        part.register_parameter(f"parameter{number}", stand_ins.get(storage_id(parameter), parameter))
    for number, buffer in enumerate(filter(here, model.buffers())):
        part.register_buffer(f"buffer{number}", buffer)
    return part


def local_step(joint: JointGraph, devices: int) -> LocalStep:
    """Return the step of one of so many devices that share each layer, or raise UsageError if none can be shared."""
    if devices == 1:
        return LocalStep(joint)
    found = find_sharding(joint, devices)
    if not found.rows:
        raise UsageError(
            f"tensor_parallel={devices}: no product with a parameter can be spread over {devices} devices. Their "
            "number must divide the heads and the width of hidden layers, and what stands between two products must "
            "work on each part alone"
        )
    stand_ins = {}
    for node, tensor in zip(joint.placeholders, joint.inputs, strict=True):
        if isinstance(state := found.states[node], Shard):
            local = torch.empty(_divided(tensor.shape, state, devices), dtype=tensor.dtype, device="meta")
            stand_ins[storage_id(tensor)] = nn.Parameter(local, requires_grad=tensor.requires_grad)
    graph = _Rewrite(joint, found).run()
    return LocalStep(dataclasses.replace(joint, graph=graph), stand_ins, (_note(joint, found),))


def _divided(shape: torch.Size, state: Shard, devices: int) -> list[int]:
    return [size // devices if dim == state.dim else size for dim, size in enumerate(shape)]


class _Rewrite:
    """Copies the graph, and runs what has other sizes now once more on fake tensors."""

    def __init__(self, joint: JointGraph, found: Sharding) -> None:
        self.joint = joint
        self.found = found
        self.copies: dict[fx.Node, fx.Node] = {}
        self.changed: set[fx.Node] = set()

    def run(self) -> fx.Graph:
        graph = fx.Graph()
        with fake_mode_of(self.joint.graph):
            for node in self.joint.graph.nodes:
                copy = self.copies[node] = graph.node_copy(node, self.copies.__getitem__)
                state = self.found.states.get(node)
                if node.op == "placeholder" and isinstance(state, Shard):
                    (tensor,) = tensors_of(node)
                    size = tensor.shape[state.dim] // self.found.devices
                    copy.meta["val"] = tensor.detach().narrow(state.dim, 0, size).clone()
                    self.changed.add(node)
                elif node.op == "call_function" and not self.changed.isdisjoint(node.all_input_nodes):
                    self._run_again(node, copy)
        return graph

    def _run_again(self, node: fx.Node, copy: fx.Node) -> None:
        copy.args = self._local_arguments(node, copy)
        copy.meta["val"] = run_on_recorded(copy)
        self.changed.add(node)
        states = self.found.states[node]
        for before, after, state in zip(
            tensors_of(node), tensors_of(copy), states if isinstance(states, list) else [states], strict=False
        ):
            size = _divided(before.shape, state, self.found.devices) if isinstance(state, Shard) else before.shape
            assert list(after.shape) == list(size), f"{node.name}: {list(after.shape)} where {list(size)} was expected"

    def _local_arguments(self, node: fx.Node, copy: fx.Node) -> tuple[Any, ...]:
        """Divide what an operator is told of the sharded dimension."""
        args, devices = list(copy.args), self.found.devices
        source = node.args[0]
        state, given = self.found.states[node], self.found.states.get(source) if isinstance(source, fx.Node) else None
        if node.target in SHAPE_ARGUMENT and isinstance(state, Shard):
            args[SHAPE_ARGUMENT[node.target]] = _divided(shape_of(node), state, devices)
        if not isinstance(given, Shard) or not isinstance(source, fx.Node):
            return tuple(args)
        if node.target in (aten.slice.Tensor, aten.slice_backward.default):
            at = 2 if node.target is aten.slice.Tensor else 3
            whole = shape_of(source if at == 2 else node)
            if argument(node, at - 1, 0) % len(whole) == given.dim:
                begin, end, _ = piece(node, whole[given.dim], at)
                args[at : at + 2] = [begin // devices, end // devices]
        is_split = node.target in (aten.split.Tensor, aten.split_with_sizes.default)
        if is_split and argument(node, 2, 0) % len(shape_of(source)) == given.dim:
            sizes = argument(node, 1)
            args[1] = sizes // devices if isinstance(sizes, int) else [size // devices for size in sizes]
        return tuple(args)


def _note(joint: JointGraph, found: Sharding) -> Finding:
    places = places_of(joint.graph)
    left_whole = collapsed([places[node].module or "the model" for node in found.whole])
    summed_bytes = sum(tensor.nbytes for node in found.summed for tensor in tensors_of(node))
    return Finding(
        rule="tensor-parallel",
        severity=Severity.NOTE,
        evidence=f"over {found.devices} devices: {len(found.columns)} products are column-parallel, {len(found.rows)} "
        f"row-parallel, {len(found.whole)} whole on each device" + (f": {left_whole}" if left_whole else ""),
        cause=f"an estimate for one device: nothing runs it. {len(found.summed)} sums over the devices, of "
        f"{format_bytes(summed_bytes)} in all, take no time in it",
        fix="nothing: keep some time back for communication",
    )
