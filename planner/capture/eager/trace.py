"""The recorder of an eager step: operators by module, saved activations, and lifetimes of storages.

What autograd saves is replaced by copies while the step is recorded. A storage then dies when the
last of the program's own names for it goes, and until when autograd would have held it is known
apart from that. Both together give the memory of the step under any choice of checkpoints.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any

import torch

from planner.capture.autograd_accumulation import EngineSums
from planner.capture.fake_internals import with_its_number
from planner.capture.joint import draws
from planner.capture.memory import is_profiled, measure_peak
from planner.capture.operands import is_opaque
from planner.capture.provenance import is_library, short_path
from planner.capture.storages import Run, StepRecorder, Storage
from planner.capture.torch_internals import CHECKPOINT, FakeTensor, numbers_among, taken_apart
from planner.capture.trees import sparse_in, tensors_in
from planner.errors import UsageError

_CHECKPOINTS_ITSELF = (
    "the model calls torch.utils.checkpoint itself, at {}; under the runtime 'modules' the plan decides what is "
    "recomputed: call block(x) there instead of checkpoint(block, x). Where the runtime 'graph' can capture a "
    "model, it replaces such calls"
)

_RECORD = os.path.join(os.path.dirname(__file__), "record.py")

_KEEP_NUMBERS = {getattr(torch.ops.aten, name).Tensor for name in ("mul", "mul_", "div", "div_")}
"""Operators whose derivative needs the number that they are called with, of which torch makes a tensor."""

_NUMBER_BYTES = 8


@dataclass
class Save:
    """One tensor saved for backward: before which runs it was saved, first read, and let go.

    ``storage`` is None for what is resident.
    """

    storage: int | None
    module: str
    saved: int
    read: int | None = None
    released: int | None = None


@dataclass
class Call:
    """One call of a module: the runs from ``begin`` to before ``end``, what it was given, what it saved.

    ``called`` is how often each operator had been called before.
    """

    begin: int
    called: Counter[Any]
    end: int = 0
    given: tuple[int, ...] = ()
    saves: list[Save] = field(default_factory=list)


@dataclass
class Trace:
    """A recorded step.

    ``runs`` from ``backward`` on, -1 until it begins, are of the backward; before ``tangents`` those that stand for a
    loss outside have given the outputs their gradients. ``is_real`` says that the step was run with data,
    ``depends_on_data`` that only data tell what runs, and ``draws`` that numbers tell which the step drew.
    ``outside_bytes`` go to a loss outside the model: none do where it returns its loss. ``returned_cache`` says that
    it gives a cache of keys and values back, ``repeats`` that an operator gave one tensor for two of its results.
    ``operators`` is how many were called, views among them.
    """

    runs: list[Run]
    storages: list[Storage]
    saves: list[Save] = field(default_factory=list)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    backward: int = -1
    tangents: int = -1
    is_real: bool = False
    depends_on_data: bool = False
    draws: bool = False
    outside_bytes: int = 0
    returned_cache: bool = False
    repeats: bool = False
    operators: int = 0
    gradients: dict[str, int] = field(default_factory=dict)
    """Storages of the gradients of parameters, by their paths."""
    found: list[int] = field(default_factory=list)
    """Storages of gradients that earlier backwards have left."""
    returned: list[int] = field(default_factory=list)
    """Storages of outputs that the loop drops before the backward, or keeps until the next call has returned."""


class _Saved:
    """Stands for a saved tensor so that its lifetime is seen: a copy of its storage, or itself if resident."""

    def __init__(self, tensor: torch.Tensor, save: Save) -> None:
        self.save = save
        self.tensor = tensor
        if save.storage is not None:
            local, self.made_of = taken_apart(tensor)
            self.device, self.layout = local.device, (local.shape, local.stride(), local.storage_offset())
            self.tensor = self._copied(local)

    def restored(self) -> torch.Tensor:
        if self.save.storage is None:
            return self.tensor
        return self.made_of(self.tensor.to(self.device).as_strided(*self.layout))

    @staticmethod
    def _copied(tensor: torch.Tensor) -> torch.Tensor:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if isinstance(tensor, FakeTensor):
            return torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
        # On the host: a step that does not fit on the device without a plan must be recordable there.
        return tensor.detach().as_strided((elements,), (1,), 0).to("cpu", copy=True)


class Recorder(StepRecorder[Run]):
    """Records operators, saved tensors, and lifetimes of storages."""

    def __init__(self, fakes: Any, sums: EngineSums) -> None:
        super().__init__(fakes, sums)
        self.trace = Trace(self.events, self.storages)
        self._called: Counter[Any] = Counter()
        self._drawn = DrawnNumbers()
        self._stack: list[tuple[str, Call]] = []

    # Operators.

    def watch(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run and record a call, with its workspace if only running it shows that."""
        given = tensors_in((args, kwargs))
        shows = is_opaque(function) or sparse_in((args, kwargs))
        if not shows or isinstance(given[0], FakeTensor) or is_profiled():
            return super().watch(function, args, kwargs)
        peak_bytes, result = measure_peak(lambda: function(*args, **kwargs), given[0].device)
        run = self.note(function, args, kwargs, result)
        if run is not None:
            run.workspace_bytes = max(0, peak_bytes - sum(self.storages[value].size_bytes for value in run.makes))
        return result

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a call; a number that it draws on the host has a value without data too."""
        return self._drawn.drawn(function, args, kwargs, super().run(function, args, kwargs))

    def note(self, function: Any, args: Any, kwargs: Any, result: Any) -> Run | None:
        """Record a call, its occurrence, and the numbers that autograd keeps of it."""
        run = super().note(function, args, kwargs, result)
        reads = run.reads if run is not None else self.numbers(tensors_in((args, kwargs)))
        results = tensors_in(result)
        makes = run.makes if run is not None else ()
        self._drawn.follow(draws(function, args, kwargs), reads, makes, results)
        self.trace.repeats |= len(set(map(id, results))) < len(results)
        if run is not None:
            run.occurrence = self._called[function]
            in_forward = self.trace.backward < 0 and function in _KEEP_NUMBERS
            if in_forward and any(t.requires_grad for t in tensors_in((args, kwargs))):
                # No hook tells when numbers go that are kept for the backward, so they are there to its end.
                first, count = len(self.storages), numbers_among(function, args)
                self.storages += [Storage(_NUMBER_BYTES, self.now - 1, is_number=True) for _ in range(count)]
                run.makes += tuple(range(first, first + count))
        self._called[function] += 1
        return run

    def source(self) -> str:
        """Return the line of the user's code that runs an operator of the forward."""
        return _source() if self.trace.backward < 0 else ""

    def finish(self) -> None:
        """End the step; live storages outlive it."""
        super().finish()
        self.trace.draws = self._drawn.decide
        self.trace.operators = self._called.total()
        for storage in self.storages:
            if storage.is_number:
                storage.died = self.now

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark a tensor as a stand-in for the loss."""
        number = self.number(tensor)
        assert number is not None
        self.storages[number].is_stand_in = True
        return tensor

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Record a saved tensor, and return a copy to be held in its place."""
        # A sparse tensor stays as it is: its parts count as long as anybody holds it.
        storage = self.number(tensor) if tensor.layout is torch.strided else None
        save = Save(storage, self.module, self.now)
        self.trace.saves.append(save)
        for _, call in self._stack:
            call.saves.append(save)
        with self.silent(), torch.no_grad():
            saved = _Saved(tensor, save)
        weakref.finalize(saved, self._released, save)
        return saved

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Record that the backward reads a saved tensor, for the module that saved it."""
        if saved.save.read is None:
            saved.save.read = self.now
        self.within = [saved.save.module]
        with self.silent(), torch.no_grad():
            return saved.restored()

    def _released(self, save: Save) -> None:
        save.released = self.now

    # Modules.

    def call(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module's call and record its runs."""
        call = Call(self.now, self._called.copy(), given=self.numbers(tensors_in([*args, *kwargs.values()])))
        self.trace.calls.setdefault(name, []).append(call)
        self._stack.append((name, call))
        self.within = [name]
        try:
            return run(*args, **kwargs)
        finally:
            call.end = self.now
            self._stack.pop()
            self.within = [name for name, _ in self._stack[-1:]]


def _source() -> str:
    """Return the line of the user's code that runs an operator; UsageError if ``torch.utils.checkpoint`` runs that."""
    source, checkpointed = "", False
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        if file == _RECORD:
            break  # what lies further out called the planner, not the operator
        if frame.f_code is CHECKPOINT:
            checkpointed = True
        elif not is_library(file):
            if checkpointed:
                raise UsageError(_CHECKPOINTS_ITSELF.format(f"{short_path(file)}:{line}"))
            source = source or f"{short_path(file)}:{line}"
    return source


class DrawnNumbers:
    """Follows drawn random numbers through a recorded step."""

    def __init__(self) -> None:
        self.decide = False
        """Whether the program looked at one."""
        self._storages: set[int] = set()

    def drawn(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return the result of a call, with its number if the call draws one on the host."""
        if isinstance(result, FakeTensor) and _is_number(result) and draws(function, args, kwargs):
            return result if tensors_in((args, kwargs)) else with_its_number(result, function, args, kwargs)
        return result

    def follow(
        self, is_random: bool, reads: Sequence[int], makes: Sequence[int], results: Sequence[torch.Tensor]
    ) -> None:
        """Record what a call computes from drawn numbers, given the storages that it reads and makes."""
        if not (self._storages.issuperset(reads) if reads else is_random):
            return
        self.decide |= not results
        if all(map(_is_number, results)):
            self._storages.update(makes)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.device.type == "cpu"
