"""From a recorded eager step to a training graph, and to the regions of it that can be checkpointed.

An operation reads, besides what it is called with, every storage for which it is the last to find it
alive: so the simulator frees things when eager does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx, nn

from planner.capture import operands
from planner.capture.eager.sends import Candidate, Waits, sends_in, waits_of
from planner.capture.eager.trace import Call, Trace
from planner.capture.joint import JointGraph, is_collective, is_random, tensors_of
from planner.capture.lowering import CPU_RANDOM_STATE_BYTES, LoweredGraph
from planner.capture.provenance import kinds_of
from planner.capture.storages import Run, Storage
from planner.capture.torch_internals import BatchNorm, OpOverload, is_mutable
from planner.ir.builder import GraphBuilder
from planner.ir.checkpoints import (
    AWAY,
    BACK,
    END,
    HOLD,
    KEPT,
    SCRATCH,
    STOP,
    UNPACK,
    Keepable,
    Region,
)
from planner.ir.graph import LOSS_KEY_BEFORE, Operation, TrainingGraph
from planner.ir.layers import is_within
from planner.ir.static_memory import LossMemory

_LAYER_CLASS = "GradientCheckpointingLayer"
"""What Hugging Face's models derive their layers from."""


@dataclass(frozen=True)
class EagerStep:
    """An eager step as a graph, what of it can be checkpointed, and the workspace that was seen of some operations."""

    lowered: LoweredGraph
    regions: tuple[Region, ...]
    workspace_bytes: dict[int, int]


def lower_eager(
    trace: Trace,
    model: nn.Module,
    inputs: list[torch.Tensor],
    *,
    alignment_bytes: int,
    static_bytes: dict[str, int],
    name: str,
    loss: LossMemory,
    on_cpu: bool,
    least_bytes: int | None = None,
) -> EagerStep:
    """Lower a recorded step.

    Parameters
    ----------
    inputs : list of torch.Tensor
        What the step was given.
    alignment_bytes, static_bytes, name, loss
        See :func:`planner.capture.lowering.lower`.
    on_cpu : bool
        Whether the random state that a checkpoint keeps takes the memory that is planned.
    least_bytes : int, optional
        Values of so many bytes may wait in the host's memory; without it, none may.
    """
    return _Lowering(trace, model, alignment_bytes, on_cpu).run(inputs, static_bytes, name, loss, least_bytes)


class _Lowering(GraphBuilder[fx.Node]):
    def __init__(self, trace: Trace, model: nn.Module, alignment_bytes: int, on_cpu: bool) -> None:
        super().__init__(alignment_bytes)
        self.trace = trace
        self.modules, self.kinds = dict(model.named_modules()), kinds_of(model)
        self.random_bytes = self.aligned(CPU_RANDOM_STATE_BYTES) if on_cpu else 0
        for index, storage in enumerate(trace.storages):
            size_bytes = 0 if self._is_elsewhere(storage, on_cpu) else storage.size_bytes
            self.add_value(f"storage {index}", size_bytes, kind=storage.kind, retained=storage.died is None)
        self.kept_by_last: defaultdict[int, list[int]] = defaultdict(list)
        """For each run, the storages that are let go right after it."""
        for index, storage in enumerate(trace.storages):
            self._lives_until(index, storage.died)
        for save in trace.saves:
            if save.storage is not None:
                self._lives_until(save.storage, save.released)
        self.written = {value for run in trace.runs for value in run.writes}

    @staticmethod
    def _is_elsewhere(storage: Storage, on_cpu: bool) -> bool:
        """Whether a storage is not the device's, or is counted with the loss."""
        return storage.is_stand_in or (storage.is_number and not on_cpu)

    def _lives_until(self, storage: int, position: int | None) -> None:
        last = (len(self.trace.runs) if position is None else position) - 1
        if last > self.trace.storages[storage].maker and not self.values[storage].retained:
            self.kept_by_last[last].append(storage)

    def run(
        self,
        inputs: list[torch.Tensor],
        static_bytes: dict[str, int],
        name: str,
        loss: LossMemory,
        least_bytes: int | None,
    ) -> EagerStep:
        candidates = list(self._candidates())
        waits: dict[str, Waits] = {}
        if least_bytes is not None:
            movable = [value for value, seen in enumerate(self.values) if seen.size_bytes >= max(least_bytes, 1)]
            waits = waits_of(self.trace, candidates, movable)
        unpacked: defaultdict[int, dict[int, None]] = defaultdict(dict)
        for each in waits.values():
            for wait in each.saved:
                unpacked[wait.returns][wait.value] = None
        keepable = {position for candidate in candidates for position in candidate.keepable}
        begins, stops = defaultdict(list), defaultdict(list)
        for candidate in candidates:
            begins[candidate.begin].append(candidate)
            stops[candidate.stop].append(candidate)
        holds: dict[str, int] = {}
        ends: dict[str, tuple[int, ...]] = {}
        aways: dict[str, int] = {}
        backs: dict[str, int] = {}
        run_at: list[int] = []
        first_at: list[int] = []
        """For each run, what comes first of what stands for the time between it and the one before."""
        stand_ins: dict[int, int] = {}
        runs = self.trace.runs
        for position in range(len(runs) + 1):
            for candidate in stops[position]:
                ends[candidate.module] = self._add_stop(candidate)
                if found := waits.get(candidate.module):
                    back = [wait.value for wait in found.given]
                    backs[candidate.module] = self._add_note(BACK, candidate.module, back)
            for candidate in begins[position]:
                state_bytes = self.random_bytes + candidate.statistics_bytes
                hold = partial(self._add_note, module=candidate.module, state_bytes=state_bytes)
                given = candidate.call.given
                holds[candidate.module] = hold(HOLD, reads=given)
                if found := waits.get(candidate.module):
                    sent = {wait.value for wait in found.given}
                    aways[candidate.module] = hold(AWAY, reads=[value for value in given if value not in sent])
            if position == self.trace.backward:
                self._add_own_loss(loss)
            first_at.append(len(self.operations))
            if position in unpacked:
                self._add_note(UNPACK, "", unpacked[position])
            if position < len(runs):
                run_at.append(self._add_run(runs[position], position))
            if position in keepable:
                stand_ins[position] = self._add_stand_in(self.operations[-1])
        run_at.append(self._add_note(END, "", ()))
        graph = self.finish(static_bytes, name, self.kinds)
        regions = []
        for candidate in candidates:
            *scratch, stop = ends[candidate.module]
            sends = None
            if found := waits.get(candidate.module):
                beside = aways[candidate.module], backs[candidate.module]
                sends = sends_in(candidate, found, graph, run_at, first_at, *beside)
            regions.append(
                Region(
                    module=candidate.module,
                    hold=holds[candidate.module],
                    recompute=(*scratch, *run_at[candidate.begin : candidate.stop], stop),
                    recompute_before=first_at[candidate.before],
                    release_at=first_at[candidate.until],
                    keepable=tuple(
                        Keepable(
                            index=run_at[position],
                            stand_in=stand_ins[position],
                            operator=self.operations[run_at[position]].target,
                            occurrence=runs[position].occurrence - candidate.call.called[runs[position].node.target],
                            is_random=is_random(runs[position].node),
                        )
                        for position in candidate.keepable
                    ),
                    sends=sends,
                )
            )
        nodes = fx.Graph()
        joint = JointGraph(fx.GraphModule(nn.Module(), nodes), nodes, 0, inputs)
        lowered = LoweredGraph(
            joint, graph, self.operation_nodes, [], {}, fingerprinted=self._as_written_before(graph, loss)
        )
        seen = {index: run.workspace_bytes for index, run in zip(run_at, runs, strict=False)}
        return EagerStep(lowered, tuple(regions), {index: size for index, size in seen.items() if size is not None})

    # Operations.

    def _add_run(self, run: Run, position: int) -> int:
        reads = (*run.reads, *self.kept_by_last[position])
        name = f"{run.node.name}_{position}"
        return self.add(
            str(run.node.target), reads, run.makes, name=name, module=run.module, node=run.node, **run.facts
        )

    def _add_note(
        self,
        target: str,
        module: str,
        reads: Iterable[int],
        makes: Iterable[int] = (),
        *,
        state_bytes: int = 0,
        name: str = "",
    ) -> int:
        """Add an operation that costs nothing."""
        return self.add(
            target, reads, makes, name=name or f"{target} of {module}", module=module, state_bytes=state_bytes
        )

    def _add_own_loss(self, loss: LossMemory) -> None:
        """Add the loss: what it works with is there until the outputs have their gradients."""
        made = self.add_loss_values(loss)
        self.add_loss((), made)
        if self.trace.tangents > self.trace.backward:
            self.kept_by_last[self.trace.tangents - 1] += [value for value in made if not self.values[value].retained]

    def _as_written_before(self, graph: TrainingGraph, loss: LossMemory) -> TrainingGraph:
        """Return the graph as fingerprints have it: the loss had a key of its own here, and its sizes were others."""
        operations, values = list(graph.operations), list(graph.values)
        operations[graph.loss_index] = replace(operations[graph.loss_index], key=LOSS_KEY_BEFORE)
        for index, storage in enumerate(self.trace.storages):
            if storage.is_stand_in:
                values[index] = replace(values[index], size_bytes=self.aligned(storage.size_bytes))
        for index in graph.operations[graph.loss_index].outputs:
            if values[index].retained:
                values[index] = replace(values[index], size_bytes=loss.held_bytes)
        return replace(graph, operations=tuple(operations), values=tuple(values))

    def _add_stand_in(self, operation: Operation) -> int:
        """Add what runs again in place of an operation whose outputs are kept, which are looked up where it would."""
        alive = dict.fromkeys((*operation.inputs, *operation.outputs))
        return self._add_note(KEPT, operation.module, alive, name=f"{KEPT} {operation.name}")

    def _add_stop(self, candidate: Candidate) -> tuple[int, ...]:
        alive = [
            value
            for run in self.trace.runs[candidate.begin : candidate.stop]
            for value in run.makes
            if (died := self.trace.storages[value].died) is None or died > candidate.stop
        ]
        scratch = []
        if self.random_bytes:
            state = self.add_value(f"random state beside {candidate.module}", self.random_bytes)
            scratch = [self._add_note(SCRATCH, candidate.module, (), (state,))]
            alive.append(state)
        return (*scratch, self._add_note(STOP, candidate.module, alive))

    # What can be checkpointed.

    def _candidates(self) -> Iterable[Candidate]:
        layers = [n for n, m in self.modules.items() if any(c.__name__ == _LAYER_CLASS for c in type(m).__mro__)]
        for module, calls in self.trace.calls.items():
            inside = not layers or any(is_within(module, layer) for layer in layers)
            if inside and len(calls) == 1 and calls[0].begin < self.trace.backward:
                candidate = self._candidate(module, calls[0])
                if candidate is not None:
                    yield candidate

    def _candidate(self, module: str, call: Call) -> Candidate | None:
        """Return what checkpointing a call would do; None if that frees nothing, or would not be right."""
        runs = self.trace.runs
        stop = max((save.saved for save in call.saves), default=call.begin)
        made = {value for run in runs[call.begin : stop] for value in run.makes}
        read = [save.read for save in call.saves if save.read is not None]
        if not read or not any(save.storage in made for save in call.saves):
            return None
        if any(self.values[value].retained for value in made):
            return None  # beside what stays to the end, a second copy would be there for a while
        before = min(read)
        until = max(len(runs) if save.released is None else save.released for save in call.saves)
        outside = {value for run in runs[call.begin : stop] for value in run.reads} - made
        if before < self.trace.backward or not self._is_repeatable(call):
            return None
        later = {value for run in runs[call.end : before] for value in run.writes}
        if later & (outside | set(call.given)):
            return None
        return Candidate(
            module=module,
            call=call,
            stop=stop,
            before=before,
            until=until,
            statistics_bytes=self._statistics_bytes(module),
            keepable=self._keepable(range(call.begin, stop)),
        )

    def _keepable(self, positions: range) -> tuple[int, ...]:
        """Return the runs that are worth keeping: products, convolutions, attention.

        What is kept must still be what its operator gave: nothing writes into it. A random operation that is kept does
        not draw again, so those that come after it would draw what it drew: all are kept, or none.
        """
        runs = self.trace.runs
        found = [position for position in positions if self._can_be_kept(runs[position])]
        random = {position for position in positions if is_random(runs[position].node)}
        return tuple(p for p in found if p not in random or random.issubset(found))

    def _can_be_kept(self, run: Run) -> bool:
        target, tensors = run.node.target, tensors_of(run.node)
        return (
            isinstance(target, OpOverload)
            and not is_mutable(target)
            and not operands.is_opaque(target)
            and len(tensors) == len(run.makes)
            and self.written.isdisjoint(run.makes)
            and run.flops > max((tensor.numel() for tensor in tensors), default=0)
        )

    def _is_repeatable(self, call: Call) -> bool:
        """Whether a second run of a call would find, and leave, everything outside it as the first did."""
        runs = self.trace.runs[call.begin : call.end]
        made = {value for run in runs for value in run.makes}
        for run in runs:
            if is_collective(run.node) or str(run.node.target).startswith("c10d") or not made.issuperset(run.writes):
                return False
            updates = run.writes_resident or _updates_statistics(run)
            if updates and not keeps_statistics(self.modules.get(run.module)):
                return False
        return True

    def _statistics_bytes(self, module: str) -> int:
        """Return the bytes of the copies that a recompute updates in place of running statistics."""
        inside = [m for name, m in self.modules.items() if is_within(name, module)]
        return sum(
            self.aligned(b.numel() * b.element_size()) for m in inside if keeps_statistics(m) for b in m.buffers()
        )


def keeps_statistics(module: nn.Module | None) -> bool:
    """Whether a module is a BatchNorm whose running statistics a recompute can leave alone."""
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _updates_statistics(run: Run) -> bool:
    target = str(run.node.target)
    return "batch_norm" in target and "backward" not in target and any(a is True for a in run.node.args)
