"""Observe a forward on fake tensors: above all, the calls of ``torch.utils.checkpoint`` in it.

However ``torch.utils.checkpoint.checkpoint`` is reached (by a wrapper, a switch of Hugging Face's, or a name that was
imported long ago), the interpreter calls its code object, and says so to a profile function.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from planner.capture.failures import in_one_line, raised_at
from planner.capture.fake_internals import mode_of
from planner.capture.inputs import Inputs
from planner.capture.joint import draws
from planner.capture.model_facts import updates_statistics
from planner.capture.state_restore import put_back
from planner.capture.storages import StorageRecorder
from planner.capture.torch_internals import CHECKPOINT, call_implementation, is_mutable, storage_id
from planner.capture.trees import tensors_in
from planner.findings.rules import CheckpointCall, Subject
from planner.ir.graph import chooses


def observe(model: nn.Module, inputs: Inputs) -> Subject:
    """Run the forward of a model without data, and give what rules may look at of it; the model is left as it was."""
    calls: list[_Call] = []
    returned_cache, unseen = None, ""
    try:
        mode = mode_of((*model.parameters(), *model.buffers(), *inputs.tensors()))
        with put_back(model, inputs), mode, _Watcher(model, calls).watching(), torch.enable_grad():
            output = call_implementation(model)(*inputs.args, **inputs.kwargs)
            returned_cache = getattr(output, "past_key_values", None) is not None
    except Exception as error:  # whatever a forward may raise: what was seen before that still counts
        unseen = f"{in_one_line(error)}{raised_at(error)}"
    return Subject(calls=tuple(call.told() for call in calls), returned_cache=returned_cache, unseen=unseen)


@dataclass
class _Call:
    """A checkpointed region, while it is being filled in."""

    frame: FrameType
    begun: CheckpointCall
    """What is known when it is called."""
    trainable: bool = False
    noted: defaultdict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """What is seen of it, each thing once: ``draws``, ``updates`` and ``chooses``."""

    def told(self) -> CheckpointCall:
        noted: dict[str, Any] = {name: tuple(things) for name, things in self.noted.items()}
        return replace(self.begun, trainable=self.trainable, **noted)


class _Watcher(StorageRecorder):
    """Sees modules come and go, calls of checkpoint, and every operation."""

    def __init__(self, model: nn.Module, calls: list[_Call]) -> None:
        super().__init__(names={module: path or type(model).__name__ for path, module in model.named_modules()})
        statistics = {path for path, module in model.named_modules() if updates_statistics(module)}
        state = [*model.named_parameters(), *model.named_buffers()]
        # Running statistics are told by their module: its kernel does not say that it writes into them.
        self.state = {storage_id(t): name for name, t in state if name.rpartition(".")[0] not in statistics}
        self.open: list[_Call] = []
        self.calls = calls

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.getprofile()
        with self.modules(), self:
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                sys.setprofile(before)

    def entered(self, module: nn.Module, _inputs: Any) -> None:
        """Note a module, and whether a checkpointed one updates statistics."""
        path = self.names.setdefault(module, type(module).__name__)
        super().entered(module, _inputs)
        for call in self.open:
            if updates_statistics(module):
                call.noted["updates"][f"{path} ({type(module).__name__})"] = None

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if frame.f_code is not CHECKPOINT:
            return
        if event == "call":
            self.open.append(_opened(frame, self.names, nested=bool(self.open)))
            self.calls.append(self.open[-1])
        elif event == "return" and self.open and self.open[-1].frame is frame:
            self.open.pop()

    def follow(self, function: Any, given: Any, result: Any) -> list[int]:
        made = super().follow(function, given, result)
        args, kwargs = given
        if self.open:
            self._note(function, args, kwargs or {})
        return made

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        place = f"{func} in {self.within[-1] if self.within else 'the model'}"
        reads = tensors_in((args, kwargs))
        written = args[0] if is_mutable(func) and isinstance(args[0], torch.Tensor) else None
        for call in self.open:
            # An empty one is checkpoint's own: it always requires a gradient.
            call.trainable |= any(tensor.requires_grad and tensor.numel() for tensor in reads)
            if draws(func, args, kwargs):
                call.noted["draws"][place] = None
            if chooses(str(func)):
                call.noted["chooses"][place] = None
            if written is not None and storage_id(written) in self.state:
                call.noted["updates"][self.state[storage_id(written)]] = None


def _opened(frame: FrameType, paths: dict[nn.Module, str], *, nested: bool) -> _Call:
    given = frame.f_locals
    function = given["function"]
    module = _module_of(function)
    begun = CheckpointCall(
        region=paths.get(module) or str(getattr(function, "__qualname__", type(function).__name__)),
        reentrant=given["use_reentrant"] is not False,  # torch takes silence for yes
        preserves_random_state=bool({"preserve_rng_state": True, **given["kwargs"], **given}["preserve_rng_state"]),
        nested=nested,
        gets_gradient=any(isinstance(x, torch.Tensor) and x.requires_grad for x in given["args"]),
    )
    return _Call(frame, begun)


def _module_of(function: Any) -> Any:
    """Return the module that a function is, or is a method of, partly applied or not."""
    if isinstance(function, functools.partial):
        first = function.args[0] if function.args else None
        return first if isinstance(first, nn.Module) else _module_of(function.func)
    return function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
