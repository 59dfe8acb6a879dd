"""Lower a joint fx graph to a :class:`~planner.ir.graph.TrainingGraph`; alone in reading fx metadata.

Views are merged into the storage that they look at, a multi-output operation and its
``getitem`` nodes become one operation, and what is resident (parameters, buffers, inputs) is left
out. The tables that lead back from operations and values to fx nodes go to ``planner.rewrite.graphs``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from cost_models.flops import count_flops, moved_bytes
from planner.capture import operands, provenance
from planner.capture.autograd_accumulation import gradient_copies
from planner.capture.common_subexpressions import COMPUTED_AGAIN
from planner.capture.inductor_order_internals import is_in_a_kernel_of_inductors
from planner.capture.inputs import are_dropped
from planner.capture.joint import (
    JointGraph,
    ancestors,
    is_batch_norm,
    is_collective,
    is_random,
    mutates,
    needed_by_forward,
    on_cpu,
    overwritten_inputs,
    reads_any,
    sources,
    storages_of,
    tensors_of,
    values_of,
    weight_copies,
    written_by,
)
from planner.capture.operands import is_opaque
from planner.capture.torch_internals import GIVES_GRADIENTS_AWAY, InputMutationAOTOutput, OpOverload, storage_id
from planner.errors import UnsupportedModelError
from planner.ir.builder import GraphBuilder, StepContext
from planner.ir.graph import ACCUMULATE_TARGET, Phase, TrainingGraph, chooses

GIVEN_TARGET = "what the rest of the step hands to this part"


@dataclass(frozen=True)
class LoweredGraph:
    """A training graph and the way back to the fx nodes that it came from."""

    joint: JointGraph
    graph: TrainingGraph
    operation_nodes: list[fx.Node | None]
    """For each operation its node; None for the loss and for what autograd does with gradients."""
    value_nodes: list[fx.Node] = field(default_factory=list)
    """For each value the node whose output owns the storage."""
    storage_of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """For each node the values that its output looks at; resident storages are left out."""
    alias_nodes: set[fx.Node] = field(default_factory=set)
    """Nodes that cost nothing: views and ``getitem``."""
    parts: Mapping[fx.Graph, LoweredGraph] = field(default_factory=dict)
    """Where a step is put together of blocks, what each of their graphs is in itself."""

    def graph_of(self, node: fx.Node) -> LoweredGraph:
        """Return the graph that a node is of: that of a block, or this one."""
        return self.parts.get(node.graph, self)

    @property
    def is_compiled(self) -> bool:
        """Whether Inductor compiles it, or the blocks that it is put together of."""
        return any(each.joint.functional for each in (self, *self.parts.values()))

    def is_written_by_inductor(self, node: fx.Node) -> bool:
        """Whether a node is computed inside a kernel that Inductor writes, and not by an operator's own."""
        return self.graph_of(node).joint.functional and is_in_a_kernel_of_inductors(node)


def lower(joint: JointGraph, context: StepContext, given: Sequence[fx.Node] = ()) -> LoweredGraph:
    """Lower a joint graph, in O(nodes + edges).

    ``given`` are placeholders that are values and not resident, if the graph is a part of a step: one operation before
    all others makes them. An UnsupportedModelError says that there are symbolic sizes, or that the backward needs an
    input that the forward overwrites.
    """
    return _Lowering(joint, context).run(given)


class _Lowering(GraphBuilder[fx.Node]):
    def __init__(self, joint: JointGraph, context: StepContext) -> None:
        super().__init__(context)
        self.joint = joint
        self.value_of_storage: dict[int, int | None] = {}
        """Storage to value; None marks a resident storage."""
        self.storage_of: dict[fx.Node, tuple[int, ...]] = {}
        self.alias_nodes: set[fx.Node] = set()
        self.places = provenance.places_of(joint.graph)
        self.weight_copies = weight_copies(joint)
        self.unavailable = overwritten_inputs(joint)
        self.retained: dict[int, str] = {}
        """What a storage is that is there at the end of the step."""
        for kind, outputs in zip(("gradient", "output"), reversed(joint.outputs), strict=True):
            for node in outputs:
                if isinstance(node, fx.Node):
                    self.retained.update((storage_id(tensor), kind) for tensor in tensors_of(node))
        self.dropped = self._dropped()

    def _returned(self) -> dict[int, tuple[fx.Node, torch.Tensor]]:
        """Return the storages that the caller is given, each with a node and its tensor."""
        forward, descriptors = self.joint.outputs[0], self.joint.output_descriptors[0]
        nodes = [n for n, d in zip(forward, descriptors, strict=True) if not isinstance(d, InputMutationAOTOutput)]
        returned = [(n, t) for n in nodes if isinstance(n, fx.Node) for t in tensors_of(n)]
        given = [*self.joint.arguments, *self.joint.graph.find_nodes(op="get_attr")]
        resident = storages_of(given)
        return {storage_id(t): (node, t) for node, t in returned if storage_id(t) not in resident}

    def _dropped(self) -> set[int]:
        """Return the storages of outputs that the loop drops before the backward."""
        losses = [tensor for node in self.joint.tangents for tensor in tensors_of(node)]
        loss = self.context.loss if self.context.loss.is_known else None
        if self.joint.leaves_results or not are_dropped(self.context.outputs, losses, loss):
            return set()
        gradients = storages_of(node for node in self.joint.outputs[1] if isinstance(node, fx.Node))
        return {storage for storage, (_, tensor) in self._returned().items() if tensor.dim()} - gradients

    def run(self, given: Sequence[fx.Node]) -> LoweredGraph:
        graph = self.joint.graph
        forward_outputs, backward_outputs = self.joint.outputs
        forward = needed_by_forward(self.joint)
        self._add_given(given)
        self.add_kept((n.name, t.untyped_storage().nbytes(), n) for n, t in self._returned().values())
        for node in graph.nodes:
            for tensor in tensors_of(node):
                if any(isinstance(size, torch.SymInt) for size in tensor.shape):
                    source = self.places[node].source
                    raise UnsupportedModelError(
                        f"{node.name}{f' (at {source})' if source else ''} has a size that is known only when the "
                        "forward runs (from data or a random number): a plan is for fixed sizes"
                    )
        for node in [*self.joint.arguments, *graph.find_nodes(op="get_attr")]:
            if node not in given:
                self.value_of_storage.update((storage_id(tensor), None) for tensor in tensors_of(node))
                self.storage_of[node] = ()
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        for node in nodes:
            if node in forward:
                self._add_node(node)
        self._add_loss(forward_outputs)
        for node in ancestors([n for n in backward_outputs if isinstance(n, fx.Node)], nodes):
            if node not in forward:
                self._add_node(node)
        self._add_gradient_copies(backward_outputs)
        # Of what the loss makes there is none: it runs once, so nobody asks.
        value_nodes = cast("list[fx.Node]", self.value_nodes)
        lowered = self.finish()
        return LoweredGraph(self.joint, lowered, self.operation_nodes, value_nodes, self.storage_of, self.alias_nodes)

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
        reads = [v for source in node.all_input_nodes for v in self.storage_of[source]]
        is_known = [storage_id(tensor) in self.value_of_storage for tensor in tensors]
        if node.target is operator.getitem or (tensors and not mutates(node) and all(is_known)):
            self._add_alias(node, tensors)
            return
        # One that writes into an input makes no storage of that.
        outputs = [
            self._new_value(node, tensor, position, len(tensors))
            for position, tensor in enumerate(tensors)
            if storage_id(tensor) not in self.value_of_storage
        ]
        self.storage_of[node] = self._looked_at(tensors)
        reads_overwritten = reads_any(node, self.unavailable, self.alias_nodes)
        if self.phase is Phase.BACKWARD and reads_overwritten:
            raise UnsupportedModelError(
                f"the backward of {node.target} ({self.places[node].source}) reads an input that the forward "
                "overwrites: copy it before the in-place change"
            )
        place, once = self.places[node], is_collective(node) or chooses(str(node.target))
        called = (node.target, *values_of((node.args, node.kwargs)), node.meta.get("val"))
        self.add(
            str(node.target),
            reads,
            outputs,
            name=node.name,
            module=place.module,
            node=node,
            source=place.source,
            recomputable=is_batch_norm(node) or not (mutates(node) or once or reads_overwritten),
            state_bytes=self.random_state_bytes if is_random(node) and on_cpu(node) else 0,
            flops=count_flops(*called),
            moved_bytes=moved_bytes(*called),
            again=COMPUTED_AGAIN in node.meta,
            **operands.described(node, in_place=is_batch_norm(node)),
        )

    def _looked_at(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        values = (self.value_of_storage[storage_id(tensor)] for tensor in tensors)
        return tuple(dict.fromkeys(value for value in values if value is not None))

    def _add_alias(self, node: fx.Node, tensors: list[torch.Tensor]) -> None:
        self.alias_nodes.add(node)
        self.storage_of[node] = self._looked_at(tensors)
        source = node.args[0]
        if node.target is operator.getitem and isinstance(source, fx.Node) and source not in self.alias_nodes:
            for value in self.storage_of[node]:
                if self.value_nodes[value] is source:
                    self.value_nodes[value] = node  # the element, not the tuple, is what can be saved

    def _new_value(self, node: fx.Node, tensor: torch.Tensor, position: int, count: int) -> int:
        storage = storage_id(tensor)
        kind = self.retained.get(storage, "activation")
        shards = self.context.gradient_shards if kind == "gradient" else 1
        if kind == "activation" and node in self.weight_copies:
            kind = "weight copy"
        read = [t for argument in node.all_input_nodes for t in tensors_of(argument)]
        made_bytes = operands.storage_bytes(node.target, read, tensor)
        self.value_of_storage[storage] = value = self.add_value(
            f"{node.name}.{position}" if count > 1 else node.name,
            -(-made_bytes // shards),
            kind=kind,
            retained=storage in self.retained and storage not in self.dropped,
            node=node,
        )
        return value

    def _add_loss(self, forward_outputs: list[Any]) -> None:
        reads = [v for n in forward_outputs if isinstance(n, fx.Node) for v in self.storage_of.get(n, ())]
        # Whoever differentiates by hand holds the gradients that he gives; those of a loss go to the backward.
        retained = not (self.context.loss.is_known and GIVES_GRADIENTS_AWAY)
        outputs: list[int] = []
        for node in self.joint.tangents:
            self.storage_of[node] = tuple(self._new_value(node, tensor, 0, 1) for tensor in tensors_of(node))
            for value in self.storage_of[node]:
                self.values[value] = replace(self.values[value], kind="tangent", retained=retained)
            outputs.extend(self.storage_of[node])
        outputs += self.add_loss_values()
        for index, size_bytes in enumerate(self.joint.outside_bytes):
            if size_bytes:
                view = f"gradient {index} of a view"
                outputs.append(self.add_value(view, size_bytes, kind="tangent", retained=True))
        self.add_loss(reads, outputs)

    def _add_gradient_copies(self, gradients: list[Any]) -> None:
        """Add what autograd copies at the end; a gradient stands for the copy that replaces it, as large as it."""
        pairs = [
            (node, gradient)
            for node, gradient in zip(self.joint.placeholders, gradients, strict=True)
            if isinstance(gradient, fx.Node) and self.storage_of[gradient]
        ]
        tensors = [(tensors_of(node)[0], tensors_of(gradient)[0]) for node, gradient in pairs]
        copies = gradient_copies(tensors, {storage for storage, kind in self.retained.items() if kind != "gradient"})
        copied = [*copies.beside, *copies.instead]
        if not copied:
            return
        shards = self.context.gradient_shards
        makes = [
            self.add_value(
                f"copy of {pairs[position][1].name}",
                -(-tensors[position][0].nbytes // shards),
                kind="gradient",
                retained=True,
                node=pairs[position][1],
            )
            for position in copies.beside
        ]
        if copies.working_bytes:
            makes.append(self.add_value("gradient that is copied", -(-copies.working_bytes // shards), kind="gradient"))
        reads = (value for position in copied for value in self.storage_of[pairs[position][1]])
        self.add(ACCUMULATE_TARGET, reads, makes, name="accumulate", recomputable=False)


_PURE = ("aten", "prims")
"""Whose operators do nothing but what their schemas and tags say."""


def runs_after(lowered: LoweredGraph) -> dict[int, tuple[int, ...]]:
    """Return, for operations by index, earlier ones that must stay before them; O(nodes + arguments).

    No value need pass between them: both draw random numbers, talk to other processes, are not torch's own, write into
    memory that the other reads or writes (parameters, buffers and inputs are no values), or one makes a number that the
    other takes. What follows from others is left out: of three that draw, the third names the second.
    """
    index_of = {node: index for index, node in enumerate(lowered.operation_nodes) if node is not None}
    after: defaultdict[int, set[int]] = defaultdict(set)
    chained: int | None = None
    wrote: dict[int, int] = {}
    read_since: defaultdict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(lowered.operation_nodes):
        if node is None:
            # Autograd runs it: once all is there, or between forward and backward, which is where it stays anyway.
            after[index].update(range(index))
            continue
        # What makes what it is called with and that is no tensor of the step.
        read = sources(node.all_input_nodes, lambda at: at.all_input_nodes if at in lowered.alias_nodes else ())
        after[index].update(index_of[at] for at in read if at in index_of and not lowered.storage_of.get(at))
        if _is_chained(node):
            if chained is not None:
                after[index].add(chained)
            chained = index
        written = storages_of(written_by(node))
        for storage in storages_of(node.all_input_nodes):
            if storage in wrote:
                after[index].add(wrote[storage])
            if storage in written:
                after[index].update(read_since.pop(storage, ()))
                wrote[storage] = index
            else:
                read_since[storage].append(index)
    return {index: tuple(sorted(earlier)) for index, earlier in after.items() if earlier}


def _is_chained(node: fx.Node) -> bool:
    """Whether an operation does more than its results and what it writes into tell."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in _PURE or is_opaque(target):
        return True
    return is_random(node) or is_collective(node)
