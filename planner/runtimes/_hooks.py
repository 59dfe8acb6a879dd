"""Saved-tensor hooks that offload to host memory what chosen modules save for backward.

They are entered around a module's call, and see what is saved there. Around a checkpoint they see what it saves
itself, which is what it was given: its own hooks lie further in, and keep what is saved inside. A tensor is sent when
it is saved, and one place holds all that is saved of its storage. It is let go on the device at the end of a module's
call, when computing has waited for it to be sent: the one that the plan names. It is fetched where the backward first
reads it, or before, where the backward comes to a module that the plan names, and is there until all that the module
saved of it has been read. A further backward through the same step fetches it again.

Autograd looks whether what it saved was written into since. Of what hooks give it, it knows nothing, so they look:
at what stays on the device when the backward reads it, and at what is sent when it is let go, until which it may not
have been copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from planner.capture.eager.trace import is_plain
from planner.capture.torch_internals import storage_id, version_of
from planner.errors import RuntimeUnsupportedError
from planner.plans.offload import OffloadedModule
from planner.rewrite import host_copies


class Waiting:
    """What the modules of one call of a model send; its end lets everything go."""

    def __init__(self, modules: Iterable[OffloadedModule]) -> None:
        plans = {plan.module: plan for plan in modules}
        self.of = {name: _Module(name, frozenset(plan.tensors)) for name, plan in plans.items()}
        self._leaving: defaultdict[str, list[_Module]] = defaultdict(list)
        for name, plan in plans.items():
            self._leaving[plan.leaves_with].append(self.of[name])
            if plan.returns_with != name and plan.returns_with in self.of:
                self.of[plan.returns_with].coming.append(self.of[name])

    def saving(self, name: str) -> AbstractContextManager[Any]:
        """Send, of what is saved meanwhile, the tensors that the plan names by their numbers."""
        module = self.of[name]
        return saved_tensors_hooks(module.pack, module.unpack)

    def given(self, name: str, tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """Send, of what is saved meanwhile, those of these tensors that the plan names by their numbers."""
        module = self.of[name]
        chosen = {storage_id(tensors[number]) for number in module.numbers if number < len(tensors)}

        def pack(tensor: torch.Tensor) -> _Stays | _Saved:
            return module.pack(tensor, is_plain(tensor) and storage_id(tensor) in chosen)

        return saved_tensors_hooks(pack, module.unpack)

    def ended(self, name: str) -> None:
        """Let go of what leaves with the end of a module's call."""
        for module in self._leaving[name]:
            module.let_go()

    def end(self) -> None:
        """Let go of everything."""
        for module in self.of.values():
            module.let_go()


class _Module:
    """What one call of a module saves, and sends."""

    def __init__(self, name: str, numbers: frozenset[int]) -> None:
        self.name, self.numbers = name, numbers
        self.coming: list[_Module] = []
        """Modules whose tensors are fetched when the backward comes to this one."""
        self._count = 0
        self._begun = False
        self._sent: dict[tuple[int, int], _Sent] = {}
        """By storage and version, for as long as it is held."""
        self._fetchable: list[_Sent] = []

    def pack(self, tensor: torch.Tensor, goes: bool | None = None) -> _Stays | _Saved:
        """Send a tensor, or keep it; without being told, by its number."""
        number, self._count = self._count, self._count + 1
        goes = number in self.numbers if goes is None else goes
        if not (goes and is_plain(tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)):
            return _Stays(tensor.detach(), version_of(tensor), self.name)
        key = (storage_id(tensor), version_of(tensor))
        if key not in self._sent:
            self._sent[key] = _Sent(tensor.detach(), self.name)
            self._fetchable.append(self._sent[key])
        return _Saved(self._sent[key], number, tensor)

    def unpack(self, saved: _Stays | _Saved) -> torch.Tensor:
        """Return a tensor back; the first time, fetch what is to come then."""
        tensor = saved.tensor()
        if not self._begun:
            self._begun = True
            for module in self.coming:
                module.fetch()
        return tensor

    def fetch(self) -> None:
        """Begin to fetch everything, unless the backward has come here already: it reads last what was saved first."""
        for sent in () if self._begun else reversed(self._fetchable):
            sent.fetch()

    def let_go(self) -> None:
        """Wait until everything is sent, and keep it on the device no longer."""
        for sent in self._sent.values():
            sent.let_go()
        self._sent.clear()


class _Sent:
    """A storage in the host's memory."""

    def __init__(self, tensor: torch.Tensor, module: str) -> None:
        self.module = module
        self.place = host_copies.offload(tensor)
        self.unread: set[int] = set()
        """Numbers of what is saved of it, and has not been read since it was fetched."""
        self.saved: set[int] = set()
        self._held: torch.Tensor | None = tensor
        self._version = version_of(tensor)
        self._change: tuple[int, int] | None = None
        self._copy: torch.Tensor | None = None

    def let_go(self) -> None:
        """Wait until it is sent, see whether it was written into meanwhile, and keep it no longer."""
        assert self._held is not None
        host_copies.wait_offload(self.place, self._held)
        if version_of(self._held) != self._version:
            self._change = self._version, version_of(self._held)
        self._held = None

    def fetch(self) -> None:
        if self._copy is None:
            self._copy = host_copies.reload(self.place)
            self.unread = set(self.saved)

    def read(self, number: int) -> torch.UntypedStorage:
        """Return the storage on the device; it is kept until all that was saved of it has been read."""
        if self._change is not None:
            raise _changed(self.module, *self._change)
        self.fetch()
        assert self._copy is not None
        storage = host_copies.wait_reload(self._copy, self.place).untyped_storage()
        self.unread.discard(number)
        if not self.unread:
            self._copy = None
        return storage


class _Saved:
    """A saved tensor whose storage was sent."""

    def __init__(self, sent: _Sent, number: int, tensor: torch.Tensor) -> None:
        self.sent, self.number = sent, number
        sent.saved.add(number)
        self.dtype, self.device = tensor.dtype, tensor.device
        self.layout = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> torch.Tensor:
        storage = self.sent.read(self.number)
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self.layout)


@dataclass(frozen=True, slots=True)
class _Stays:
    """A saved tensor that stays on the device: an alias, for an output that saved itself would never be freed."""

    alias: torch.Tensor
    version: int
    module: str

    def tensor(self) -> torch.Tensor:
        if version_of(self.alias) != self.version:
            raise _changed(self.module, self.version, version_of(self.alias))
        return self.alias


def _changed(module: str, saved: int, found: int) -> RuntimeUnsupportedError:
    return RuntimeUnsupportedError(
        f"a tensor that module {module!r} saved for its backward was changed in place afterwards (it is at version "
        f"{found}, and was saved at version {saved}): its gradients would be wrong, and eager refuses that too. Write "
        "into a copy, or run the backward first"
    )


def split_arguments(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Take the tensors out of a call's arguments: give what is to be called with them, and them."""
    arguments = [*args, *kwargs.values()]
    count, names = len(args), list(kwargs)
    positions = [position for position, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
    tensors = [arguments[position] for position in positions]
    for position in positions:
        arguments[position] = None  # the call must hold none of them

    def run(*given: torch.Tensor) -> Any:
        filled = list(arguments)
        for position, tensor in zip(positions, given, strict=True):
            filled[position] = tensor
        return call(*filled[:count], **dict(zip(names, filled[count:], strict=True)))

    return run, tensors
