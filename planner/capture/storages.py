"""Record the storages that running code allocates: maker, size and lifetime.

One dispatch mode gives every storage its number. Whoever needs more derives from it: :class:`PeakRecorder` adds up
what is alive at a time, :class:`StepRecorder` writes down what runs.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.autograd import set_detect_anomaly
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.flops import count_flops, moved_bytes
from planner.capture import operands
from planner.capture import torch_internals as internals
from planner.capture.autograd_accumulation import EngineSums
from planner.capture.fake_kernels import kernel_result
from planner.capture.operands import CallNodes
from planner.capture.target_device import meant
from planner.capture.trees import leaf_tensors, sparse_in, tensors_in
from planner.common.units import round_up


@dataclass
class Storage:
    """One storage that was made: by event ``maker``, freed before event ``died``; None if it outlives the recording.

    A number is one of Python's that autograd keeps as a tensor, in the host's memory. A stand-in is of the loss that
    is not seen, whose own memory is known apart from the recording.
    """

    size_bytes: int
    maker: int
    died: int | None = None
    kind: str = "activation"
    is_number: bool = False
    is_stand_in: bool = False


def freed_after(storages: Iterable[Storage]) -> defaultdict[int, list[int]]:
    """Return for each event the numbers of the storages that are freed right after it, which it finds alive."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, storage in enumerate(storages):
        if storage.died is not None:
            found[storage.died - 1].append(number)
    return found


class StorageRecorder(TorchDispatchMode):
    """Numbers the storages that code allocates, and records when each is freed.

    What is in the tree ``resident`` was there before; ``names`` are the paths of modules, for :meth:`modules`.
    """

    def __init__(self, resident: Any = (), names: dict[nn.Module, str] | None = None) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.storages: list[Storage] = []
        self.names = names or {}
        self.within: list[str] = []
        """The modules at work, the outermost first."""
        self._numbers: dict[int, int | None] = {}
        """Numbers of the storages that are alive, by identity; None for what is resident."""
        self._resident: list[weakref.ref[torch.UntypedStorage]] = []
        self._is_silent = self._is_over = False
        self.resident(resident)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._is_silent:
            self.follow(function, (args, kwargs), result)
        return result

    @property
    def now(self) -> int:
        """How many events there were."""
        return len(self.events)

    @property
    def module(self) -> str:
        """Path of the module at work, ``""`` for the model itself."""
        return self.within[-1] if self.within else ""

    def resident(self, tensors: Any) -> None:
        """Take the tensors in a tree as there before.

        Parameters may be given other memory (``.data =``): what comes after it is freed may have its identity.
        """
        for storage in map(internals.storage_of, tensors_in(tensors)):
            self._numbers[id(storage)] = None
            self._resident.append(weakref.ref(storage, partial(self._forget, id(storage))))

    def _forget(self, identity: int, _gone: Any) -> None:
        self._numbers.pop(identity, None)

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage; one that was never made here is resident."""
        return self._numbers.get(internals.storage_id(tensor))

    def size_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes behind a tensor that was made here; 0 for what is resident."""
        number = self.number(tensor)
        return 0 if number is None else self.storages[number].size_bytes

    def follow(self, function: Any, given: Any, result: Any) -> list[int]:
        """Return what a call made its numbers."""
        read, results = tensors_in(given), tensors_in(result)
        if function is torch.ops.aten.native_dropout.default:
            results.reverse()  # its mask is there first
        fresh = (t for t in results if internals.storage_id(t) not in self._numbers and self.counts(t))
        return [self.made(t, operands.storage_bytes(function, read, t)) for t in fresh]

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is where memory is counted."""
        return True

    def made(self, tensor: torch.Tensor, size_bytes: int | None = None, kind: str = "activation") -> int:
        """Return a new storage its number; from now on it is known when it is freed."""
        storage = tensor.untyped_storage()
        number = self._numbers[id(storage)] = len(self.storages)
        self.storages.append(Storage(storage.nbytes() if size_bytes is None else size_bytes, self.now, kind=kind))
        weakref.finalize(storage, self._freed, id(storage), number)
        return number

    def freed(self, storage: Storage) -> None:
        """Record that a storage is freed."""
        storage.died = self.now

    def _freed(self, identity: int, number: int) -> None:
        self._numbers.pop(identity, None)
        if not self._is_over:
            self.freed(self.storages[number])

    def still_there(self) -> set[int]:
        """Return the identities of the storages that were made here and are alive."""
        return {identity for identity, number in self._numbers.items() if number is not None}

    def mark(self, tensors: Any, kind: str) -> None:
        """Set the kind of the storages of tensors in a tree."""
        for tensor in tensors_in(tensors):
            if (number := self.number(tensor)) is not None:
                self.storages[number].kind = kind

    def finish(self) -> None:
        """End the recording; live storages outlive it."""
        self._is_over = True

    def silent(self) -> AbstractContextManager[Any]:
        """Do not record operations within the context."""
        return patch.object(self, "_is_silent", True)

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Keep track of which modules are at work in the forward."""
        with register_module_forward_pre_hook(self.entered), register_module_forward_hook(self.left, always_call=True):
            yield

    def entered(self, module: nn.Module, _inputs: Any) -> None:
        """Note that a module's forward begins."""
        self.within.append(self.names.get(module, ""))

    def left(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        """Note that a module's forward ends."""
        self.within.pop()


class PeakRecorder(StorageRecorder):
    """Adds up live storages: ``peak_bytes`` is the most that the code allocates on top of what is resident."""

    def __init__(self, alignment_bytes: int, resident: Any = ()) -> None:
        super().__init__(resident)
        self.alignment_bytes = alignment_bytes
        self.live_bytes = self.peak_bytes = 0

    def reach(self, more_bytes: int) -> None:
        """Record a momentary allocation of so many bytes."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + more_bytes)

    def made(self, tensor: torch.Tensor, size_bytes: int | None = None, kind: str = "activation") -> int:
        """Add a new storage."""
        number = super().made(tensor, size_bytes, kind)
        storage = self.storages[number]
        storage.size_bytes = round_up(storage.size_bytes, self.alignment_bytes)
        self.live_bytes += storage.size_bytes
        self.reach(0)
        return number

    def freed(self, storage: Storage) -> None:
        """Take a storage away."""
        super().freed(storage)
        self.live_bytes -= storage.size_bytes


@dataclass(kw_only=True)
class Run:
    """One operator that ran: the storages that it read, made and wrote into; ``occurrence`` is how often it had before.

    ``flops`` and ``moved_bytes`` are counted on what it was called with. ``workspace_bytes`` is known where the run
    itself had to be watched: see :func:`planner.capture.operands.is_opaque`. ``derivative_of`` is the module whose
    derivative it is a part of, where that was followed.
    """

    node: fx.Node
    module: str
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    writes_resident: bool = False
    source: str = ""
    flops: int = 0
    moved_bytes: int = 0
    derivative_of: str = ""
    occurrence: int = 0
    workspace_bytes: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What an operation of a graph says of it."""
        described = operands.described(self.node, in_place=True)
        return {"source": self.source, "flops": self.flops, "moved_bytes": self.moved_bytes, **described}


@dataclass(kw_only=True)
class Turn(Run):
    """Marks the beginning or end of the forward or backward of FSDP2's unit ``module``; no operator runs."""

    is_entered: bool


def _unit_boundary() -> None:
    """Stand for no operator, in the node of a :class:`Turn`."""


def _sparse_flops(args: Any, kwargs: Any) -> int:
    """Count what is computed with sparse tensors: each of their elements is multiplied by a row of what is dense."""
    elements = sum(internals.strided_parts(tensor)[-1].numel() for tensor in sparse_in((args, kwargs)))
    if not elements:
        return 0
    leaves = leaf_tensors((args, kwargs))
    columns = (leaf.shape[-1] for leaf in leaves if leaf.layout is torch.strided and leaf.dim())
    return 2 * elements * max(columns, default=1)


EventT = TypeVar("EventT")


class StepRecorder(StorageRecorder, Generic[EventT]):
    """Records the operators that run on fake or real tensors; calls are described in the mode ``fakes``.

    ``sums``, which tells sums of gradients that are made in place when nobody looks on, is made under the mode in which
    the step runs. For the others see :class:`StorageRecorder`.
    """

    def __init__(
        self, fakes: Any, sums: EngineSums, resident: Any = (), names: dict[nn.Module, str] | None = None
    ) -> None:
        super().__init__(resident, names)
        self.fakes, self.sums = fakes, sums
        self.events: list[EventT | Run] = []
        self._nodes = CallNodes(fakes)
        self._around: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        # To find anomalies, autograd looks at numbers: there may be none, and to look would be written down.
        self._around.append(set_detect_anomaly(False))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._around.pop().__exit__(None, None, None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The latter are two thirds of all calls, and none of a kernel.
        if self._is_silent or function is torch.ops.prim.device.default:
            return function(*args, **kwargs)
        if any(map(internals.is_spread, types)):
            return NotImplemented  # it is computed with local tensors, and that is seen
        if self.sums.is_taken_over(function, args):
            return args[0]
        function = self.sums.unrecorded(function, args)
        result = self.watch(function, args, kwargs)
        self.sums.made(function, result)
        return result

    def watch(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run and record a call."""
        result = kernel_result(function, args, kwargs, lambda: self.run(function, args, kwargs))
        self.note(function, args, kwargs, result)
        return result

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a call."""
        return internals.called(function, args, kwargs)

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage; one that was never made here is resident, and stays so."""
        identity = internals.storage_id(tensor)
        if identity not in self._numbers:
            self._numbers[identity] = None
            weakref.finalize(internals.in_memory(tensor).untyped_storage(), self._numbers.pop, identity, None)
        return self._numbers[identity]

    def gradients_of(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        """Return the number of each parameter's gradient, by the parameter's name; none where that is sparse."""
        made = {name: p.grad for name, p in parameters if p.grad is not None and p.grad.layout is torch.strided}
        numbers = {name: self.number(gradient) for name, gradient in made.items()}
        return {name: number for name, number in numbers.items() if number is not None}

    def numbers(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Return the numbers of what is not resident, each once."""
        return tuple(dict.fromkeys(n for t in tensors if (n := self.number(t)) is not None))

    def note(self, function: Any, args: Any, kwargs: Any, result: Any) -> Run | None:
        """Record a call, unless it is a view or gives Python a number."""
        function = meant(function)
        reads = self.numbers(tensors_in((args, kwargs)))
        makes = self.follow(function, (args, kwargs), result)
        writes = (
            internals.written_arguments(function, args, kwargs) if isinstance(function, internals.OpOverload) else []
        )
        if not makes and not (isinstance(function, internals.OpOverload) and internals.is_mutable(function)):
            return None
        run = Run(
            node=self._nodes.node(function, args, kwargs, result),
            reads=reads,
            makes=tuple(makes),
            writes=self.numbers(writes),
            writes_resident=any(self.number(t) is None for t in writes),
            module=self.module,
            source=self.source(),
            flops=_sparse_flops(args, kwargs) or count_flops(function, args, kwargs, result),
            moved_bytes=moved_bytes(function, args, kwargs, result),
        )
        self.events.append(run)
        return run

    def source(self) -> str:
        """Return the line of the user's code that runs; ``""`` where nobody asks for it."""
        return ""

    def turn(self, unit: str, is_entered: bool) -> None:
        """Record that the forward or backward of a unit of FSDP2 begins or ends."""
        node = self._nodes.node(_unit_boundary, (), {}, ())
        self.events.append(Turn(node=node, module=unit, is_entered=is_entered))
