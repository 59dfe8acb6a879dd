"""A recorded eager step: what ran in which module, how long each storage lived, and why.

What autograd saves is replaced by copies while the step is recorded. A storage then dies when the
last of the program's own names for it goes, and until when autograd would have held it is known
apart from that. Both together give the memory of the step under any choice of checkpoints.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cost_models.flops import count_flops, moved_bytes
from planner.capture.eager.autograd_accumulation import EngineSums
from planner.capture.layouts import as_kernel_gives
from planner.capture.memory import measure_peak
from planner.capture.operands import is_opaque, storage_bytes
from planner.capture.provenance import is_library, short_path
from planner.capture.torch_internals import (
    CHECKPOINT,
    FakeTensor,
    call_implementation,
    is_mutable,
    numbers_among,
    profiler_is_running,
    storage_id,
    written_arguments,
)
from planner.errors import UsageError

_CHECKPOINTS_ITSELF = (
    "the model calls torch.utils.checkpoint itself, at {}; under the runtime 'modules' the plan decides what runs "
    "again: call there what is checkpointed, as block(x) in place of checkpoint(block, x), or plan for the runtime "
    "'graph', which captures through such calls and decides in their place"
)


_KEEP_NUMBERS = {getattr(torch.ops.aten, name).Tensor for name in ("mul", "mul_", "div", "div_")}
"""Operators whose derivative needs the number that they are called with, of which torch makes a tensor."""

_NUMBER_BYTES = 8


@dataclass
class Run:
    """One operator that ran; ``flops`` and ``moved_bytes`` are counted on what it was called with.

    ``occurrence`` is how often the operator had been called before.
    ``workspace_bytes`` is known where the run itself had to be watched: see :func:`planner.capture.operands.is_opaque`.
    """

    node: fx.Node
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    writes_resident: bool
    module: str
    source: str
    flops: int
    moved_bytes: int
    occurrence: int
    workspace_bytes: int | None = None


@dataclass
class Storage:
    """One storage of the step: it died before the run ``died``, or outlived the step.

    A number is one of Python's that autograd keeps as a tensor, in the host's memory. A stand-in is of the loss that
    is not seen, whose own memory is known apart from the recording.
    """

    size_bytes: int
    maker: int
    died: int | None = None
    kind: str = "activation"
    is_number: bool = False
    is_stand_in: bool = False


@dataclass
class Save:
    """One tensor saved for backward: before which runs it was saved, first read, and let go.

    ``storage`` is None for what is resident. ``is_plain`` says that its storage is all there is to it.
    """

    storage: int | None
    module: str
    saved: int
    is_plain: bool = True
    read: int | None = None
    released: int | None = None


@dataclass
class Call:
    """One call of a module: the runs from ``begin`` to before ``end``, what it was given, what it saved.

    ``called`` is how often each operator had been called before. ``direct`` are the plain tensors among its arguments
    themselves, None for those that are resident; ``enclosed`` is what it was given inside of other arguments.
    """

    begin: int
    called: Counter[Any]
    end: int = 0
    given: tuple[int, ...] = ()
    direct: tuple[int | None, ...] = ()
    enclosed: frozenset[int] = frozenset()
    saves: list[Save] = field(default_factory=list)


@dataclass
class Trace:
    """A recorded step.

    ``runs`` from ``backward`` on are of the backward; before ``tangents`` those that stand for a loss outside
    have given the outputs their gradients. ``is_real`` says that the step was run with data.
    ``outside_bytes`` go to a loss outside the model: none do where it returns its loss. ``returned_cache`` says that
    it gives a cache of keys and values back.
    """

    runs: list[Run]
    storages: list[Storage]
    saves: list[Save]
    calls: dict[str, list[Call]]
    backward: int
    tangents: int
    is_real: bool
    outside_bytes: int = 0
    returned_cache: bool = False


class _Saved:
    """What stands for a saved tensor, and can be watched: a copy of its storage, or itself if that is resident."""

    def __init__(self, tensor: torch.Tensor, save: Save) -> None:
        self.save = save
        self.device, self.layout = tensor.device, (tensor.shape, tensor.stride(), tensor.storage_offset())
        self.tensor = tensor if save.storage is None else self._copied(tensor)

    def restored(self) -> torch.Tensor:
        """Give the tensor as it was saved."""
        if self.save.storage is None:
            return self.tensor
        return self.tensor.to(self.device).as_strided(*self.layout)

    @staticmethod
    def _copied(tensor: torch.Tensor) -> torch.Tensor:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if isinstance(tensor, FakeTensor):
            return torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
        # On the host: a step that does not fit on the device without a plan must be recordable there.
        return tensor.detach().as_strided((elements,), (1,), 0).to("cpu", copy=True)


class Recorder(TorchDispatchMode):
    """Notes what runs, what is saved, and when storages die; ``fakes`` is the mode in which calls are described."""

    def __init__(self, fakes: Any, sums: EngineSums) -> None:
        super().__init__()
        self.fakes, self.sums = fakes, sums
        self.graph = fx.Graph()
        self.runs: list[Run] = []
        self.storages: list[Storage] = []
        self.saves: list[Save] = []
        self.calls: dict[str, list[Call]] = {}
        self.backward = -1
        self.tangents = -1
        self.outside_bytes = 0
        self.returned_cache = False
        self.is_over = False
        self._called: Counter[Any] = Counter()
        self._known: dict[int, int | None] = {}
        self._stack: list[tuple[str, Call]] = []
        self._module = ""
        self._copying = False

    # Operators.

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._copying:
            return function(*args, **kwargs)
        if self.sums.is_in_place(function, args):
            function = torch.ops.aten.add_.Tensor
        given = tensors_in((args, kwargs))
        watched = is_opaque(function) and not isinstance(given[0], FakeTensor) and not profiler_is_running()
        if watched:
            peak_bytes, result = measure_peak(lambda: function(*args, **kwargs), given[0].device)
        else:
            peak_bytes, result = 0, as_kernel_gives(function, args, kwargs, function(*args, **kwargs))
        run = self._record(function, args, kwargs, result)
        self._called[function] += 1
        if watched and run is not None:
            run.workspace_bytes = max(0, peak_bytes - sum(self.storages[value].size_bytes for value in run.makes))
        return result

    def _record(self, function: Any, args: Any, kwargs: Any, result: Any) -> Run | None:
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        reads = tuple(dict.fromkeys(v for t in given if (v := self._look_up(t)) is not None))
        fresh = [t for t in made if storage_id(t) not in self._known]
        mutable = is_mutable(function)
        if not fresh and not mutable:
            return None  # a view, or a number for Python
        written = [self._look_up(t) for t in written_arguments(function, args, kwargs)]
        makes = tuple(dict.fromkeys(self._new(t) for t in fresh))
        if self.backward < 0 and function in _KEEP_NUMBERS and any(t.requires_grad for t in given):
            makes = (*makes, *self._new_numbers(numbers_among(function, args)))
        run = Run(
            node=self._node(function, args, kwargs, result),
            reads=reads,
            makes=makes,
            writes=tuple(v for v in written if v is not None),
            writes_resident=None in written,
            module=self._module,
            source=_source() if self.backward < 0 else "",
            flops=count_flops(function, args, kwargs, result),
            moved_bytes=moved_bytes(function, args, kwargs, result),
            occurrence=self._called[function],
        )
        for tensor in fresh:
            self.storages[self._new(tensor)].size_bytes = storage_bytes(function, given, tensor)
        self.runs.append(run)
        return run

    def _node(self, function: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        """Describe a call as an fx node: other parts of the planner read those."""
        flats: dict[int, torch.Tensor] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            elements = leaf.untyped_storage().nbytes() // leaf.element_size()
            key = storage_id(leaf)
            if key not in flats or flats[key].dtype != leaf.dtype:
                flats[key] = torch.empty(elements, dtype=leaf.dtype, device=leaf.device)
            return flats[key].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            node = self.graph.placeholder("operand")
            node.meta["val"] = fake(leaf)
            return node

        with self.fakes, torch.no_grad():
            node = self.graph.call_function(function, tree_map(operand, args), tree_map(operand, kwargs))
            node.meta["val"] = tree_map(fake, result)
        return node

    # Storages.

    def resident(self, tensors: Any) -> None:
        """Take the tensors in a tree as there before the step."""
        for tensor in tensors_in(tensors):
            self._known[storage_id(tensor)] = None

    def _look_up(self, tensor: torch.Tensor) -> int | None:
        """Give a tensor's storage; one that the step did not make was there before."""
        identity = storage_id(tensor)
        if identity not in self._known:
            self._known[identity] = None
            weakref.finalize(tensor.untyped_storage(), self._known.pop, identity, None)
        return self._known[identity]

    def _new(self, tensor: torch.Tensor) -> int:
        identity = storage_id(tensor)
        known = self._known.get(identity)
        if known is not None:
            return known
        index = self._known[identity] = len(self.storages)
        storage = tensor.untyped_storage()
        self.storages.append(Storage(storage.nbytes(), len(self.runs)))
        weakref.finalize(storage, self._died, identity, index)
        return index

    def _new_numbers(self, count: int) -> range:
        """Add numbers that are kept for the backward: no hook tells when they go, so they are there to its end."""
        first = len(self.storages)
        self.storages += [Storage(_NUMBER_BYTES, len(self.runs), is_number=True) for _ in range(count)]
        return range(first, len(self.storages))

    def finish(self) -> None:
        """End the step: what is alive now outlives it."""
        self.is_over = True
        for storage in self.storages:
            if storage.is_number:
                storage.died = len(self.runs)

    def _died(self, identity: int, index: int) -> None:
        self._known.pop(identity, None)
        if not self.is_over:
            self.storages[index].died = len(self.runs)

    def name(self, tensors: Any, kind: str) -> None:
        """Say what storages that outlive the step are."""
        for tensor in tensors_in(tensors):
            index = self._known.get(storage_id(tensor))
            if index is not None:
                self.storages[index].kind = kind

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a tensor that was made here as one that stands in for the loss."""
        index = self._known[storage_id(tensor)]
        assert index is not None
        self.storages[index].is_stand_in = True
        return tensor

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Note that a tensor is saved, and give a copy to be held in its place."""
        index = self._known.get(storage_id(tensor))
        save = Save(index, self._module, len(self.runs), is_plain(tensor))
        self.saves.append(save)
        for _, call in self._stack:
            call.saves.append(save)
        with self._unseen():
            saved = _Saved(tensor, save)
        weakref.finalize(saved, self._released, save)
        return saved

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Note that the backward reads it, on behalf of the module that saved it."""
        if saved.save.read is None:
            saved.save.read = len(self.runs)
        self._module = saved.save.module
        with self._unseen():
            return saved.restored()

    def _released(self, save: Save) -> None:
        save.released = len(self.runs)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self._copying = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._copying = False

    # Modules.

    def call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a module's call and note its runs."""
        given = (self._look_up(t) for t in tensors_in((args, kwargs)))
        arguments = [*args, *kwargs.values()]
        enclosed = (self._look_up(t) for t in tensors_in([a for a in arguments if not is_plain(a)]))
        call = Call(
            len(self.runs),
            self._called.copy(),
            given=tuple(dict.fromkeys(v for v in given if v is not None)),
            direct=tuple(self._look_up(t) if is_plain(t) else None for t in direct_tensors(args, kwargs)),
            enclosed=frozenset(v for v in enclosed if v is not None),
        )
        self.calls.setdefault(name, []).append(call)
        self._stack.append((name, call))
        self._module = name
        try:
            return call_implementation(module)(*args, **kwargs)
        finally:
            call.end = len(self.runs)
            self._stack.pop()
            self._module = self._stack[-1][0] if self._stack else ""


def direct_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Give the tensors that are arguments themselves."""
    return [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)]


def is_plain(leaf: Any) -> bool:
    """Whether something is a tensor of which bytes, shape, strides and offset say all."""
    return isinstance(leaf, torch.Tensor) and not (
        leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg()
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Give the tensors in a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _source() -> str:
    """Give the line of the user's code that runs an operator.

    Raises
    ------
    UsageError
        If that is inside a call of ``torch.utils.checkpoint``.
    """
    source, checkpointed = "", False
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        if file.endswith("eager_record.py"):
            break  # what lies further out called the planner, not the operator
        if frame.f_code is CHECKPOINT:
            checkpointed = True
        elif not is_library(file) and not file.endswith(("eager_trace.py", "flops.py")):
            if checkpointed:
                raise UsageError(_CHECKPOINTS_ITSELF.format(f"{short_path(file)}:{line}"))
            source = source or f"{short_path(file)}:{line}"
    return source
