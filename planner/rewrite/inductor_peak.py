"""Predict the peak of Inductor's code by running its draft on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture import operands
from planner.capture.autograd_accumulation import gradient_copies
from planner.capture.inductor_internals import Draft
from planner.capture.joint import values_of
from planner.capture.lowering import LoweredGraph
from planner.capture.operands import CallNodes
from planner.capture.storages import PeakRecorder
from planner.capture.torch_internals import (
    FakeTensor,
    OpOverload,
    run_and_save_rng_state,
    run_with_rng_state,
    storage_id,
)
from planner.capture.trees import tensors_in
from planner.ir.builder import CPU_RANDOM_STATE_BYTES
from planner.ir.graph import OperationCost
from planner.ir.static_memory import LossMemory
from planner.measure.workspace import TrialLimits, of_calls


def peak_of_drafts(
    forward: Draft,
    backward: Draft,
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
    seen = _followed(forward, backward, lowered, costs, loss)
    return seen.peak_with(workspace_of(seen.calls, forward, effort))


def workspace_of(calls: Mapping[str, fx.Node], draft: Draft, effort: TrialLimits) -> dict[str, int]:
    """Return the bytes of workspace that calls of a draft need, by signature, as far as they can be tried."""
    device = tensors_in(draft.inputs)[0].device
    workspaces_bytes = of_calls(list(calls.values()), device, effort)
    tried = dict(zip(calls, workspaces_bytes, strict=True))
    return {signature: size_bytes for signature, size_bytes in tried.items() if size_bytes is not None}


def _followed(
    forward: Draft, backward: Draft, lowered: LoweredGraph, costs: Sequence[OperationCost], loss: LossMemory
) -> Allocations:
    """Run the drafts, and follow what they allocate."""
    outputs = lowered.joint.num_forward_outputs
    mode = next(t.fake_mode for t in forward.inputs if isinstance(t, FakeTensor))
    recorder = Allocations(lowered, costs, forward.inputs, CallNodes(mode))
    with mode, recorder:
        made = list(forward.run(list(forward.inputs)))
        results, saved = made[:outputs], made[outputs:]
        tangents = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in backward.inputs[len(saved) :]
        ]
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
