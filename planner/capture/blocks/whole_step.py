"""Lower captured blocks, and the eager operations recorded around them, to one training graph.

Eager operations run once, and what they hold is held as it was seen to be. A block's operations may
run again, while its backward runs, from what the block is given and what it saves. What crosses a
block's border is made once: another block, or eager PyTorch, may hold it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import torch

from planner.capture.blocks.regions import Block, Passage, Recorder
from planner.capture.joint import JointGraph
from planner.capture.lowering import GIVEN_TARGET, LoweredGraph
from planner.capture.sharding import StepBuilder, Units, spread_gradients
from planner.capture.storages import Run, Turn, freed_after
from planner.capture.torch_internals import GIVES_GRADIENTS_AWAY
from planner.ir.builder import StepContext
from planner.ir.graph import ACCUMULATE_TARGET, FOUND_TARGET, LOSS_KEY, Phase, TrainingGraph

RETURN_TARGET = "returns"


def put_together(
    inputs: list[torch.Tensor], trace: Recorder, blocks: Mapping[str, Block], context: StepContext, units: Units | None
) -> LoweredGraph:
    """Return the graph of a model given ``inputs``, whose ``units`` FSDP2 shards, in O(operations + reads)."""
    builder = Builder(trace, blocks, context)
    if units:
        builder.spread = spread_gradients(units, trace.gradients)
        builder.shard(units, builder.gradient_of)
    parts = {block.lowered.joint.graph: block.lowered for block in blocks.values()}
    return LoweredGraph(JointGraph.without_graph(inputs), builder.run(), builder.operation_nodes, parts=parts)


def prefixed(path: str, key: str) -> str:
    """Return the key that an operation of a block has in the step; what comes after its forward is its returning there.

    >>> prefixed("h.3", "attn|aten.mm.default|f0"), prefixed("h.3", "|aten.add.Tensor|f0"), prefixed("h.3", "|loss|l0")
    ('h.3.attn|aten.mm.default|f0', 'h.3|aten.add.Tensor|f0', 'h.3|returns|f0')
    """
    if key == LOSS_KEY:
        return f"{path}|{RETURN_TARGET}|f0"
    module, separator, rest = key.partition("|")
    return f"{_join(path, module)}{separator}{rest}"


def _join(path: str, module: str) -> str:
    return f"{path}.{module}" if module else path


class Builder(StepBuilder):
    """Adds the events of the step in order."""

    def __init__(self, trace: Recorder, blocks: Mapping[str, Block], context: StepContext) -> None:
        super().__init__(context)
        self.trace, self.blocks = trace, blocks
        self.spread: set[int] = set()
        """Storages of gradients that FSDP2 spreads, and then frees."""
        self.value_of: dict[int | None, int] = {}
        """Storage that was followed to value."""
        self.inside: dict[tuple[str, int], int | None] = {}
        """Block and its own value to value; None for what is resident."""
        self.held = freed_after(trace.storages)

    def gradient_of(self, name: str) -> int | None:
        """Return the value that is the gradient of a parameter, by its name; None where there is none yet."""
        return self.value_of.get(self.trace.gradients.get(name))

    def run(self) -> TrainingGraph:
        """Add all events of the step."""
        if self.trace.found:
            self.add_once(FOUND_TARGET, "", (), [self._value(storage) for storage in self.trace.found])
        returned = [(at, seen) for at, seen in enumerate(self.trace.storages) if seen.kind == "output"]
        self.add_kept((f"storage {at}", seen.size_bytes, None) for at, seen in returned)
        for index, event in enumerate(self.trace.events):
            if isinstance(event, Turn):
                self.add_turn(event.module, event.is_entered, self._reads(self.held[index], made=()))
            elif isinstance(event, Run):
                self._eager(event, index)
            elif event.phase is Phase.LOSS:
                makes = [self._value(storage) for storage in event.makes.values()]
                makes += self.add_loss_values()
                self.add_loss(self._reads((*event.reads, *self.held[index]), made=event.makes.values()), makes)
            else:
                self._block(event, index)
        if self.sharding:
            self.sharding.end()
        return self.finish()

    def _value(self, storage: int) -> int:
        """Return the value of a storage that is made now."""
        seen = self.trace.storages[storage]
        stays = seen.died is None and storage not in self.spread
        self.value_of[storage] = self.add_value(f"storage {storage}", seen.size_bytes, kind=seen.kind, retained=stays)
        return self.value_of[storage]

    def _eager(self, run: Run, index: int) -> None:
        self.add_once(
            str(run.node.target),
            run.module or run.derivative_of,
            self._reads((*run.reads, *self.held[index]), made=run.makes),
            [self._value(storage) for storage in run.makes],
            node=run.node,
            **run.facts,
        )

    def _block(self, event: Passage, index: int) -> None:
        block = self.blocks[event.module]
        graph, path = block.lowered.graph, block.path
        is_forward = event.phase is Phase.FORWARD
        given = block.given if is_forward else [node for node, _ in block.tangents]
        crossing = event.makes
        handed = {block.value(n): self.value_of.get(storage) for n, storage in zip(given, event.reads, strict=True)}
        self.inside |= {(path, v): value for v, value in handed.items()}
        for operation, node in zip(graph.operations, block.lowered.operation_nodes, strict=True):
            if operation.phase is not self.phase or operation.target in (GIVEN_TARGET, ACCUMULATE_TARGET):
                continue
            inputs = [self.inside[path, v] for v in operation.inputs]
            outputs = []
            for v in operation.outputs:
                of = graph.values[v]
                if v in crossing:
                    value = self._value(crossing[v])
                else:
                    value = self.add_value(f"{path}.{of.name}", of.size_bytes, kind=of.kind, retained=of.retained)
                self.inside[path, v] = value
                outputs.append(value)
            self.append(
                replace(
                    operation,
                    name=f"{path}.{operation.name}",
                    key=prefixed(path, operation.key),
                    inputs=tuple(dict.fromkeys(v for v in inputs if v is not None)),
                    outputs=tuple(outputs),
                    module=_join(path, operation.module),
                    recomputable=operation.recomputable and crossing.keys().isdisjoint(operation.outputs),
                    region=path,
                ),
                node,
            )
        held = self._reads(self.held[index], made=())
        if not is_forward and not GIVES_GRADIENTS_AWAY:
            held += [v for v in handed.values() if v is not None]
        self.add_once(RETURN_TARGET, path, held)

    def _reads(self, storages: Iterable[int | None], made: Container[int | None]) -> list[int]:
        """Return the values of storages that are neither resident nor made by this operation."""
        return [self.value_of[s] for s in storages if s in self.value_of and s not in made]
