"""What the code that Inductor drafts for a block holds, as operations that stand for the code in a step.

The code runs on fake tensors, and what it makes is added up. When what it is given is freed, the step alone knows:
others may hold it too. So a backward becomes one operation for each stretch of its code in which the same of what it
is given is needed: it reads that, and makes one value as large as all that the code holds then.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from planner.capture.call_nodes import CallNodes
from planner.capture.inductor_internals import Draft
from planner.capture.joint import tensors_of
from planner.capture.lowering import GIVEN_TARGET, LoweredGraph
from planner.capture.torch_internals import FakeTensor, storage_id
from planner.capture.trees import tensors_in
from planner.ir.graph import Operation, OperationCost, Phase, Value
from planner.measure.workspace import TrialLimits
from planner.rewrite.inductor_peak import Allocations, workspace_of

CODE_TARGET = "compiled code"


def with_code(
    lowered: LoweredGraph,
    given: Sequence[fx.Node],
    drafts: Sequence[Draft],
    costs: Sequence[OperationCost],
    effort: TrialLimits,
) -> LoweredGraph:
    """Return a block's graph with the drafts of its code in place of its operations.

    ``given`` are placeholders that the rest of the step hands to the block; values that cross its border keep their
    numbers. For ``costs`` and ``effort`` see :func:`planner.rewrite.inductor_peak.peak_of_drafts`.
    """
    seen = _Followed(lowered, given, drafts, costs, {})
    known = workspace_of(seen.calls, drafts[0], effort)
    return _Followed(lowered, given, drafts, costs, known).lowered


class _Stretches(Allocations):
    """Tells what the code holds at most while the same of what it is given is alive."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.peaks_bytes = [0]
        """Of each stretch."""
        self.last: dict[int, int] = {}
        """The last stretch of what has been freed, by storage."""

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin a new stretch whenever one of these is freed."""
        for storage in {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}.values():
            weakref.finalize(storage, self._ended, id(storage))

    def reach(self, more_bytes: int) -> None:
        """Take note that so much more is held for a moment."""
        super().reach(more_bytes)
        self.peaks_bytes[-1] = max(self.peaks_bytes[-1], self.live_bytes + more_bytes)

    def _ended(self, storage: int) -> None:
        self._numbers.pop(storage, None)  # another may have its place from now on
        if not self._is_over:
            self.last[storage] = len(self.peaks_bytes) - 1
            self.peaks_bytes.append(self.live_bytes)


@dataclass
class _Followed:
    """The two drafts of a block, run on fake tensors."""

    block: LoweredGraph
    given: Sequence[fx.Node]
    drafts: Sequence[Draft]
    costs: Sequence[OperationCost]
    known: Mapping[str, int]
    calls: dict[str, fx.Node] = field(default_factory=dict)
    """Calls whose workspace can be tried, by signature."""

    def __post_init__(self) -> None:
        graph = self.block.graph
        self._values = list(graph.values)
        self._operations = [operation for operation in graph.operations if operation.target == GIVEN_TARGET]
        self._run()
        # Of what is inside of the block in its graph nothing is there: values keep their numbers, and have no bytes.
        made = {value for operation in self._operations for value in operation.outputs}
        inside = set(range(len(self._values))) - made
        for value in inside:
            self._values[value] = replace(self._values[value], size_bytes=0)
        last = self._operations[-1]
        self._operations[-1] = replace(last, outputs=(*last.outputs, *sorted(inside)))
        operations = tuple(self._operations)
        done = replace(graph, operations=operations, values=tuple(self._values))
        self.lowered = replace(self.block, graph=done, operation_nodes=[None] * len(operations))

    def _run(self) -> None:
        forward, backward = self.drafts
        joint = self.block.joint
        mode = next(t.fake_mode for t in forward.inputs if isinstance(t, FakeTensor))
        own = [t for node, t in zip(joint.arguments, forward.inputs, strict=True) if node not in self.given]
        with mode:
            # What is given is new here, so that it is seen when the code lets go of it.
            arguments = [
                _like(tensor) if node in self.given else tensor
                for node, tensor in zip(joint.arguments, forward.inputs, strict=True)
            ]
        value_of: dict[int, int] = {}
        """By storage, the value that the step has for it."""
        for node, tensor in zip(joint.arguments, arguments, strict=True):
            if node in self.given:
                value_of[storage_id(tensor)] = self._value(node)
        recorder = self._recorder(mode, arguments)
        with mode, recorder:
            made = list(forward.run(list(arguments)))
        recorder.finish()
        count = len(joint.outputs[0])
        outputs = _leaving(self.block, joint.outputs[0], made[:count])
        beyond_bytes = self._beyond_bytes(outputs, recorder)
        for value, tensor in outputs.items():
            value_of.setdefault(storage_id(tensor), value)
        kept = []
        for tensor in tensors_in(made[count:]):
            if storage_id(tensor) not in value_of and recorder.number(tensor) is not None:
                kept.append(self._new_value("saved", recorder.size_bytes(tensor)))
                value_of[storage_id(tensor)] = kept[-1]
        reads = tuple(dict.fromkeys(self._value(node) for node in self.given))
        self._add(Phase.FORWARD, [max(recorder.peaks_bytes)], [reads], [*outputs, *kept], beyond_bytes)
        self._operations.append(self.block.graph.operations[self.block.graph.loss_index])

        saved = made[count:]
        with mode:
            tangents = [_like(tensor) for tensor in backward.inputs[len(saved) :]]
        for node, tensor in zip(joint.tangents, tangents, strict=True):
            value_of[storage_id(tensor)] = self._value(node)
        recorder = self._recorder(mode, [own, saved, tangents])
        watched = [t for t in tensors_in([saved, tangents]) if storage_id(t) in value_of]
        needed = {storage_id(tensor): value_of[storage_id(tensor)] for tensor in watched}
        recorder.watch(watched)
        handed = [*saved, *tangents]
        del arguments, made, saved, tangents, outputs, tensor, watched
        with mode, recorder:
            gradients = list(backward.run(handed))
        recorder.finish()
        leaving = _leaving(self.block, joint.outputs[1], gradients)
        beyond_bytes = self._beyond_bytes(leaving, recorder)
        for node, gradient in zip(joint.outputs[1], gradients, strict=True):
            if isinstance(node, fx.Node) and tensors_of(node)[0].stride() != gradient.stride():
                beyond_bytes += gradient.nbytes  # autograd copies one whose layout is not that of its parameter
        stretches = range(len(recorder.peaks_bytes))
        last = {value: recorder.last.get(storage, len(stretches)) for storage, value in needed.items()}
        reads_of = [tuple(value for value, end in last.items() if end >= stretch) for stretch in stretches]
        held = tuple(value for value, end in last.items() if end == len(stretches))
        self._add(Phase.BACKWARD, recorder.peaks_bytes, [*reads_of, held], list(leaving), beyond_bytes)

    def _recorder(self, mode: Any, resident: Any) -> _Stretches:
        recorder = _Stretches(self.block, self.costs, tensors_in(resident), CallNodes(mode), self.known)
        recorder.calls = self.calls
        return recorder

    def _value(self, node: fx.Node) -> int:
        return _value_of(self.block, node)

    def _new_value(self, name: str, size_bytes: int, *, retained: bool = False) -> int:
        self._values.append(Value(name=f"{name} {len(self._values)}", size_bytes=size_bytes, retained=retained))
        return len(self._values) - 1

    def _beyond_bytes(self, crossing: Mapping[int, torch.Tensor], recorder: _Stretches) -> int:
        """Return how much larger storages that leave the block are than those of its graph."""
        sizes = {storage_id(t): recorder.size_bytes(t) for t in crossing.values()}
        return max(0, sum(sizes.values()) - sum(self.block.graph.values[value].size_bytes for value in crossing))

    def _add(
        self,
        phase: Phase,
        peaks_bytes: Sequence[int],
        reads: Sequence[tuple[int, ...]],
        makes: Sequence[int],
        beyond_bytes: int,
    ) -> None:
        """Add the code of a phase: what it holds in each stretch, and then what it leaves."""
        left = [*makes, *([self._new_value("beyond", beyond_bytes, retained=True)] if beyond_bytes else [])]
        stretches = [(self._new_value("code", peak_bytes),) for peak_bytes in peaks_bytes]
        reads = [*reads, ()][: len(stretches) + 1]
        for number, (read, made) in enumerate(zip(reads, [*stretches, tuple(left)], strict=True)):
            self._operations.append(
                Operation(
                    name=f"code {phase[0]}{number}",
                    key=f"|{CODE_TARGET}|{phase[0]}{number}",
                    target=CODE_TARGET,
                    inputs=read,
                    outputs=made,
                    phase=phase,
                    recomputable=False,
                )
            )


def _value_of(block: LoweredGraph, node: fx.Node) -> int:
    (value,) = block.storage_of[node]
    return value


def _leaving(block: LoweredGraph, nodes: Sequence[Any], made: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return what leaves a block, by its values."""
    pairs = zip(nodes, made, strict=True)
    return {_value_of(block, node): tensor for node, tensor in pairs if isinstance(node, fx.Node)}


def _like(tensor: Any) -> Any:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
