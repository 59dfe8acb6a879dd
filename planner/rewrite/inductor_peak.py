"""Predict the peak of Inductor's code by running its draft on fake tensors.

The code of a block takes the place of the block's operations. When what it is given is freed, the step alone knows:
others may hold it too. So a backward becomes one operation for each stretch of its code in which the same of what it
is given is needed: it reads that, and makes one value as large as all that the code holds then.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from planner.capture import operands
from planner.capture.autograd_accumulation import gradient_copies
from planner.capture.fake_internals import mode_of
from planner.capture.inductor_internals import Draft
from planner.capture.joint import tensors_of, values_of
from planner.capture.lowering import GIVEN_TARGET, LoweredGraph
from planner.capture.operands import CallNodes
from planner.capture.storages import PeakRecorder
from planner.capture.torch_internals import OpOverload, run_and_save_rng_state, run_with_rng_state, storage_id
from planner.capture.trees import tensors_in
from planner.ir.builder import CPU_RANDOM_STATE_BYTES
from planner.ir.graph import Operation, OperationCost, Phase, Value
from planner.ir.static_memory import LossMemory
from planner.measure.workspace import TrialLimits, of_calls


def peak_of_drafts(
    drafts: Sequence[Draft],
    lowered: LoweredGraph,
    costs: Sequence[OperationCost],
    loss: LossMemory,
    effort: TrialLimits,
) -> int:
    """Return the most bytes that a step holds on top of what is resident, from the drafts of its two graphs.

    Each different call of an operator is tried for its workspace, as far as ``effort`` allows. Where that does not, the
    graph that the drafts are of, and its costs, say which calls need workspace, and it is an upper bound: a call of
    other sizes than any in the graph needs the most workspace of its operator.
    """
    seen = _followed(drafts, lowered, costs, loss)
    return seen.peak_with(workspace_of(seen.calls, drafts[0], effort))


def workspace_of(calls: Mapping[str, fx.Node], draft: Draft, effort: TrialLimits) -> dict[str, int]:
    """Return the bytes of workspace that calls of a draft need, by signature, as far as they can be tried."""
    device = tensors_in(draft.inputs)[0].device
    workspaces_bytes = of_calls(list(calls.values()), device, effort)
    tried = dict(zip(calls, workspaces_bytes, strict=True))
    return {signature: size_bytes for signature, size_bytes in tried.items() if size_bytes is not None}


def _followed(
    drafts: Sequence[Draft], lowered: LoweredGraph, costs: Sequence[OperationCost], loss: LossMemory
) -> Allocations:
    """Run the drafts, and follow what they allocate."""
    (forward, backward), outputs = drafts, lowered.joint.num_forward_outputs
    mode = mode_of(tensors_in(forward.inputs))
    recorder = Allocations(lowered, costs, forward.inputs, CallNodes(mode))
    with mode, recorder:
        made = list(forward.run(list(forward.inputs)))
        results, saved = made[:outputs], made[outputs:]
        tangents = list(map(_like, backward.inputs[len(saved) :]))
        recorder.live_bytes += loss.held_bytes
        recorder.reach(loss.working_bytes)
        arguments, values = [*saved, *tangents], lowered.graph.values
        results = [
            result
            for node, result in zip(lowered.joint.outputs[0], results, strict=True)
            if all(values[v].retained for v in lowered.storage_of.get(node, ()))
        ]
        del made, saved
        gradients = list(backward.run(arguments))
        taken = set(map(storage_id, tensors_in([forward.inputs, results, tangents])))
        given = [
            (of, gradient) if isinstance(gradient, torch.Tensor) else None
            for of, gradient in zip(forward.inputs, gradients, strict=True)
        ]
        copies = gradient_copies(given, taken)
        beside_bytes = sum(forward.inputs[position].nbytes for position in copies.beside)
        recorder.reach(beside_bytes + copies.working_bytes)
    return recorder


class Allocations(PeakRecorder):
    """Follows storages on one device, and notes which operators run, that may need more meanwhile."""

    supports_higher_order_operators = True
    """Inductor's code calls those that keep and replay a random state; run as they are, they would replay it here."""

    def __init__(
        self, lowered: LoweredGraph, costs: Sequence[OperationCost], resident: Sequence[Any], nodes: CallNodes
    ) -> None:
        super().__init__(lowered.graph.alignment_bytes, resident)
        self.calls: dict[str, fx.Node] = {}
        """Calls of operators that may need workspace and can be tried alone, by signature."""
        self._ran: list[tuple[int, str, int]] = []
        """For each call what is alive at it, its signature, and what it needs at most beside that."""
        self._nodes = nodes
        self._device = tensors_in(resident)[0].device
        self._workspace: dict[Any, int] = {}
        for node, cost in zip(lowered.operation_nodes, costs, strict=True):
            # Inductor makes kernels of its own for ``prims``: what they need in eager says nothing.
            if node is None or not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
                continue
            name = str(node.target.overloadpacket)
            arguments = values_of(node.args)
            for key in ((name, _shapes(arguments)), name, None):
                self._workspace[key] = max(self._workspace.get(key, 0), cost.workspace_bytes)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is run_and_save_rng_state:
            return self._random_state(), self.__torch_dispatch__(args[0], types, args[1:], kwargs)
        if function is run_with_rng_state:
            _now = self._random_state()  # put back afterwards
            return self.__torch_dispatch__(args[1], types, args[2:], kwargs)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if isinstance(function, OpOverload) and not function.is_view and function.overloadpacket not in _ONLY_ALLOCATE:
            node = self._nodes.node(function, args, kwargs or {}, result)
            signature = operands.signature(node)
            if operands.runs_alone(node, in_place=True):
                self.calls[signature] = node
            self.note_call(signature, self._at_most(function, args))
        return result

    def note_call(self, signature: str, most_bytes: int) -> None:
        """Note a call that may need workspace."""
        self._ran.append((self.live_bytes, signature, most_bytes))

    def peak_with(self, known: Mapping[str, int]) -> int:
        """Return the peak bytes, given the known workspace of some calls by signature."""
        return max([self.peak_bytes, *self.calls_with(known)])

    def calls_with(self, known: Mapping[str, int]) -> list[int]:
        """Return the live bytes at each call that may need workspace."""
        return [live_bytes + known.get(signature, most_bytes) for live_bytes, signature, most_bytes in self._ran]

    def _at_most(self, function: OpOverload, args: Any) -> int:
        """Bound the workspace of an untried call: that of one of the same sizes, else of any, else the worst."""
        name = str(function.overloadpacket)
        known = (key for key in ((name, _shapes(args)), name, None) if key in self._workspace)
        return self._workspace.get(next(known, None), 0)

    def _random_state(self) -> torch.Tensor:
        """Make what a random state takes; on CUDA that is on the host, and does not count."""
        size = [CPU_RANDOM_STATE_BYTES if self._device.type == "cpu" else 0]
        options = {"dtype": torch.uint8, "device": "cpu"}
        return super().__torch_dispatch__(torch.ops.aten.empty.memory_format, (), (size,), options)


def _shapes(arguments: Any) -> tuple[Any, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(arguments))


_ONLY_ALLOCATE = {torch.ops.aten.empty_strided, torch.ops.aten.empty}


# The code of a block, as operations of the step.

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
    numbers. For ``costs`` and ``effort`` see :func:`peak_of_drafts`.
    """
    seen = _Followed(lowered, given, drafts, costs)
    return seen.in_their_place(workspace_of(seen.calls, drafts[0], effort))


class _Stretches(Allocations):
    """Tells what the code holds at most while the same of what it is given is alive."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.last: dict[int, int] = {}
        """The last stretch of what has been freed, by storage."""
        self._peaks_bytes = [0]
        self._ran_in: list[int] = []
        """The stretch of each call that may need workspace."""

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin a new stretch whenever one of these is freed."""
        for storage in {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}.values():
            weakref.finalize(storage, self._ended, id(storage))

    def reach(self, more_bytes: int) -> None:
        """Record a momentary allocation of so many bytes."""
        super().reach(more_bytes)
        self._peaks_bytes[-1] = max(self._peaks_bytes[-1], self.live_bytes + more_bytes)

    def note_call(self, signature: str, most_bytes: int) -> None:
        """Note a call that may need workspace."""
        super().note_call(signature, most_bytes)
        self._ran_in.append(len(self._peaks_bytes) - 1)

    def peaks_with(self, known: Mapping[str, int]) -> list[int]:
        """Return the most bytes that are there at once in each stretch, where the workspace of some calls is known."""
        peaks_bytes = list(self._peaks_bytes)
        for stretch, call_bytes in zip(self._ran_in, self.calls_with(known), strict=True):
            peaks_bytes[stretch] = max(peaks_bytes[stretch], call_bytes)
        return peaks_bytes

    def _ended(self, storage: int) -> None:
        self._numbers.pop(storage, None)  # another may have its place from now on
        if not self._is_over:
            self.last[storage] = len(self._peaks_bytes) - 1
            self._peaks_bytes.append(self.live_bytes)


@dataclass
class _Half:
    """What the code of a forward or a backward was seen to do."""

    phase: Phase
    recorder: _Stretches
    needed: dict[int, int]
    """The last stretch of what is given, by values; one beyond the last where it is not freed."""
    leaves: list[int]
    """Values."""
    beyond_bytes: int
    """How much more than these it leaves."""


class _Followed:
    """The two drafts of a block, run on fake tensors."""

    def __init__(
        self, block: LoweredGraph, given: Sequence[fx.Node], drafts: Sequence[Draft], costs: Sequence[OperationCost]
    ) -> None:
        self.calls: dict[str, fx.Node] = {}
        """Calls whose workspace can be tried, by signature."""
        self._block, self._given, self._costs = block, given, costs
        self._values = list(block.graph.values)
        self._phases: list[_Half] = []
        self._run(*drafts)

    def in_their_place(self, known: Mapping[str, int]) -> LoweredGraph:
        """Return the block with its code in place of its operations; ``known`` is the workspace of calls."""
        graph = self._block.graph
        values = list(self._values)
        forward, backward = (_operations(phase, known, values) for phase in self._phases)
        given = (operation for operation in graph.operations if operation.target == GIVEN_TARGET)
        operations = [*given, *forward, graph.operations[graph.loss_index], *backward]
        # Of what is inside of the block in its graph nothing is there: values keep their numbers, and have no bytes.
        made = {value for operation in operations for value in operation.outputs}
        inside = sorted(set(range(len(values))) - made)
        for value in inside:
            values[value] = replace(values[value], size_bytes=0)
        operations[-1] = replace(operations[-1], outputs=(*operations[-1].outputs, *inside))
        done = replace(graph, operations=tuple(operations), values=tuple(values))
        return replace(self._block, graph=done, operation_nodes=[None] * len(operations))

    def _run(self, forward: Draft, backward: Draft) -> None:
        joint = self._block.joint
        mode = mode_of(tensors_in(forward.inputs))
        own = [t for node, t in zip(joint.arguments, forward.inputs, strict=True) if node not in self._given]
        with mode:
            # What is given is new here, so that it is seen when the code lets go of it.
            arguments = [
                _like(tensor) if node in self._given else tensor
                for node, tensor in zip(joint.arguments, forward.inputs, strict=True)
            ]
        value_of: dict[int, int] = {}
        """By storage, the value that the step has for it."""
        for node, tensor in zip(joint.arguments, arguments, strict=True):
            if node in self._given:
                value_of[storage_id(tensor)] = self._value(node)
        recorder = self._recorder(mode, arguments)
        with mode, recorder:
            made = list(forward.run(list(arguments)))
        recorder.finish()
        count = len(joint.outputs[0])
        outputs = self._leaving(joint.outputs[0], made[:count])
        beyond_bytes = self._beyond_bytes(outputs, recorder)
        for value, tensor in outputs.items():
            value_of.setdefault(storage_id(tensor), value)
        kept = []
        for tensor in tensors_in(made[count:]):
            if storage_id(tensor) not in value_of and recorder.number(tensor) is not None:
                kept.append(_new_value(self._values, "saved", recorder.size_bytes(tensor)))
                value_of[storage_id(tensor)] = kept[-1]
        # The caller holds what it hands over.
        needed = {self._value(node): 0 for node in self._given}
        self._phases.append(_Half(Phase.FORWARD, recorder, needed, [*outputs, *kept], beyond_bytes))

        saved = made[count:]
        with mode:
            tangents = list(map(_like, backward.inputs[len(saved) :]))
        for node, tensor in zip(joint.tangents, tangents, strict=True):
            value_of[storage_id(tensor)] = self._value(node)
        recorder = self._recorder(mode, [own, saved, tangents])
        watched = [t for t in tensors_in([saved, tangents]) if storage_id(t) in value_of]
        storages = {storage_id(tensor): value_of[storage_id(tensor)] for tensor in watched}
        recorder.watch(watched)
        handed = [*saved, *tangents]
        del arguments, made, saved, tangents, outputs, tensor, watched
        with mode, recorder:
            gradients = list(backward.run(handed))
        recorder.finish()
        leaving = self._leaving(joint.outputs[1], gradients)
        beyond_bytes = self._beyond_bytes(leaving, recorder)
        for node, gradient in zip(joint.outputs[1], gradients, strict=True):
            if isinstance(node, fx.Node) and tensors_of(node)[0].stride() != gradient.stride():
                beyond_bytes += gradient.nbytes  # autograd copies one whose layout is not that of its parameter
        stretches = len(recorder.peaks_with({}))
        needed = {value: recorder.last.get(storage, stretches) for storage, value in storages.items()}
        self._phases.append(_Half(Phase.BACKWARD, recorder, needed, list(leaving), beyond_bytes))

    def _recorder(self, mode: Any, resident: Any) -> _Stretches:
        recorder = _Stretches(self._block, self._costs, tensors_in(resident), CallNodes(mode))
        recorder.calls = self.calls
        return recorder

    def _value(self, node: fx.Node) -> int:
        (value,) = self._block.storage_of[node]
        return value

    def _leaving(self, nodes: Sequence[Any], made: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return what leaves the block, by its values."""
        pairs = zip(nodes, made, strict=True)
        return {self._value(node): tensor for node, tensor in pairs if isinstance(node, fx.Node)}

    def _beyond_bytes(self, leaving: Mapping[int, torch.Tensor], recorder: _Stretches) -> int:
        """Return how much larger storages that leave the block are than those of its graph."""
        sizes = {storage_id(t): recorder.size_bytes(t) for t in leaving.values()}
        return max(0, sum(sizes.values()) - sum(self._block.graph.values[value].size_bytes for value in leaving))


def _operations(seen: _Half, known: Mapping[str, int], values: list[Value]) -> list[Operation]:
    """Return operations for the code of a phase, one for what it holds in each stretch, and one for what it leaves."""
    peaks_bytes = seen.recorder.peaks_with(known)
    if seen.phase is Phase.FORWARD:
        peaks_bytes = [max(peaks_bytes)]
    makes = [(_new_value(values, "code", peak_bytes),) for peak_bytes in peaks_bytes]
    beyond = [_new_value(values, "beyond", seen.beyond_bytes, retained=True)] if seen.beyond_bytes else []
    return [
        Operation(
            name=f"code {seen.phase[0]}{number}",
            key=f"|{CODE_TARGET}|{seen.phase[0]}{number}",
            target=CODE_TARGET,
            inputs=tuple(value for value, last in seen.needed.items() if last >= number),
            outputs=made,
            phase=seen.phase,
            recomputable=False,
        )
        for number, made in enumerate([*makes, (*seen.leaves, *beyond)])
    ]


def _new_value(values: list[Value], name: str, size_bytes: int, *, retained: bool = False) -> int:
    """Add a value and return its number."""
    values.append(Value(name=f"{name} {len(values)}", size_bytes=size_bytes, retained=retained))
    return len(values) - 1


def _like(tensor: Any) -> Any:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
