"""CUDA graphs without CUDA: what a capture calls is noted, and called again on the same memory when it is launched.

Numbers are then those that kernels would compute, which no stand-in for a GPU can say. Memory that a graph does not own
at a moment is poisoned: whatever reads it would be wrong on a GPU, where something else may lie there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from planner.capture import cuda_graph_internals
from planner.capture.cuda_graph_internals import Draw, DrawsAgain, FirstDraws, Place
from planner.capture.torch_internals import run_and_save_rng_state
from planner.measure import resident
from planner.runtimes import _cuda_graphs

_states: list[torch.Tensor] = []
"""That the next launch of a forward fills: where its random operations draw."""


def tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def poison(found: torch.Tensor) -> None:
    if found.is_floating_point():
        found.fill_(math.nan)
    elif found.dtype != torch.bool:
        found.fill_(torch.iinfo(found.dtype).max)


class Tape(TorchDispatchMode):
    """Notes what is called; what it does to memory that was there before is undone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.own: dict[int, torch.Tensor] = {}
        """By storage, what was made meanwhile."""
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors((args, kwargs)):
            storage = tensor.untyped_storage().data_ptr()
            if func._schema.is_mutable and storage not in self.own:
                self.before.setdefault(storage, (tensor, tensor.clone()))
        made = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, made))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        for tensor in tensors(made):
            if tensor.untyped_storage().data_ptr() not in given:
                self.own.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return made

    def note(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


_tapes: list[Tape] = []
"""The one that is running."""


class SoftwareRecorder:
    """In place of a recorder of CUDA graphs."""

    def __init__(self, _device: torch.device) -> None:
        pass

    def record(self, pool: list[Any], run: Callable[[], Any], _generators: Any = ()) -> tuple[Callable[[], None], Any]:
        state = torch.get_rng_state()
        _tapes.append(tape := Tape())
        with tape:
            made = run()
        _tapes.pop()
        torch.set_rng_state(state)
        for tensor, before in tape.before.values():
            tensor.copy_(before)
        kept = {tensor.untyped_storage().data_ptr() for tensor in tensors(made)}
        slots = {func[3].untyped_storage().data_ptr() for func in tape.calls if is_slot(func)}
        pool.append(tape)

        def launch() -> None:
            for storage, tensor in tape.own.items():
                if storage not in slots:
                    poison(tensor)
            for call in tape.calls:
                again(call)
            others = [other for other in pool if other is not tape and tape is pool[-1]]  # a backward frees all
            for own in [tape.own, *(other.own for other in others)]:
                for storage, tensor in own.items():
                    if storage not in kept:
                        poison(tensor)

        def look(found: Any) -> Any:  # nobody but the tape is to own its memory
            is_own = isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() in tape.own
            return SoftwarePlace.of(found).tensor() if is_own else found

        return launch, [*map(look, made)]


def is_slot(call: Any) -> bool:
    """Whether a call makes room for what is copied in before a launch."""
    return isinstance(call, tuple) and call[0] is torch.ops.aten.empty_strided.default and len(_tapes) == 0


def again(call: Any) -> None:
    if callable(call):
        call()
        return
    func, args, kwargs, made = call
    if func._schema.name.startswith("aten::empty"):
        return
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
    for before, now in zip(tensors(made), tensors(func(*args, **kwargs)), strict=True):
        if before.untyped_storage().data_ptr() not in given:
            before.copy_(now)


class SoftwarePlace(Place):
    """In place of a place on a GPU."""

    def tensor(self) -> torch.Tensor:
        storage = torch._C._construct_storage_from_data_pointer(self.pointer, torch.device("cpu"), self.storage_bytes)
        look = self.metadata
        with _disable_current_modes():
            empty = torch.empty(0, dtype=look["dtype"])
            return empty.set_(storage, look["storage_offset"], look["size"], look["stride"])


class SoftwareFirst(FirstDraws):
    def first(self, operator: Any, args: Any, kwargs: Any) -> Any:
        number, self.count = self.count, self.count + 1
        if not self.is_captured:
            self.offsets.append(number)
            return run_and_save_rng_state(operator, *args, **kwargs)
        _tapes[-1].note(lambda: _states[number].copy_(torch.get_rng_state()))
        return Draw(number), operator(*args, **kwargs)


class SoftwareAgain(DrawsAgain):
    def again(self, state: Any, operator: Any, args: Any, kwargs: Any) -> Any:
        own = self.generators[len(self.used)]
        self.used.append((self.positions[id(state)], own))
        kept: list[torch.Tensor] = []

        def begin() -> None:
            kept.append(torch.get_rng_state())
            torch.set_rng_state(own.get_state())

        _tapes[-1].note(begin)
        made = operator(*args, **kwargs)
        _tapes[-1].note(lambda: torch.set_rng_state(kept.pop()))
        return made


class SoftwareStates:
    def __init__(self, offsets: Sequence[int]) -> None:
        self._count = len(offsets)

    def now(self) -> list[torch.Tensor]:
        _states[:] = [torch.empty_like(torch.get_rng_state()) for _ in range(self._count)]
        return list(_states)


@contextmanager
def first_draws(offsets: list[int], *, is_captured: bool) -> Iterator[None]:
    with cuda_graph_internals._told(SoftwareFirst(offsets, is_captured)):
        yield


@contextmanager
def draws_again(arguments: Sequence[Any], generators: list[torch.Generator]) -> Iterator[DrawsAgain]:
    draws = SoftwareAgain({id(each): at for at, each in enumerate(arguments)}, generators)
    with cuda_graph_internals._told(draws):
        yield draws


def install(patch: pytest.MonkeyPatch) -> None:
    """Let planned steps be captured on a CPU."""

    def are_at(values: list[Any], pointers: list[int], positions: list[int]) -> bool:
        return all(values[at].data_ptr() == pointers[at] for at in positions)

    own = {
        "Recorder": SoftwareRecorder,
        "Place": SoftwarePlace,
        "States": SoftwareStates,
        "first_draws": first_draws,
        "draws_again": draws_again,
        "are_at": are_at,
        "new_pool": list,
        "new_generators": lambda count: [torch.Generator() for _ in range(count)],
        "is_capturing": lambda: False,
        "stream_on": lambda _device: 0,
        "check_can_capture": lambda *_: None,
    }
    for name, value in own.items():
        patch.setattr(_cuda_graphs, name, value)
    patch.setattr(resident, "_graph_memory", lambda *_: None)
