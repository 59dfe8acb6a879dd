"""From a joint fx graph to a :class:`~planner.ir.graph.TrainingGraph`; alone in reading fx metadata.

Views are merged into the storage that they look at, a multi-output operation and its
``getitem`` nodes become one operation, and what is resident (parameters, buffers, inputs) is left
out. The tables that lead back from operations and values to fx nodes go to ``planner.rewrite.graphs``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx

from cost_models.flops import count_flops, moved_bytes
from planner.capture import operands, provenance
from planner.capture.joint import (
    JointGraph,
    ancestors,
    drop_unused_statistics,
    is_batch_norm,
    is_collective,
    is_random,
    is_tangent,
    mutates,
    needed_by_forward,
    on_cpu,
    overwritten_inputs,
    reads_any,
    tensors_of,
    weight_copies,
)
from planner.capture.torch_internals import GIVES_GRADIENTS_AWAY, storage_id
from planner.errors import UnsupportedModelError
from planner.ir.builder import GraphBuilder
from planner.ir.graph import Phase, TrainingGraph
from planner.ir.static_memory import LossMemory

ACCUMULATE_TARGET = "copies of gradients that autograd cannot take over as they are"

GIVEN_TARGET = "what the rest of the step hands to this part"

CPU_RANDOM_STATE_BYTES = 5056
"""Size of ``torch.get_rng_state()``: what a recomputed random operation keeps on a CPU. On CUDA the
state is a host tensor, so it costs nothing on the device."""


@dataclass(frozen=True)
class LoweredGraph:
    """A training graph and the way back to the fx nodes that it came from.

    Parameters
    ----------
    operation_nodes : list of torch.fx.Node or None
        For each operation its node; None for the loss and for what autograd does with gradients.
    value_nodes : list of torch.fx.Node
        For each value the node whose output owns the storage.
    storage_of : dict of torch.fx.Node to tuple of int
        For each node the values that its output looks at; resident storages are left out.
    alias_nodes : set of torch.fx.Node
        Nodes that cost nothing: views and ``getitem``.
    fingerprinted : TrainingGraph, optional
        What fingerprints are made of, where plan files were written before the graph was named and sized as it is.
    """

    joint: JointGraph
    graph: TrainingGraph
    operation_nodes: list[fx.Node | None]
    value_nodes: list[fx.Node]
    storage_of: dict[fx.Node, tuple[int, ...]]
    alias_nodes: set[fx.Node] = field(default_factory=set)
    fingerprinted: TrainingGraph | None = None


def lower(
    joint: JointGraph,
    *,
    alignment_bytes: int,
    static_bytes: dict[str, int],
    name: str = "",
    loss: LossMemory = LossMemory(),  # noqa: B008
    random_state_bytes: int = CPU_RANDOM_STATE_BYTES,
    gradient_shards: int = 1,
    given: Sequence[fx.Node] = (),
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> LoweredGraph:
    """Lower a joint graph.

    Parameters
    ----------
    alignment_bytes : int
        What the allocator rounds sizes up to.
    static_bytes : dict of str to int
        What is resident before the step, by kind.
    name : str
        Name of the model.
    loss : LossMemory
        What a loss outside the graph takes.
    random_state_bytes : int
        What a random operation keeps of the device's memory if it is to be recomputed.
    gradient_shards : int
        Over how many devices each gradient is spread once it is there.
    given : sequence of torch.fx.Node
        Placeholders that are values and not resident, if the graph is a part of a step: one operation before all
        others makes them.
    kinds : mapping of str to str
        Of the model, see :func:`planner.capture.provenance.kinds_of`.

    Raises
    ------
    UnsupportedModelError
        If the graph holds symbolic sizes, or the backward needs an input that the forward overwrites.

    Notes
    -----
    O(nodes + edges).
    """
    lowering = _Lowering(joint, alignment_bytes, random_state_bytes, gradient_shards)
    return lowering.run(static_bytes, name, loss, given, kinds)


class _Lowering(GraphBuilder[fx.Node]):
    def __init__(self, joint: JointGraph, alignment_bytes: int, random_state_bytes: int, gradient_shards: int) -> None:
        super().__init__(alignment_bytes)
        self.joint = joint
        self.random_state_bytes = random_state_bytes
        self.gradient_shards = gradient_shards
        self.value_of_storage: dict[int, int | None] = {}
        """Storage to value; None marks a resident storage."""
        self.storage_of: dict[fx.Node, tuple[int, ...]] = {}
        self.alias_nodes: set[fx.Node] = set()
        self.places = provenance.Places(joint.graph)
        self.weight_copies = weight_copies(joint)

    def run(
        self,
        static_bytes: dict[str, int],
        name: str,
        loss: LossMemory,
        given: Sequence[fx.Node],
        kinds: Mapping[str, str],
    ) -> LoweredGraph:
        forward_outputs, backward_outputs = self.joint.outputs
        forward = needed_by_forward(self.joint)
        self.unavailable = overwritten_inputs(self.joint)
        self.retained = self._retained_storages(forward_outputs, backward_outputs)
        tangents = []
        drop_unused_statistics(self.joint.graph)
        self._add_given(given)
        for node in self.joint.graph.nodes:
            for tensor in tensors_of(node):
                if any(isinstance(size, torch.SymInt) for size in tensor.shape):
                    raise UnsupportedModelError(
                        f"{node.name} has a symbolic size {tuple(tensor.shape)}: plans hold for fixed sizes; "
                        "remove mark_dynamic from the inputs"
                    )
            if node.op == "placeholder" and is_tangent(node):
                tangents.append(node)
            elif node.op in ("placeholder", "get_attr") and node not in given:
                self._resident(node)
        nodes = [n for n in self.joint.graph.nodes if n.op == "call_function"]
        for node in nodes:
            if node in forward:
                self._add_node(node)
        self._add_loss(forward_outputs, tangents, loss)
        for node in ancestors([n for n in backward_outputs if isinstance(n, fx.Node)], nodes):
            if node not in forward:
                self._add_node(node)
        self._add_gradient_copies(backward_outputs)
        graph = self.finish(static_bytes, name, kinds)
        # Of what the loss makes there is none: it runs once, so nobody asks.
        value_nodes = cast("list[fx.Node]", self.value_nodes)
        return LoweredGraph(self.joint, graph, self.operation_nodes, value_nodes, self.storage_of, self.alias_nodes)

    def _retained_storages(self, forward_outputs: list[Any], backward_outputs: list[Any]) -> dict[int, str]:
        kinds: dict[int, str] = {}
        for outputs, kind in ((backward_outputs, "gradient"), (forward_outputs, "output")):
            for node in outputs:
                if isinstance(node, fx.Node):
                    kinds.update({storage_id(t): kind for t in tensors_of(node)})
        return kinds

    def _resident(self, node: fx.Node) -> None:
        for tensor in tensors_of(node):
            self.value_of_storage[storage_id(tensor)] = None
        self.storage_of[node] = ()

    def _add_given(self, nodes: Sequence[fx.Node]) -> None:
        if not nodes:
            return
        for node in nodes:
            (tensor,) = tensors_of(node)
            self.storage_of[node] = (self._new_value(node, tensor, 0, 1),)
        given = (v for node in nodes for v in self.storage_of[node])
        self.add(GIVEN_TARGET, makes=given, name="given", recomputable=False)

    def _add_node(self, node: fx.Node) -> None:
        tensors = tensors_of(node)
        reads = _distinct(v for source in node.all_input_nodes for v in self.storage_of[source])
        if node.target is operator.getitem or (tensors and not mutates(node) and self._aliases_only(tensors)):
            self._add_alias(node, tensors)
            return
        outputs = []
        for position, tensor in enumerate(tensors):
            storage = storage_id(tensor)
            if storage in self.value_of_storage:
                continue  # an operation that writes into an input: no new storage
            outputs.append(self._new_value(node, tensor, position, len(tensors)))
        self.storage_of[node] = _distinct(v for t in tensors if (v := self.value_of_storage[storage_id(t)]) is not None)
        if self.phase is Phase.BACKWARD and reads_any(node, self.unavailable, self.alias_nodes):
            raise UnsupportedModelError(
                f"the backward of {node.target} ({self.places[node].source}) reads an input that the forward "
                "overwrites: copy it before the in-place change"
            )
        place = self.places[node]
        called = (node.target, _vals(node.args), _vals(node.kwargs), node.meta.get("val"))
        self.add(
            str(node.target),
            reads,
            outputs,
            name=node.name,
            module=place.module,
            node=node,
            source=place.source,
            recomputable=self._recomputable(node),
            state_bytes=self.aligned(self.random_state_bytes) if is_random(node) and on_cpu(node) else 0,
            flops=count_flops(*called),
            moved_bytes=moved_bytes(*called),
            **operands.described(node),
        )

    def _aliases_only(self, tensors: list[torch.Tensor]) -> bool:
        return all(storage_id(tensor) in self.value_of_storage for tensor in tensors)

    def _add_alias(self, node: fx.Node, tensors: list[torch.Tensor]) -> None:
        self.alias_nodes.add(node)
        looks_at = [self.value_of_storage[storage_id(tensor)] for tensor in tensors]
        self.storage_of[node] = _distinct(v for v in looks_at if v is not None)
        source = node.args[0]
        if node.target is operator.getitem and isinstance(source, fx.Node) and source not in self.alias_nodes:
            for value in self.storage_of[node]:
                if self.value_nodes[value] is source:
                    self.value_nodes[value] = node  # the element, not the tuple, is what can be saved

    def _new_value(self, node: fx.Node, tensor: torch.Tensor, position: int, count: int) -> int:
        storage = storage_id(tensor)
        kind = self.retained.get(storage, "activation")
        shards = self.gradient_shards if kind == "gradient" else 1
        if kind == "activation" and node in self.weight_copies:
            kind = "weight copy"
        read = [t for argument in node.all_input_nodes for t in tensors_of(argument)]
        made_bytes = operands.storage_bytes(node.target, read, tensor)
        self.value_of_storage[storage] = value = self.add_value(
            f"{node.name}.{position}" if count > 1 else node.name,
            -(-made_bytes // shards),
            kind=kind,
            retained=storage in self.retained,
            node=node,
        )
        return value

    def _add_loss(self, forward_outputs: list[Any], tangents: list[fx.Node], loss: LossMemory) -> None:
        reads = _distinct(v for n in forward_outputs if isinstance(n, fx.Node) for v in self.storage_of.get(n, ()))
        outputs = []
        for node in tangents:
            made = []
            for tensor in tensors_of(node):
                made.append(self._new_value(node, tensor, 0, 1))
                # Whoever differentiates by hand holds the gradients that he gives; those of a loss go to the backward.
                retained = not (loss.is_known and GIVES_GRADIENTS_AWAY)
                self.values[-1] = replace(self.values[-1], kind="tangent", retained=retained)
            self.storage_of[node] = tuple(made)
            outputs.extend(made)
        outputs += self.add_loss_values(loss)
        for index, size_bytes in enumerate(self.joint.outside_bytes):
            if size_bytes:
                view = f"gradient {index} of a view"
                outputs.append(self.add_value(view, size_bytes, kind="tangent", retained=True))
        self.add_loss(reads, outputs)

    def _add_gradient_copies(self, gradients: list[Any]) -> None:
        """Count what autograd copies at the end: a gradient that is shared, or not laid out as what it is of."""
        seen: set[int] = set()
        reads: list[int] = []
        copies: list[int] = []
        for node, gradient in zip(self.joint.placeholders, gradients, strict=False):
            if not isinstance(gradient, fx.Node) or not self.storage_of[gradient]:
                continue
            (of,), (tensor,) = tensors_of(node), tensors_of(gradient)
            storage = storage_id(tensor)
            same_layout = of.stride() == tensor.stride() or min(of.numel(), tensor.numel()) <= 1
            if storage in seen or not same_layout or self.retained.get(storage) != "gradient":
                reads += self.storage_of[gradient]
                shard_bytes = -(-of.numel() * of.element_size() // self.gradient_shards)
                name = f"copy of {gradient.name}"
                copies.append(self.add_value(name, shard_bytes, kind="gradient", retained=True, node=gradient))
            seen.add(storage)
        if copies:
            self.add(ACCUMULATE_TARGET, reads, copies, name="accumulate", recomputable=False)

    def _recomputable(self, node: fx.Node) -> bool:
        if mutates(node) or is_collective(node):
            return False
        if reads_any(node, self.unavailable, self.alias_nodes):
            return is_batch_norm(node)
        return True


def _vals(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda node: node.meta.get("val"))


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
