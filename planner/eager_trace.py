"""One eager step, recorded: what ran in which module, how long each storage lived, and why.

What autograd saves is replaced by copies while the step is recorded. A storage then dies when the
last of the program's own names for it goes, and until when autograd would have held it is known
apart from that. Both together give the memory of the step under any choice of checkpoints.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cost_models.flops import count_flops, moved_bytes
from planner.capture import fake_mode, is_fake
from planner.errors import CaptureError
from planner.failures import raised_at
from planner.inputs import Inputs
from planner.operands import is_opaque
from planner.provenance import is_library, short_path
from planner.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    call_implementation,
    install_call,
    installed_call,
    is_mutable,
    storage_id,
    uninstall_call,
    written_arguments,
)
from planner.verification import run_backward


@dataclass
class Run:
    """One operator that ran; ``flops`` and ``moved_bytes`` are counted on what it was called with."""

    node: fx.Node
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    writes_resident: bool
    module: str
    source: str
    flops: int
    moved_bytes: int


@dataclass
class Storage:
    """One storage of the step: it died before the run ``died``, or outlived the step."""

    size_bytes: int
    maker: int
    died: int | None = None
    kind: str = "activation"


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
    """One call of a module: the runs from ``begin`` to before ``end``, what it was given, what it saved."""

    begin: int
    end: int = 0
    given: tuple[int, ...] = ()
    saves: list[Save] = field(default_factory=list)


@dataclass
class Trace:
    """A recorded step.

    ``runs`` from ``backward`` on are of the backward; before ``tangents`` those that stand for a loss outside
    have given the outputs their gradients. ``is_real`` says that the step was run with data.
    """

    runs: list[Run]
    storages: list[Storage]
    saves: list[Save]
    calls: dict[str, list[Call]]
    backward: int
    tangents: int
    is_real: bool


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


class _Recorder(TorchDispatchMode):
    def __init__(self, fakes: Any) -> None:
        super().__init__()
        self.fakes = fakes
        self.graph = fx.Graph()
        self.runs: list[Run] = []
        self.storages: list[Storage] = []
        self.saves: list[Save] = []
        self.calls: dict[str, list[Call]] = {}
        self.backward = -1
        self.tangents = -1
        self.is_over = False
        self._known: dict[int, int | None] = {}
        self._stack: list[tuple[str, Call]] = []
        self._module = ""
        self._copying = False

    # Operators.

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self._copying:
            self._record(function, args, kwargs, result)
        return result

    def _record(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = _tensors((args, kwargs)), _tensors(result)
        reads = tuple(dict.fromkeys(v for t in given if (v := self._look_up(t)) is not None))
        fresh = [t for t in made if storage_id(t) not in self._known]
        mutable = is_mutable(function)
        if not fresh and not mutable:
            return  # a view, or a number for Python
        written = [self._look_up(t) for t in written_arguments(function, args, kwargs)]
        makes = tuple(dict.fromkeys(self._new(t) for t in fresh))
        self.runs.append(
            Run(
                node=self._node(function, args, kwargs, result),
                reads=reads,
                makes=makes,
                writes=tuple(v for v in written if v is not None),
                writes_resident=None in written,
                module=self._module,
                source=_source() if self.backward < 0 else "",
                flops=count_flops(function, args, kwargs, result),
                moved_bytes=moved_bytes(function, args, kwargs, result),
            )
        )

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
        for tensor in _tensors(tensors):
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

    def _died(self, identity: int, index: int) -> None:
        self._known.pop(identity, None)
        if not self.is_over:
            self.storages[index].died = len(self.runs)

    def name(self, tensors: Any, kind: str) -> None:
        """Say what storages that outlive the step are."""
        for tensor in _tensors(tensors):
            index = self._known.get(storage_id(tensor))
            if index is not None:
                self.storages[index].kind = kind

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Note that a tensor is saved, and give a copy to be held in its place."""
        index = self._known.get(storage_id(tensor))
        save = Save(index, self._module, len(self.runs))
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
        given = (self._look_up(t) for t in _tensors((args, kwargs)))
        call = Call(len(self.runs), given=tuple(dict.fromkeys(v for v in given if v is not None)))
        self.calls.setdefault(name, []).append(call)
        self._stack.append((name, call))
        self._module = name
        try:
            return call_implementation(module)(*args, **kwargs)
        finally:
            call.end = len(self.runs)
            self._stack.pop()
            self._module = self._stack[-1][0] if self._stack else ""


def record(model: nn.Module, inputs: Inputs, *, has_loss: bool) -> Trace:
    """Record one training step: without data where the program allows that, else for real.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it was, its gradients, buffers, attributes and the random state included.
    inputs : Inputs
    has_loss : bool
        Whether a loss outside the model follows; otherwise what the model returns is differentiated.

    Raises
    ------
    CaptureError
        If the step fails, or nothing in it requires gradients.
    """
    try:
        misses = FakeTensorMode.cache_info().misses
        trace = _record(model, inputs, has_loss=has_loss, real=False)
        if FakeTensorMode.cache_info().misses > misses:
            # What fake tensors compute for the first time they hold on to, and autograd copies it for that.
            trace = _record(model, inputs, has_loss=has_loss, real=False)
        if is_fake(model) or not any(is_opaque(run.node) for run in trace.runs):
            return trace
    except CaptureError:
        raise
    except Exception as error:
        if is_fake(model):
            raise _failed(model, error, "; if it depends on data, build the model for real") from error
    try:
        return _record(model, inputs, has_loss=has_loss, real=True)
    except CaptureError:
        raise
    except Exception as error:
        raise _failed(model, error) from error


def _failed(model: nn.Module, error: Exception, hint: str = "") -> CaptureError:
    first = (str(error).strip().splitlines() or [""])[0]
    return CaptureError(
        f"a step of {type(model).__name__} fails: {type(error).__name__}: {first}{raised_at(error)}{hint}"
    )


def _record(model: nn.Module, inputs: Inputs, *, has_loss: bool, real: bool) -> Trace:
    state: dict[str, torch.Tensor] = dict(
        itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    )
    known = [t for t in [*state.values(), *inputs.tensors()] if isinstance(t, FakeTensor)]
    mode = known[0].fake_mode if known else fake_mode()
    recorder = _Recorder(mode)
    with _put_back(model), _followed(model, recorder):
        if real:
            call: Callable[..., Any] = call_implementation(model)
            parameters: Sequence[torch.Tensor] = list(model.parameters())
        else:
            twins = {id(t): t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in state.values()}
            named = {name: twins[id(tensor)] for name, tensor in state.items()}
            inputs = inputs.map_tensors(lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t))
            call = partial(_call_with, model, named)
            parameters = [twins[id(p)] for p in model.parameters()]
            recorder.resident(list(twins.values()))
        recorder.resident((list(state.values()), inputs.args, inputs.kwargs))
        if real:
            _step(recorder, call, parameters, inputs, has_loss)
        else:
            with mode:
                _step(recorder, call, parameters, inputs, has_loss)
    return Trace(
        runs=recorder.runs,
        storages=recorder.storages,
        saves=recorder.saves,
        calls=recorder.calls,
        backward=recorder.backward,
        tangents=max(recorder.backward, recorder.tangents),
        is_real=real,
    )


def _call_with(model: nn.Module, state: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(model, dict(state), args, kwargs)


def _step(
    recorder: _Recorder, call: Callable[..., Any], parameters: Sequence[torch.Tensor], inputs: Inputs, has_loss: bool
) -> None:
    with torch.enable_grad(), recorder, saved_tensors_hooks(recorder.pack, recorder.unpack):
        outputs = call(*inputs.args, **inputs.kwargs)
        recorder.backward = len(recorder.runs)
        _backward(recorder, outputs, has_loss)
        recorder.name(outputs, "output")
        recorder.is_over = True
        recorder.name([p.grad for p in [*parameters, *inputs.tensors()]], "gradient")


class _OutsideLoss(torch.autograd.Function):
    """Stands for a loss that is not seen: it gives each output a gradient, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, recorder: _Recorder, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.recorder = recorder
        ctx.like = [(t.shape, t.dtype, t.device) for t in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Any) -> Any:
        gradients = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        ctx.recorder.tangents = len(ctx.recorder.runs)
        return (None, *gradients)


def _backward(recorder: _Recorder, outputs: Any, has_loss: bool) -> None:
    tensors = [t for t in _tensors(outputs) if t.requires_grad]
    if not tensors:
        raise CaptureError("nothing of the model needs a backward: no output requires gradients")
    if has_loss:
        torch.autograd.backward(
            [
                _OutsideLoss.apply(  # type: ignore[no-untyped-call]
                    recorder, *(t for t in tensors if t.is_floating_point())
                )
            ]
        )
    else:
        run_backward(outputs, None)


@contextmanager
def _followed(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Let the recorder see the calls of all modules; one that is compiled already stays whole."""
    followed = []
    own = installed_call(model)
    install_call(model, call_implementation(model))
    for name, module in model.named_modules():
        if name and installed_call(module) is None:
            followed.append(module)
            install_call(module, partial(recorder.call, name, module))
    try:
        yield
    finally:
        for module in followed:
            uninstall_call(module)
        uninstall_call(model) if own is None else install_call(model, own)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Undo what a step does to a model: gradients, values of buffers, attributes, random state."""
    modules = [(m, dict(m.__dict__), [(d, dict(d)) for d in _registries(m)]) for m in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, attributes, registries in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for registry, entries in registries:
                registry.clear()
                registry.update(entries)
        with torch.no_grad():
            for buffer, before in buffers:
                if not isinstance(buffer, FakeTensor) and not torch.equal(buffer, before):
                    buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _registries(module: nn.Module) -> list[dict[str, Any]]:
    return [value for value in module.__dict__.values() if isinstance(value, dict)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _source() -> str:
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        if not is_library(file) and not file.endswith("eager_trace.py") and not file.endswith("flops.py"):
            return f"{short_path(file)}:{line}"
    return ""
