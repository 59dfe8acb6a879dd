"""Puts a step together: the eager operations that were followed, and in place of each block its own graph.

Eager operations run once, and what they hold is held as it was seen to be. A block's operations may
run again, while its backward runs, from what the block is given and what it saves. What crosses a
block's border is made once: another block, or eager PyTorch, may hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import fx

from cost_models.flops import count_flops, moved_bytes
from planner import operands
from planner.graph import Operation, Phase, TrainingGraph, Value
from planner.joint import JointGraph, mutates, tensors_of
from planner.lowering import ACCUMULATE_TARGET, GIVEN_TARGET, LoweredGraph, loss_operation, loss_values
from planner.provenance import Keys
from planner.region_trace import RESIDENT, Event, Kind, Trace
from planner.regions import Block
from planner.sharding import Parameter, Sharding
from planner.surroundings import LossMemory
from planner.torch_internals import GIVES_GRADIENTS_AWAY

RETURN_TARGET = "returns"


def put_together(
    joint: JointGraph,
    trace: Trace,
    blocks: Mapping[str, Block],
    *,
    alignment_bytes: int,
    static_bytes: dict[str, int],
    name: str = "",
    loss: LossMemory = LossMemory(),  # noqa: B008
    ranks: int = 1,
    units: dict[str, Sequence[Parameter]] | None = None,
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> LoweredGraph:
    """Give the graph of the whole step.

    Parameters
    ----------
    joint : JointGraph
        Stands for the step as a whole: its ``inputs`` are those of the model.
    trace : Trace
    blocks : mapping of str to Block
    alignment_bytes, static_bytes, name, loss, kinds
        See :func:`planner.lowering.lower`.
    ranks : int
    units : dict of str to sequence of Parameter, optional
        What FSDP2 shards over the ranks, see :class:`planner.sharding.Sharding`.

    Notes
    -----
    O(operations + reads).
    """
    builder = Builder(trace, blocks, alignment_bytes)
    if units:
        builder.sharding = Sharding(builder, units, ranks)
    graph = replace(builder.run(static_bytes, name, loss), kinds=dict(kinds))
    return LoweredGraph(joint, graph, builder.nodes, [], {}, fingerprinted=builder.as_written_before(graph))


def prefixed(path: str, key: str) -> str:
    """Give the key that an operation of a block has in the step.

    Examples
    --------
    >>> prefixed("h.3", "attn|aten.mm.default|f0"), prefixed("h.3", "|aten.add.Tensor|f0")
    ('h.3.attn|aten.mm.default|f0', 'h.3|aten.add.Tensor|f0')
    """
    module, separator, rest = key.partition("|")
    return f"{_join(path, module)}{separator}{rest}"


def _join(path: str, module: str) -> str:
    return f"{path}.{module}" if module else path


class Builder:
    """Adds one operation after the other."""

    def __init__(self, trace: Trace, blocks: Mapping[str, Block], alignment_bytes: int) -> None:
        self.trace = trace
        self.blocks = blocks
        self.alignment_bytes = alignment_bytes
        self.sharding: Sharding | None = None
        self.operations: list[Operation] = []
        self.nodes: list[fx.Node | None] = []
        self.values: list[Value] = []
        self.keys, self.keys_before = Keys(), Keys()
        self.known_as: dict[int, str] = {}
        """Operation to the key that it had in plan files written before."""
        self.phase = Phase.FORWARD
        self.eager_gradients: list[int] = []
        """Storages that eager operations make, those of gradients among them."""
        self.value_of: dict[int, int] = {}
        """Storage that was followed to value."""
        self.inside: dict[tuple[str, int], int] = {}
        """Block and its own value to value."""
        self.held: dict[int, list[int]] = {}
        """Event to the storages that are freed after it."""
        for number, storage in enumerate(trace.storages):
            if storage.last is not None:
                self.held.setdefault(storage.last, []).append(number)

    def run(self, static_bytes: dict[str, int], name: str, loss: LossMemory) -> TrainingGraph:
        """Go through the events of the step."""
        if self.sharding:
            self.sharding.begin()
        for index, event in enumerate(self.trace.events):
            if event.kind is Kind.OPERATION:
                self._eager(event, index)
            elif event.kind is Kind.LOSS:
                self._loss(event, index, loss)
            else:
                self._block(event, index)
        if self.sharding:
            self.sharding.end(self._gradients(self.eager_gradients))
        return TrainingGraph(
            operations=tuple(self.operations),
            values=tuple(self.values),
            static_bytes=static_bytes,
            alignment_bytes=self.alignment_bytes,
            name=name,
        )

    def as_written_before(self, graph: TrainingGraph) -> TrainingGraph:
        """Give the graph as fingerprints have it.

        What is eager in the backward was of no module, and what a loss works with was rounded up, as one tensor is.
        """
        return replace(
            graph,
            operations=tuple(replace(o, key=self.known_as.get(i, o.key)) for i, o in enumerate(graph.operations)),
            values=tuple(replace(value, size_bytes=self.aligned(value.size_bytes)) for value in graph.values),
        )

    def _value(self, storage: int) -> int:
        """Give the value of a storage that is made now."""
        seen = self.trace.storages[storage]
        spread = self.sharding is not None and seen.kind == "gradient"  # and then freed
        stays = seen.last is None and not spread
        self.value_of[storage] = self.new_value(f"storage {storage}", seen.size_bytes, seen.kind, stays)
        return self.value_of[storage]

    def new_value(self, name: str, size_bytes: int, kind: str = "activation", retained: bool = False) -> int:
        """Add a value."""
        self.values.append(Value(name=name, size_bytes=self.aligned(size_bytes), kind=kind, retained=retained))
        return len(self.values) - 1

    def aligned(self, size_bytes: int) -> int:
        """Round a size up as the allocator does."""
        return -(-size_bytes // self.alignment_bytes) * self.alignment_bytes

    def _gradients(self, storages: Iterable[int]) -> list[int]:
        return [self.value_of[s] for s in storages if self.trace.storages[s].kind == "gradient"]

    def _eager(self, event: Event, index: int) -> None:
        node = event.node
        assert node is not None
        val = _vals(node)
        self.eager_gradients += event.makes.values()
        self.add(
            target=str(node.target),
            module=event.module or event.derivative_of,
            module_before=event.module,
            reads=self._reads((*event.reads, *self.held.get(index, ())), made=event.makes.values()),
            makes=[self._value(storage) for storage in event.makes.values()],
            node=node,
            flops=count_flops(node.target, *val, node.meta["val"]),
            moved_bytes=moved_bytes(node.target, *val, node.meta["val"]),
            dtype=str(tensors_of(node)[0].dtype).removeprefix("torch.") if tensors_of(node) else "",
            signature=operands.signature(node) if operands.runs_alone(node) and not mutates(node) else "",
        )

    def _loss(self, event: Event, index: int, loss: LossMemory) -> None:
        if self.sharding:
            self.sharding.end_forward()
        makes = [self._value(storage) for storage in event.makes.values()]
        for value in loss_values(loss, self.alignment_bytes):
            self.values.append(value)
            makes.append(len(self.values) - 1)
        reads = self._reads((*event.reads, *self.held.get(index, ())), made=event.makes.values())
        self.operations.append(loss_operation(reads, makes))
        self.nodes.append(None)
        self.phase = Phase.BACKWARD
        if self.sharding:
            self.sharding.begin_backward()

    def _block(self, event: Event, index: int) -> None:
        block = self.blocks[event.module]
        graph, path = block.lowered.graph, block.path
        if self.sharding:
            before = self.sharding.before_forward if event.kind is Kind.FORWARD else self.sharding.before_backward
            before(path)
        if event.kind is Kind.FORWARD:
            given = [block.value(node) for node in block.given]
        else:
            given = [block.value(node) for node, _ in block.tangents]
        crossing = dict(event.makes)
        handed = {v: self.value_of.get(storage, RESIDENT) for v, storage in zip(given, event.reads, strict=True)}
        self.inside |= {(path, v): value for v, value in handed.items()}
        phase = Phase.FORWARD if event.kind is Kind.FORWARD else Phase.BACKWARD
        for operation, node in zip(graph.operations, block.lowered.operation_nodes, strict=True):
            if operation.phase is not phase or operation.target in (GIVEN_TARGET, ACCUMULATE_TARGET):
                continue
            inputs = [self.inside[path, v] for v in operation.inputs]
            outputs = []
            for v in operation.outputs:
                inner = graph.values[v]
                if v in crossing:
                    value = self._value(crossing[v])
                else:
                    value = self.new_value(f"{path}.{inner.name}", inner.size_bytes, inner.kind)
                self.inside[path, v] = value
                outputs.append(value)
            self.operations.append(
                replace(
                    operation,
                    name=f"{path}.{operation.name}",
                    key=prefixed(path, operation.key),
                    inputs=tuple(dict.fromkeys(v for v in inputs if v != RESIDENT)),
                    outputs=tuple(outputs),
                    module=_join(path, operation.module),
                    recomputable=operation.recomputable and crossing.keys().isdisjoint(operation.outputs),
                    region=path,
                )
            )
            self.nodes.append(node)
        held = self._reads(self.held.get(index, ()), made=())
        if event.kind is not Kind.FORWARD and not GIVES_GRADIENTS_AWAY:
            held += [v for v in handed.values() if v != RESIDENT]
        self.add(target=RETURN_TARGET, module=path, reads=held, makes=[])
        if self.sharding and event.kind is Kind.FORWARD:
            self.sharding.after_forward(path)
        elif self.sharding:
            gradients = self._gradients(event.makes.values())
            passed_on = any(self.trace.storages[s].kind != "gradient" for s in event.makes.values())
            self.sharding.after_backward(path, gradients, input_has_gradient=passed_on)

    def _reads(self, storages: Iterable[int], made: Iterable[int]) -> list[int]:
        """Give the values of storages, without what is resident or made by this very operation."""
        return [self.value_of[s] for s in storages if s in self.value_of and s not in made]

    def add(
        self,
        *,
        target: str,
        module: str,
        reads: Iterable[int],
        makes: Iterable[int],
        module_before: str | None = None,
        node: fx.Node | None = None,
        dtype: str = "",
        **facts: Any,
    ) -> None:
        """Add an operation that runs once; ``module_before`` is what its key had for the module before."""
        known_as = self.keys_before.next(module if module_before is None else module_before, target, self.phase)
        self.known_as[len(self.operations)] = known_as
        self.operations.append(
            Operation(
                name=f"{_join(module, target)}.{len(self.operations)}".lstrip("."),
                key=self.keys.next(module, target, self.phase),
                target=target,
                inputs=tuple(dict.fromkeys(reads)),
                outputs=tuple(makes),
                phase=self.phase,
                module=module,
                recomputable=False,
                dtype=dtype,
                **facts,
            )
        )
        self.nodes.append(node)


def _vals(node: fx.Node) -> tuple[Any, Any]:
    vals: tuple[Any, Any] = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return vals
