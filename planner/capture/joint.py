"""The joint graph of forward and backward from AOTAutograd, and predicates on its nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx, nn

from planner.capture.target_device import TargetDevice
from planner.capture.torch_internals import (
    FakeTensor,
    ForwardTokenAOTInput,
    InputMutationAOTOutput,
    OpOverload,
    TangentAOTInput,
    is_mutable,
    storage_id,
    written_arguments,
)

aten = torch.ops.aten

NodeT = TypeVar("NodeT")

SYMBOLIC_VALUE = "symbolic_val"
"""Where a node says what it holds for any sizes, beside what it holds for those at hand."""

_ATTENTION_DROPOUT_ARGUMENT = {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_fused_attention_overrideable": 4,
}


Reach = tuple[list[int], list[frozenset[int]]]
"""Raw output of each tangent, and for the gradient of each tensor the tangents that it depends on."""


@dataclass(frozen=True)
class JointGraph:
    """A joint graph as AOTAutograd hands it to a partition function, common subexpressions merged.

    ``module`` is the root of the attributes that the graph reads; ``inputs`` is what the graph was captured with,
    parameters and buffers included.
    """

    module: fx.GraphModule
    graph: fx.Graph
    num_forward_outputs: int
    inputs: list[torch.Tensor] = field(default_factory=list)
    functional: bool = False
    """Whether nothing in the graph may write into what it has made: Inductor wants it so."""
    outside_bytes: tuple[int, ...] = ()
    """Gradients that autograd handles outside: of outputs that are views of each other, or of inputs."""
    elsewhere: TargetDevice | None = None
    """The device that it was captured for, where that is not here."""
    varies: bool = False
    """Whether sizes or numbers of a call vary in it, so that each has a plan of its own."""
    branches: tuple[str, ...] = ()
    """What decides which branches it takes, and how; see :mod:`planner.capture.branches`."""
    leaves_results: bool = False
    """Whether it leaves tensors in attributes beside what it returns."""
    capture_seconds: float = 0.0
    """How long it took to capture."""

    @classmethod
    def without_graph(cls, inputs: list[torch.Tensor]) -> JointGraph:
        """Return a joint graph without nodes, for a step that is not one graph."""
        graph = fx.Graph()
        return cls(fx.GraphModule({}, graph), graph, 0, inputs)

    @property
    def arguments(self) -> list[fx.Node]:
        """All inputs of the forward in order, effect tokens first."""
        return [node for node in self.graph.find_nodes(op="placeholder") if not is_tangent(node)]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The forward's inputs without tokens, in the order of ``inputs`` and of the backward's outputs."""
        return [node for node in self.arguments if not isinstance(node.meta.get("desc"), ForwardTokenAOTInput)]

    @property
    def tangents(self) -> list[fx.Node]:
        """The backward's inputs: gradients of outputs."""
        return [node for node in self.graph.find_nodes(op="placeholder") if is_tangent(node)]

    @property
    def outputs(self) -> tuple[list[Any], list[Any]]:
        """Forward and backward outputs: nodes, or None where there is no gradient."""
        return self._halves(self.graph.output_node().args[0])

    @property
    def output_descriptors(self) -> tuple[list[Any], list[Any]]:
        """AOTAutograd's descriptors of forward and backward outputs."""
        output = self.graph.output_node()
        return self._halves(output.meta.get("desc") or [None] * len(output.args[0]))  # type: ignore[arg-type]

    def _halves(self, flat: Any) -> tuple[list[Any], list[Any]]:
        return list(flat[: self.num_forward_outputs]), list(flat[self.num_forward_outputs :])


def is_tangent(node: fx.Node) -> bool:
    """Tell a placeholder that the backward receives from one that the forward receives."""
    descriptor = node.meta.get("desc")
    if descriptor is not None:
        return isinstance(descriptor, TangentAOTInput)
    return "tangents" in str(node.target)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a node's recorded output holds."""
    val = node.meta.get("val")
    leaves = val if isinstance(val, (list, tuple)) else [val]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """Return what identifies the storages of nodes' recorded outputs."""
    return {storage_id(tensor) for node in nodes for tensor in tensors_of(node)}


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd traced a node for the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def fake_mode_of(graph: fx.Graph) -> Any:
    """Return the fake mode that a graph was captured in."""
    given = (tensor for node in graph.find_nodes(op="placeholder") for tensor in tensors_of(node))
    return next(tensor.fake_mode for tensor in given if isinstance(tensor, FakeTensor))


def values_of(arguments: Any) -> Any:
    """Return arguments with nodes replaced by their recorded values."""
    return fx.map_arg(arguments, lambda node: node.meta.get("val"))


def run_on_recorded(node: fx.Node) -> Any:
    """Run a call on the recorded values of its arguments."""
    args, kwargs = values_of((node.args, node.kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return draws(node.target, node.args, node.kwargs)


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: attention carries the tag even without dropout."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    position = _ATTENTION_DROPOUT_ARGUMENT.get(target.overloadpacket.__name__)
    if position is not None:
        return bool(kwargs.get("dropout_p", args[position] if len(args) > position else 0.0) != 0.0)
    if target is aten.native_dropout.default:
        return bool(args[1] != 0.0) and args[2] is not False
    return True


def is_attention(node: fx.Node) -> bool:
    """Whether a node is fused attention, whose integers are random states and lengths."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket.__name__ in _ATTENTION_DROPOUT_ARGUMENT


def reach_of(joint: JointGraph) -> Reach | None:
    """Find which gradients depend on which outputs; None if each depends on all."""
    tangents = joint.tangents
    if len(tangents) < 2:
        return None
    forward_descriptors = joint.output_descriptors[0]
    descriptors = [node.meta.get("desc") for node in tangents]
    raw_outputs = [forward_descriptors.index(d.output) for d in descriptors if isinstance(d, TangentAOTInput)]
    depends: dict[fx.Node, frozenset[int]] = {node: frozenset([i]) for i, node in enumerate(tangents)}
    for node in joint.graph.nodes:
        if node not in depends:
            depends[node] = frozenset().union(*(depends[source] for source in node.all_input_nodes))
    # Autograd knows of no numbers: sizes that vary are inputs of the program, and have no place among its gradients.
    of_tensors = (n for n, given in zip(joint.outputs[1], joint.placeholders, strict=True) if tensors_of(given))
    gradients = [depends[n] if isinstance(n, fx.Node) else frozenset() for n in of_tensors]
    everything = frozenset(range(len(tangents)))
    if all(not needed or needed == everything for needed in gradients):
        return None
    return raw_outputs, gradients


def weight_copies(joint: JointGraph) -> set[fx.Node]:
    """Return the nodes that cast a parameter to another type, as autocast does with weights."""
    given = zip(joint.placeholders, joint.inputs, strict=True)
    parameters = {node for node, tensor in given if isinstance(tensor, nn.Parameter)}
    casts = joint.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    return {node for node in casts if node.args[0] in parameters}


def mutates(node: fx.Node) -> bool:
    """Whether a node writes into one of its inputs."""
    return isinstance(node.target, OpOverload) and is_mutable(node.target)


def is_batch_norm(node: fx.Node) -> bool:
    """Whether a node is BatchNorm in training: recomputed, it takes the form without running statistics."""
    own = (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default)
    return node.target in (*own, aten.cudnn_batch_norm.default) and node.args[5] is True


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes into; cuDNN's BatchNorm does not declare that it updates statistics."""
    if node.op != "call_function":
        return []
    if is_batch_norm(node) and node.target is aten.cudnn_batch_norm.default:
        return [argument for argument in node.args[3:5] if isinstance(argument, fx.Node)]
    target: Any = node.target
    return written_arguments(target, node.args, node.kwargs, fx.Node) if isinstance(target, OpOverload) else []


def drop_unused_statistics(graph: fx.Graph) -> None:
    """Remove the running statistics, which the forward overwrites, from BatchNorm's backward, which ignores them."""
    for node in graph.nodes:
        is_cudnn = node.target is aten.cudnn_batch_norm_backward.default
        if is_cudnn or (node.target is aten.native_batch_norm_backward.default and node.args[7] is True):
            node.args = (*node.args[:3], None, None, *node.args[5:])


def needed_by_forward(joint: JointGraph) -> set[fx.Node]:
    """Return the nodes of the forward: ancestors of its outputs, writes and draws, with all their elements.

    An element that only the backward reads (a dropout mask, a saved mean) is there once its operation has
    run; to leave it to the backward would run that operation again.
    """
    forward_outputs, _ = joint.outputs
    nodes = list(joint.graph.nodes)
    roots = [n for n in forward_outputs if isinstance(n, fx.Node)]
    for node in nodes:
        # Writes and random draws stay where eager has them, whoever reads the result.
        drawn = is_random(node) and node.meta.get("partitioner_tag") == "is_forward"
        if drawn or (written_by(node) and not is_backward(node)):
            roots.append(node)
    return set(ancestors(roots, nodes))


def ancestors(roots: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the roots with their ancestors and all elements of these, in the order of ``nodes``."""
    needed, found = sources(roots, lambda node: node.all_input_nodes), []
    for node in nodes:
        if node in needed or (node.target is operator.getitem and node.args[0] in needed):
            needed.add(node)
            found.append(node)
    return found


def sources(roots: Iterable[NodeT], inputs_of: Callable[[NodeT], Iterable[NodeT]]) -> set[NodeT]:
    """Return the roots and all that can be reached from them."""
    found: set[NodeT] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(inputs_of(node))
    return found


def overwritten_inputs(joint: JointGraph) -> set[fx.Node]:
    """Return the inputs that the forward overwrites, which the backward cannot read."""
    overwritten = {argument for node in joint.graph.nodes for argument in written_by(node)}
    names = {d.mutated_input for d in joint.output_descriptors[0] if isinstance(d, InputMutationAOTOutput)}
    overwritten |= {n for n in joint.graph.nodes if n.op == "placeholder" and n.meta.get("desc") in names}
    return {n for n in overwritten if n.op == "placeholder"}


def reads_any(node: fx.Node, unavailable: set[fx.Node], alias_nodes: set[fx.Node]) -> bool:
    """Whether a node reads one of the unavailable inputs, directly or through a view."""
    read = sources(node.all_input_nodes, lambda source: source.all_input_nodes if source in alias_nodes else ())
    return not unavailable.isdisjoint(read)


_COLLECTIVES = {"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem"}
"""Namespaces of operators that talk to other processes."""


def is_collective(node: fx.Node) -> bool:
    """Whether a node is a collective."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES


def on_cpu(node: fx.Node) -> bool:
    """Whether all outputs of a node are on a CPU."""
    return all(tensor.device.type == "cpu" for tensor in tensors_of(node))
