"""Lower a recorded eager step to a training graph, and find the modules in it that can be checkpointed.

An operation reads, besides what it is called with, every storage for which it is the last to find it
alive: so the simulator frees things when eager does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.capture import operands
from planner.capture.eager.trace import Call, Trace
from planner.capture.joint import JointGraph, is_collective, is_random, tensors_of
from planner.capture.lowering import LoweredGraph
from planner.capture.model_facts import has_distributed_tensors, units_of
from planner.capture.sharding import StepBuilder, spread_gradients
from planner.capture.storages import Run, Turn, freed_after
from planner.capture.torch_internals import BatchNorm, OpOverload, is_mutable
from planner.ir.builder import StepContext
from planner.ir.checkpoints import END, HOLD, KEPT, SCRATCH, STOP, Keepable, Region
from planner.ir.graph import FOUND_TARGET, chooses
from planner.ir.layers import is_within

_CUDNN_RNN, _DROPOUT_OF_RNN = "aten._cudnn_rnn.default", 11

_LAYER_CLASS = "GradientCheckpointingLayer"
"""What Hugging Face's models derive their layers from."""


@dataclass(frozen=True)
class EagerStep:
    """An eager step as a graph, what of it can be checkpointed, and the workspace that was seen of some operations."""

    lowered: LoweredGraph
    regions: tuple[Region, ...]
    workspace_bytes: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A call that can be checkpointed: recomputes its runs up to before ``stop``.

    That happens before run ``before`` of the backward; until run ``until`` something of it is saved. ``keepable`` are
    those that need not run, if their outputs are kept.
    """

    module: str
    call: Call
    stop: int
    before: int
    until: int
    statistics_bytes: int
    keepable: tuple[int, ...]


def lower_eager(trace: Trace, model: nn.Module, inputs: list[torch.Tensor], context: StepContext) -> EagerStep:
    """Lower a recorded step, given ``inputs``."""
    return _Lowering(trace, model, context).run(inputs)


class _Lowering(StepBuilder):
    def __init__(self, trace: Trace, model: nn.Module, context: StepContext) -> None:
        super().__init__(context)
        self.trace = trace
        self.modules = dict(model.named_modules())
        self.is_parallel = has_distributed_tensors(model)
        units = {}
        if context.gradient_shards > 1:
            finds_gradients = context.finds_gradients
            units = {unit.path: unit.as_planned(finds_gradients=finds_gradients) for unit in units_of(model)}
        spread = spread_gradients(units, trace.gradients)
        for index, storage in enumerate(trace.storages):
            # What is not the device's, or is counted with the loss, takes nothing.
            is_elsewhere = storage.is_stand_in or (storage.is_number and not context.on_cpu)
            size_bytes = 0 if is_elsewhere else storage.size_bytes
            stays = storage.died is None and index not in spread
            self.add_value(f"storage {index}", size_bytes, kind=storage.kind, retained=stays)
        if units:
            self.shard(units, self._gradient_of)
        self.let_go = self._let_go()
        self.written = {value for run in trace.runs for value in run.writes}
        self.run_at: list[int] = []
        self.first_at: list[int] = []
        """For each run, what comes first of what stands for the time between it and the one before."""
        self.noted: dict[tuple[str, str], int] = {}
        """Operations that cost nothing, by target and module; stand-ins by the operation that they stand in for."""

    def _gradient_of(self, name: str) -> int | None:
        """Return the gradient of a parameter, once it is there."""
        found = self.trace.gradients.get(name)
        return found if found in self.made else None

    def _let_go(self) -> defaultdict[int, list[int]]:
        """Return for each run the storages that are released right after it."""
        found = freed_after(self.trace.storages)
        for save in self.trace.saves:
            if save.storage is not None:
                until = len(self.trace.runs) if save.released is None else save.released
                found[until - 1].append(save.storage)
        for last, storages in found.items():
            found[last] = [s for s in storages if self.trace.storages[s].maker < last and not self.values[s].retained]
        return found

    def run(self, inputs: list[torch.Tensor]) -> EagerStep:
        candidates = list(self._candidates())
        self._add_operations(candidates)
        lowered = LoweredGraph(JointGraph.without_graph(inputs), self.finish(), self.operation_nodes)
        seen = {i: run.workspace_bytes for i, run in zip(self.run_at, self.trace.runs, strict=False)}
        return EagerStep(
            lowered,
            tuple(map(self._region, candidates)),
            {index: size_bytes for index, size_bytes in seen.items() if size_bytes is not None},
        )

    # Operations.

    def _add_operations(self, candidates: Sequence[_Candidate]) -> None:
        """Add the runs, and between them the operations that mark lifetimes of checkpoints."""
        if self.trace.found:
            self.add_once(FOUND_TARGET, "", (), self.trace.found)
        self.add_kept((self.values[s].name, self.values[s].size_bytes, None) for s in self.trace.returned)
        begins, stops = defaultdict(list), defaultdict(list)
        for candidate in candidates:
            begins[candidate.call.begin].append(candidate)
            stops[candidate.stop].append(candidate)
        keepable = {position for candidate in candidates for position in candidate.keepable}
        for position in range(len(self.trace.runs) + 1):
            for candidate in stops[position]:
                self._add_stop(candidate)
            for candidate in begins[position]:
                state_bytes = self.random_state_bytes + candidate.statistics_bytes
                self._add_note(HOLD, candidate.module, candidate.call.given, state_bytes=state_bytes)
            if position == self.trace.backward:
                made = self.add_loss_values()
                self.add_loss(self.trace.returned, made)
                if self.trace.tangents > position:  # what it works with is there until the outputs have their gradients
                    self.let_go[self.trace.tangents - 1] += [v for v in made if not self.values[v].retained]
            self.first_at.append(len(self.operations))
            if position < len(self.trace.runs):
                self.run_at.append(self._add_run(position))
            if position in keepable:
                ran = self.operations[-1]  # its outputs, which are kept, are looked up where it would run again
                self._add_note(KEPT, ran.module, (*ran.inputs, *ran.outputs), of=ran.name)
        if self.sharding:
            self.sharding.end()
        self.run_at.append(self._add_note(END, "", ()))

    def _add_run(self, position: int) -> int:
        run = self.trace.runs[position]
        if isinstance(run, Turn):
            return self.add_turn(run.module, run.is_entered, self.let_go[position])
        reads = (*run.reads, *self.let_go[position])
        target, name = str(run.node.target), f"{run.node.name}_{position}"
        return self.add(target, reads, run.makes, name=name, module=run.module, node=run.node, **run.facts)

    def _add_note(
        self, target: str, module: str, reads: Iterable[int], makes: Iterable[int] = (), of: str = "", **facts: Any
    ) -> int:
        """Add an operation that costs nothing, of a module if nothing else is said."""
        name = f"{target} {of}" if of else f"{target} of {module}"
        index = self.add(target, reads, makes, name=name, module=module, **facts)
        self.noted[target, of or module] = index
        return index

    def _add_stop(self, candidate: _Candidate) -> None:
        alive = [
            value
            for run in self.trace.runs[candidate.call.begin : candidate.stop]
            for value in run.makes
            if (died := self.trace.storages[value].died) is None or died > candidate.stop
        ]
        if self.random_state_bytes:
            state = self.add_value(f"random state beside {candidate.module}", self.random_state_bytes)
            self._add_note(SCRATCH, candidate.module, (), (state,))
            alive.append(state)
        self._add_note(STOP, candidate.module, alive)

    # Regions of them.

    def _region(self, candidate: _Candidate) -> Region:
        module = candidate.module
        scratch = [self.noted[SCRATCH, module]] if self.random_state_bytes else []
        keepable = [self._keepable_at(position, candidate.call) for position in candidate.keepable]
        region = Region(
            module=module,
            hold=self.noted[HOLD, module],
            recompute=(*scratch, *self.run_at[candidate.call.begin : candidate.stop], self.noted[STOP, module]),
            recompute_before=self.first_at[candidate.before],
            release_at=self.first_at[candidate.until],
            keepable=tuple(keepable),
        )
        return region.keeping([one for one in keepable if one.is_choice])

    def _keepable_at(self, position: int, call: Call) -> Keepable:
        run, operation = self.trace.runs[position], self.operations[self.run_at[position]]
        return Keepable(
            index=self.run_at[position],
            stand_in=self.noted[KEPT, operation.name],
            operator=operation.target,
            occurrence=run.occurrence - call.called[run.node.target],
            is_random=is_random(run.node),
            is_choice=chooses(operation.target),
        )

    # What can be checkpointed.

    def _candidates(self) -> Iterable[_Candidate]:
        layers = [n for n, m in self.modules.items() if any(c.__name__ == _LAYER_CLASS for c in type(m).__mro__)]
        for module, calls in self.trace.calls.items():
            inside = not layers or any(is_within(module, layer) for layer in layers)
            if inside and len(calls) == 1 and calls[0].begin < self.trace.backward:
                candidate = self._candidate(module, calls[0])
                if candidate is not None:
                    yield candidate

    def _candidate(self, module: str, call: Call) -> _Candidate | None:
        """Return what checkpointing a call would do; None if that frees nothing, or would not be right."""
        runs = self.trace.runs
        stop = max((save.saved for save in call.saves), default=call.begin)
        made = frozenset(value for run in runs[call.begin : stop] for value in run.makes)
        read = [save.read for save in call.saves if save.read is not None]
        until = max((len(runs) if save.released is None else save.released for save in call.saves), default=stop)
        if not (read and any(save.storage in made for save in call.saves)):
            return None
        if any(self.values[value].retained for value in made):
            return None  # beside what stays to the end, a second copy would be there for a while
        before = min(read)
        finds = {*call.given, *(value for run in runs[call.begin : stop] for value in run.reads)} - made
        if any(position < self.trace.backward for position in read) or not self._is_repeatable(call):
            return None
        if any(value in finds for run in runs[call.end : before] for value in run.writes):
            return None
        # Some operators save a buffer and then fill it, as RReLU does its noise. Torch ends a second run at the last
        # save: one that such an operator makes would be read unfilled (`test_saved_before_it_is_filled`).
        if any(save.storage in run.writes for run in runs[stop : stop + 1] for save in call.saves):
            return None
        return _Candidate(
            module=module,
            call=call,
            stop=stop,
            before=before,
            until=until,
            statistics_bytes=sum(  # copies that a recompute updates in place of running statistics
                self.aligned(buffer.numel() * buffer.element_size())
                for name, part in self.modules.items()
                if is_within(name, module) and keeps_statistics(part)
                for buffer in part.buffers()
            ),
            keepable=self._keepable(range(call.begin, stop)),
        )

    def _keepable(self, positions: range) -> tuple[int, ...]:
        """Return the runs that are worth keeping: products, convolutions, attention, and choices of a router.

        What is kept must still be what its operator gave: nothing writes into it. A random operation that is kept does
        not draw again, so those that come after it would draw what it drew: all are kept, or none.
        """
        runs = self.trace.runs
        if self.is_parallel:
            return ()  # torch keeps what operators on whole tensors give, and what is seen here are parts
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
            and (chooses(str(target)) or run.flops > max((tensor.numel() for tensor in tensors), default=0))
        )

    def _is_repeatable(self, call: Call) -> bool:
        """Whether a second run of a call would find and leave everything outside it as the first did."""
        runs = self.trace.runs[call.begin : call.end]
        made = {value for run in runs for value in run.makes}
        for run in runs:
            if isinstance(run, Turn):
                return False  # whatever is gathered inside would have to be once more
            target = str(run.node.target)
            if target == _CUDNN_RNN and run.node.args[_DROPOUT_OF_RNN] != 0.0:
                return False  # cuDNN draws from a state of its own, which nobody can put back
            # Ranks that share every layer have one plan, and so run the same collectives again.
            speaks = is_collective(run.node) and not self.is_parallel
            if speaks or target.startswith("c10d") or not made.issuperset(run.writes):
                return False
            in_training = "batch_norm" in target and "backward" not in target and any(a is True for a in run.node.args)
            if (run.writes_resident or in_training) and not keeps_statistics(self.modules.get(run.module)):
                return False
        return True


def keeps_statistics(module: nn.Module | None) -> bool:
    """Whether a module is a BatchNorm whose running statistics a recompute can leave alone."""
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
