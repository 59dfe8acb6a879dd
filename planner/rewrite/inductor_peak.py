"""Predict what Inductor's code holds by running its drafts on fake tensors.

What they were seen to allocate, call and free takes the place of the operations that they are the code of: one
operation for each call, which makes what the code has from then on, and reads what the code lets go of after it. So
the simulator counts its peak, and the simulated allocator its blocks and segments. Values that the rest of the step
makes or reads keep their numbers: when those are freed the step alone knows, since others may hold them too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from planner.ir.graph import FOUND_TARGET, LOSS_TARGET, RETURNED_TARGET, Operation, OperationCost, Phase, Value
from planner.measure.workspace import TrialLimits, of_calls
from planner.rewrite.host_copies import OPERATORS, offload, wait_offload

CODE_TARGET = "compiled code"

_AROUND = (GIVEN_TARGET, FOUND_TARGET, RETURNED_TARGET, LOSS_TARGET)


def with_code(
    lowered: LoweredGraph,
    given: Sequence[fx.Node],
    drafts: Sequence[Draft],
    costs: Sequence[OperationCost],
    effort: TrialLimits,
) -> LoweredGraph:
    """Return the graph of a step or a block with the drafts of its code in place of its operations.

    ``given`` are placeholders that the rest of the step hands to a block. Each different call of an operator is tried
    for its workspace, as far as ``effort`` allows. Where that does not, the graph and its ``costs`` say which calls
    need workspace, and it is an upper bound: a call of other sizes than any in the graph needs the most workspace of
    its operator.
    """
    seen = _Followed(lowered, given, drafts, costs)
    device = tensors_in(drafts[0].inputs)[0].device
    tried = zip(seen.calls, of_calls(list(seen.calls.values()), device, effort), strict=True)
    return seen.in_their_place({signature: size_bytes for signature, size_bytes in tried if size_bytes is not None})


class _Calls(PeakRecorder):
    """Notes the calls that allocate, or may need workspace meanwhile: that, at most, is the event."""

    supports_higher_order_operators = True
    """Inductor's code calls those that keep and replay a random state; run as they are, they would replay it here."""

    def __init__(
        self, alignment_bytes: int, resident: Any, nodes: CallNodes, tried: dict[str, fx.Node], most: Mapping[Any, int]
    ) -> None:
        super().__init__(alignment_bytes, resident)
        self.events: list[tuple[str, int]] = []
        self._device = tensors_in(resident)[0].device
        self._nodes, self._tried, self._most = nodes, tried, most
        self.moving: dict[int, torch.Tensor] = {}
        """By their places, tensors that are being sent: the copy holds them until it is waited for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is run_and_save_rng_state:
            return self._random_state(), self.__torch_dispatch__(args[0], types, args[1:], kwargs)
        if function is run_with_rng_state:
            _now = self._random_state()  # put back afterwards
            return self.__torch_dispatch__(args[1], types, args[2:], kwargs)
        if function is OPERATORS[offload]:
            place = function(*args)  # on the host, where it does not count
            self.moving[storage_id(place)] = args[0]
            return place
        if function is OPERATORS[wait_offload]:
            self.moving.pop(storage_id(args[0]), None)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        is_torchs = isinstance(function, OpOverload)
        if is_torchs and function.is_view:
            return result
        signature, most_bytes = "", 0
        if is_torchs and function.overloadpacket not in _ONLY_ALLOCATE:
            node = self._nodes.node(function, args, kwargs or {}, result)
            signature = operands.signature(node)
            if operands.runs_alone(node, in_place=True):
                self._tried[signature] = node
            most_bytes = next((self._most[key] for key in _kinds(function, args) if key in self._most), 0)
        self.events.append((signature, most_bytes))
        return result

    def _random_state(self) -> torch.Tensor:
        """Make what a random state takes; on CUDA that is on the host, and does not count."""
        size = [CPU_RANDOM_STATE_BYTES if self._device.type == "cpu" else 0]
        options = {"dtype": torch.uint8, "device": "cpu"}
        return super().__torch_dispatch__(torch.ops.aten.empty.memory_format, (), (size,), options)


_ONLY_ALLOCATE = {
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty,
    *(operator.overloadpacket for operator in OPERATORS.values()),
}


def _kinds(function: OpOverload, arguments: Any) -> tuple[Any, ...]:
    """Return what a call is known by: operator and shapes, the operator, and that it is one."""
    name = str(function.overloadpacket)
    return (name, tuple(tuple(tensor.shape) for tensor in tensors_in(arguments))), name, None


def _most_workspace(lowered: LoweredGraph, costs: Sequence[OperationCost]) -> dict[Any, int]:
    """Return the most workspace of each kind of call."""
    most: dict[Any, int] = {}
    for node, cost in zip(lowered.operation_nodes, costs, strict=True):
        # Inductor makes kernels of its own for ``prims``: what they need in eager says nothing.
        if node is not None and isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            for key in _kinds(node.target, values_of(node.args)):
                most[key] = max(most.get(key, 0), cost.workspace_bytes)
    return most


@dataclass
class _Half:
    """What the code of a forward or a backward was seen to do, where storages have their recorder's numbers."""

    phase: Phase
    recorder: _Calls
    given: dict[int, int]
    """Values that it holds as long as it needs them, by their storages."""
    reads: list[int] = field(default_factory=list)
    """Values that others hold for it."""
    leaves: list[tuple[int | None, int]] = field(default_factory=list)
    """Storages and the values that they are to the rest of the step."""
    copies: list[tuple[int, bool]] = field(default_factory=list)
    """Bytes that autograd adds in the end, and whether they stay."""


class _Followed:
    """The two drafts of a step or a block, run on fake tensors."""

    def __init__(
        self, block: LoweredGraph, given: Sequence[fx.Node], drafts: Sequence[Draft], costs: Sequence[OperationCost]
    ) -> None:
        self.calls: dict[str, fx.Node] = {}
        """Calls whose workspace can be tried, by signature."""
        self._block, self._given = block, given
        self._most = _most_workspace(block, costs)
        self._values = list(block.graph.values)
        self._halves = self._run(*drafts)

    def in_their_place(self, known: Mapping[str, int]) -> LoweredGraph:
        """Return the graph with its code in place of its operations; ``known`` is the workspace of calls."""
        graph, values = self._block.graph, list(self._values)
        stay = [operation for operation in graph.operations if operation.target in _AROUND]
        ends = next(index for index, operation in enumerate(stay) if operation.target in (RETURNED_TARGET, LOSS_TARGET))
        made = {value for operation in stay for value in operation.outputs}
        forward, backward = (_operations(half, known, values, made) for half in self._halves)
        # Of what is inside in the graph nothing is there: values keep their numbers, and have no bytes.
        inside = sorted(set(range(len(values))) - made)
        for value in inside:
            values[value] = replace(values[value], size_bytes=0)
        backward[-1] = replace(backward[-1], outputs=(*backward[-1].outputs, *inside))
        operations = [*stay[:ends], *forward, *stay[ends:], *backward]
        done = replace(graph, operations=tuple(operations), values=tuple(values))
        return replace(self._block, graph=done, operation_nodes=[None] * len(operations))

    def _run(self, forward: Draft, backward: Draft) -> list[_Half]:
        joint, count = self._block.joint, len(self._block.joint.outputs[0])
        mode = mode_of(tensors_in(forward.inputs))
        with mode:
            # What is given is new here, so that it is seen when the code lets go of it.
            arguments = [
                _like(tensor) if node in self._given else tensor
                for node, tensor in zip(joint.arguments, forward.inputs, strict=True)
            ]
        known = self._known(joint.arguments, arguments)
        half = _Half(Phase.FORWARD, self._recorder(mode, arguments), {}, [*known.values()])
        with mode, half.recorder:
            made = list(forward.run(list(arguments)))
        half.recorder.finish()
        self._leave(half, joint.outputs[0], made[:count])
        known |= self._known(joint.outputs[0], made[:count]) | self._keep(half, made[count:])
        saved = made[count:]
        with mode:
            tangents = list(map(_like, backward.inputs[len(saved) :]))
        known |= self._known(joint.tangents, tangents)
        other = _Half(Phase.BACKWARD, self._recorder(mode, [forward.inputs, saved, tangents]), {})
        other.recorder.moving = half.recorder.moving
        self._watch(other, [saved, tangents], known)
        handed = [*saved, *tangents]
        del arguments, made, saved, tangents
        with mode, other.recorder:
            gradients = list(backward.run(handed))
        other.recorder.finish()
        self._leave(other, joint.outputs[1], gradients)
        other.copies = list(self._copies(other, forward.inputs, gradients))
        return [half, other]

    def _recorder(self, mode: Any, resident: Any) -> _Calls:
        return _Calls(self._block.graph.alignment_bytes, resident, CallNodes(mode), self.calls, self._most)

    def _known(self, nodes: Sequence[Any], tensors: Sequence[Any]) -> dict[int, int]:
        """Return the values of tensors, as far as they are any, by storage."""
        pairs = zip(nodes, tensors, strict=True)
        found = ((tensor, self._block.storage_of.get(node)) for node, tensor in pairs if isinstance(node, fx.Node))
        return {storage_id(tensor): values[0] for tensor, values in found if values}

    def _leave(self, half: _Half, nodes: Sequence[Any], made: Sequence[Any]) -> None:
        """Note what leaves the code, by the values that it is in the graph."""
        for node, tensor in zip(nodes, made, strict=True):
            if isinstance(node, fx.Node):
                half.leaves += [(half.recorder.number(tensor), value) for value in self._block.storage_of.get(node, ())]

    def _keep(self, half: _Half, saved: Any) -> dict[int, int]:
        """Add values for what is saved and is none yet, and return them by storage."""
        kept: dict[int, int] = {}
        for tensor in tensors_in(saved):
            number = half.recorder.number(tensor)
            if number is not None and number not in dict(half.leaves):
                kept[storage_id(tensor)] = _new_value(self._values, "saved", half.recorder.size_bytes(tensor))
                half.leaves.append((number, kept[storage_id(tensor)]))
        return kept

    def _watch(self, half: _Half, handed: Any, known: Mapping[int, int]) -> None:
        """See when the code lets go of values that it is given."""
        for tensor in tensors_in(handed):
            if storage_id(tensor) in known and half.recorder.number(tensor) is None:
                half.given[half.recorder.made(tensor, 0)] = known[storage_id(tensor)]

    def _copies(self, half: _Half, inputs: Sequence[Any], gradients: Sequence[Any]) -> Iterator[tuple[int, bool]]:
        """Yield the bytes that autograd copies, and whether they stay."""
        if self._given:  # its gradients are in the graph around it as they are in its own
            for node, gradient in zip(self._block.joint.outputs[1], gradients, strict=True):
                if isinstance(node, fx.Node) and tensors_of(node)[0].stride() != gradient.stride():
                    yield gradient.nbytes, True
            return
        pairs = [(of, g) if isinstance(g, torch.Tensor) else None for of, g in zip(inputs, gradients, strict=True)]
        numbers = {storage_id(tensor): half.recorder.number(tensor) for tensor in tensors_in(gradients)}
        of_graph = {number for number, value in half.given.items() if value < len(self._block.graph.values)}
        copies = gradient_copies(pairs, {storage for storage, n in numbers.items() if n is None or n in of_graph})
        yield from ((inputs[position].nbytes, True) for position in copies.beside)
        yield copies.working_bytes, False


def _operations(half: _Half, known: Mapping[str, int], values: list[Value], made: set[int]) -> list[Operation]:
    """Return an operation for each call, and a last one for what goes and comes once the code has ended.

    Adds new values, and to ``made`` those that the operations make.
    """
    storages, calls = half.recorder.storages, half.recorder.events
    makes: list[list[int]] = [[] for _ in range(len(calls) + 1)]
    reads: list[list[int]] = [[] for _ in makes]
    reads[0] += half.reads
    leaves: defaultdict[int | None, list[int]] = defaultdict(list)
    for number, value in dict.fromkeys(half.leaves):
        if value not in made:
            made.add(value)
            leaves[None if number in half.given else number].append(value)
    value_of = dict(half.given)
    for number, storage in enumerate(storages):
        at = makes[storage.maker]
        if number in leaves:
            at += leaves[number]
            beyond_bytes = storage.size_bytes - sum(values[value].size_bytes for value in leaves[number])
            if beyond_bytes > 0:
                at.append(_new_value(values, "beyond", beyond_bytes, retained=True))
        elif number not in half.given:
            value_of[number] = _new_value(values, "code", storage.size_bytes)
            at.append(value_of[number])
    for number, value in value_of.items():
        last = len(calls) if (died := storages[number].died) is None else max(0, died - 1)
        if value not in makes[last]:
            reads[last].append(value)
    makes[-1] += leaves[None]
    for position, (signature, most_bytes) in enumerate(calls):
        if workspace_bytes := known.get(signature, most_bytes):
            makes[position].append(_new_value(values, "workspace", workspace_bytes))
    makes[-1] += [_new_value(values, "copies", size_bytes, retained=stays) for size_bytes, stays in half.copies]
    made.update(value for each in makes for value in each)
    return [
        Operation(
            name=f"code {half.phase[0]}{number}",
            key=f"|{CODE_TARGET}|{half.phase[0]}{number}",
            target=CODE_TARGET,
            inputs=tuple(dict.fromkeys(read)),
            outputs=tuple(outputs),
            phase=half.phase,
            recomputable=False,
        )
        for number, (read, outputs) in enumerate(zip(reads, makes, strict=True))
    ]


def _new_value(values: list[Value], name: str, size_bytes: int, *, retained: bool = False) -> int:
    """Add a value and return its number."""
    values.append(Value(name=f"{name} {len(values)}", size_bytes=size_bytes, retained=retained))
    return len(values) - 1


def _like(tensor: Any) -> Any:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
