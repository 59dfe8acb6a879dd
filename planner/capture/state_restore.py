"""Restore a program after a recorded step: gradients, buffers, attributes, batches, caches and random states.

A recording without data leaves tensors without data wherever the model keeps something from one call to the next: a
real step would then run on them, and everything that it makes would have no data either.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.inputs import Inputs
from planner.capture.torch_internals import FakeTensor, call_implementation, storage_id, written_arguments

_CACHE = type(functools.lru_cache(lambda: None))
_LINK = "_lru_list_elem"
"""What such a cache with a size keeps each of its entries in."""

_OWN = __name__.partition(".")[0]
_CONTAINERS = (OrderedDict, dict, list, set)
_ABSENT = object()

_STEPS_FROM_MODULES, _STEPS_FROM_GLOBALS = 4, 1
"""How deep containers are looked for in one another: from a module's attributes, and from globals."""


@contextmanager
def put_back(model: nn.Module, given: Any = ()) -> Iterator[None]:
    """Undo what a step does to a model, to what it is given, and to what these refer to: see the module."""
    kept = [(holder, kind, _copy(holder, kind)) for holder, kind in _containers(model, given)]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not (isinstance(b, FakeTensor) or b.is_meta)]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with random_states_kept():
            yield
    finally:
        for holder, kind, before in kept:
            _restore(holder, kind, before)
        _clear_caches(model)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def written_by(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Return the parameters and inputs that a call without gradients writes into, as they were and are again."""
    with put_back(model, inputs), written_back([*model.parameters(), *inputs.tensors()]) as written, torch.no_grad():
        call_implementation(model)(*inputs.args, **inputs.kwargs)
    return [tensor for tensor, _ in written]


@contextmanager
def written_back(tensors: Iterable[torch.Tensor]) -> Iterator[Sequence[tuple[torch.Tensor, torch.Tensor]]]:
    """Undo what a step with data writes into tensors: parameters and inputs.

    A tensor is copied before it is written into for the first time: what is only read takes no memory. Tensors and
    copies are given as they come, those that are given other memory (``.data =``) in the end.
    """
    memories = [(tensor, tensor.data) for tensor in tensors if tensor.layout is torch.strided]
    writes = _Writes(tensor for tensor, _ in memories)
    try:
        with writes:
            yield writes.before
    finally:
        moved = [(tensor, memory) for tensor, memory in memories if storage_id(tensor) != storage_id(memory)]
        for tensor, memory in moved:
            tensor.data = memory
        with torch.no_grad():
            for tensor, before in writes.before:
                tensor.copy_(before)
        writes.before += moved


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._at: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            self._at[storage_id(tensor)].append(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in written_arguments(function, args, kwargs):
            if written.layout is torch.strided:
                self.before += [(one, one.detach().clone()) for one in self._at.pop(storage_id(written), ())]
        return function(*args, **kwargs)


def _containers(model: nn.Module, given: Any) -> list[tuple[Any, Any]]:
    """Return the attributes, lists, dicts and sets in which a model, its code's globals and a batch keep things.

    Each comes with the class of Python's that it is, or derives from. A program's data may be reached from both, so a
    model's are followed for a few steps, and globals for one. Hooks are among a model's attributes, and keep things in
    what their functions refer to. A forward may write into a batch that torch does not know as a container, and return
    it: what it wrote while it was recorded has no data.
    """
    found: dict[int, tuple[Any, Any]] = {}
    ahead: list[tuple[Any, int]] = [(module, _STEPS_FROM_MODULES) for module in (*model.modules(), given)]
    ahead += [(names, _STEPS_FROM_GLOBALS) for names in _globals({type(module) for module in model.modules()})]
    while ahead:
        at, steps = ahead.pop()
        inside: list[Any] = []
        if isinstance(at, (FunctionType, MethodType)):
            inside = _referred_to(at)
        elif isinstance(at, tuple):
            inside = list(at)
        holders: list[Any] = [at, getattr(at, "__dict__", None)]
        for holder in holders:
            kind: Any = next((kind for kind in _CONTAINERS if isinstance(holder, kind)), None)
            if kind is not None and id(holder) not in found:
                found[id(holder)] = (holder, kind)
                inside += kind.values(holder) if issubclass(kind, dict) else kind.__iter__(holder)
        ahead += [(one, steps - 1) for one in inside if steps and _may_hold(one)]
    return list(found.values())


def _referred_to(function: FunctionType | MethodType) -> list[Any]:
    """Return what a function refers to outside itself that is not global, or what it is a method of."""
    if isinstance(function, MethodType):
        return [function.__self__]
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]


def _globals(classes: Iterable[type]) -> Iterator[dict[str, Any]]:
    """Return the globals of the code of classes."""
    names = {one.__module__ for one in classes}
    return (vars(sys.modules[name]) for name in names if name in sys.modules)


def _may_hold(one: Any) -> bool:
    """Whether an object may hold tensors of a recording: no class, no tensor itself, nothing of the planner."""
    is_plain = isinstance(one, (torch.Tensor, type, ModuleType, str, int, float, bytes, type(None)))
    return not is_plain and type(one).__module__.partition(".")[0] != _OWN


def _copy(holder: Any, kind: Any) -> Any:
    """Return the items of a container, by its base class: transformers' ``ACT2FN`` makes what it is asked for."""
    return dict(kind.items(holder)) if issubclass(kind, dict) else kind(kind.__iter__(holder))


def _restore(holder: Any, kind: Any, before: Any) -> None:
    """Give a container the items that it had, by its base class: ``ModelOutput`` refuses deletions, say."""
    if kind is list:
        if len(holder) != len(before) or any(a is not b for a, b in zip(holder, before, strict=True)):
            holder[:] = before
    elif kind is set:
        if holder != before:
            holder.clear()
            holder.update(before)
    else:
        for key in [key for key in kind.keys(holder) if key not in before]:
            kind.__delitem__(holder, key)
        now = dict(kind.items(holder))
        for key, value in before.items():
            if now.get(key, _ABSENT) is not value:
                kind.__setitem__(holder, key, value)
        if list(kind.keys(holder)) != list(before):  # hooks run in their order
            kind.clear(holder)
            for key, value in before.items():
                kind.__setitem__(holder, key, value)


def _clear_caches(model: nn.Module) -> None:
    """Clear the caches of a model's own methods, and of functions beside them, that keep tensors without data."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    ahead = [one for names in (*map(vars, classes), *_globals(classes)) for one in names.values()]
    seen = set[int]()
    while ahead:
        one = ahead.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) is _CACHE:
            if any(isinstance(tensor, FakeTensor) for tensor in _tensors_of(one)):
                one.cache_clear()
        elif isinstance(one, FunctionType):
            ahead += _referred_to(one)
        elif isinstance(one, (staticmethod, classmethod)):
            ahead.append(one.__func__)
        elif isinstance(one, property):
            ahead.append(one.fget)


def warn_of_what_is_kept(alive: Callable[[], Collection[int]], name: str) -> None:
    """Warn if anything keeps some of a recording, whose storages ``alive`` gives: the model is then not as it was."""
    if alive():
        gc.collect()
    if alive():
        warnings.warn(
            f"{name} keeps tensors of a step that was recorded without data, outside of its modules: build it again "
            "before training, or plan with runtime='graph' and a budget in bytes",
            stacklevel=2,
        )


def _tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """Return the tensors that a cache of ``functools`` has among what it returns."""
    ahead, seen = [cache], set[int]()
    while ahead:
        for one in gc.get_referents(ahead.pop()):
            if isinstance(one, torch.Tensor):
                yield one
            elif id(one) not in seen and (isinstance(one, (dict, list, tuple)) or type(one).__name__ == _LINK):
                seen.add(id(one))
                ahead.append(one)


def _numpy_state() -> list[Any]:
    """Return numpy's random state, numbers as bytes, which can be compared; nothing where nobody imported it."""
    state = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) else ()
    return [part.tobytes() if hasattr(part, "tobytes") else part for part in state]


def _states_of_torch() -> list[bytes]:
    """Return the states of the CPU and of GPUs as bytes: tensors would be in measured peaks."""
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [bytes(state.tolist()) for state in (torch.get_rng_state(), *of_gpus)]


@dataclass
class HostStates:
    """The random states of Python and numpy at the time of creation: torch's checkpoint restores neither."""

    of_python: Any = field(default_factory=random.getstate)
    of_numpy: list[Any] = field(default_factory=_numpy_state)

    def restore(self) -> None:
        """Restore these states."""
        random.setstate(self.of_python)
        if self.of_numpy:
            numpy = sys.modules["numpy"]
            own = (numpy.frombuffer(part, numpy.uint32) if isinstance(part, bytes) else part for part in self.of_numpy)
            numpy.random.set_state(tuple(own))


@dataclass
class RandomStates(HostStates):
    """All random states as they are when this is made."""

    of_torch: list[bytes] = field(default_factory=_states_of_torch)

    def restore(self) -> None:
        """Restore these states."""
        super().restore()
        cpu, *of_gpus = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self.of_torch)
        torch.set_rng_state(cpu)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)


def seed_all(number: int) -> None:
    """Seed all random states but those of GPUs."""
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


@contextmanager
def random_states_kept(*, if_it_fails: bool = False) -> Iterator[None]:
    """Restore all random states after the context, or only if it raises."""
    states = RandomStates()
    try:
        yield
    except BaseException:
        states.restore()
        raise
    if not if_it_fails:
        states.restore()
