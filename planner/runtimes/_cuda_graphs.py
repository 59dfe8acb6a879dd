"""CUDA graphs of planned steps: one launch for the forward, one for the backward.

The first call of each kind runs the planned graphs as ever. The second captures them; from then on they are launched.
What a launch reads and writes lies where it lay at the capture, so

- what the model is given, and the gradients of its outputs, are copied to where they are read; parameters and buffers
  are read where they are, and if one has moved the graphs are captured anew;
- outputs and gradients are copied out: nobody outside holds memory of the graphs;
- what the forward saves is overwritten by the next launch of a forward. So there is none while the backward of the last
  one may still come: that call, and its backward, run the planned graphs as ever.

The two graphs share a pool, of which they use the same memory one after the other. The graphs of one program are there
at a time: a call of another one, with other sizes say, gives their memory back, and has as much for itself.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from planner.capture.cuda_graph_internals import (
    Draw,
    Place,
    Recorder,
    States,
    are_at,
    copies_of,
    draws_again,
    first_draws,
    is_capturing,
    new_generators,
    new_pool,
    room_for,
    run_again,
    run_and_save,
    stream_on,
    written_and_shown,
)
from planner.capture.joint import is_random
from planner.capture.model_facts import has_several_ranks, is_sharded
from planner.capture.operands import is_opaque
from planner.capture.torch_internals import _get_current_graph_task_keep_graph as keeps_graph
from planner.capture.torch_internals import boxed, entered
from planner.errors import RuntimeUnsupportedError

_FREE_RECORDINGS, _LAUNCHES_EACH = 4, 16
"""A step is captured again where parameters have moved, or another program ran: so many times, and once more for each
so many launches."""


def check_can_capture(model: nn.Module, device: torch.device) -> None:
    """Raise a RuntimeUnsupportedError for a model whose steps no CUDA graph holds, wherever it is trained."""
    if device.type != "cuda":
        raise RuntimeUnsupportedError(f"cuda_graphs=True is for CUDA, the model is on {device.type}: leave it out")
    if has_several_ranks() or is_sharded(model):
        raise RuntimeUnsupportedError("cuda_graphs=True captures steps of one rank only: leave it out")


class CudaGraphs:
    """The graphs of one wrapped model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        check_can_capture(model, device)
        self.name = type(model).__name__
        self.device = device
        self.recorder: Recorder | None = Recorder(device)
        self.launches = 0
        """How many graphs were launched."""
        self._model = weakref.ref(model)
        weakref.finalize(model, self.close).atexit = False  # AOTAutograd keeps what it was given to run
        self._pending: StorageWeakRef | None = None
        self._in_use: GraphedStep | None = None
        self.is_closed = False
        self._is_said = False

    def step(self) -> GraphedStep:
        """Return what runs the halves of another program."""
        return GraphedStep(self)

    def use(self, step: GraphedStep | None) -> None:
        """Let graphs be those of one program, and give back the memory of another's."""
        if self._in_use is not step and self._in_use is not None:
            self._in_use.release()
            torch.cuda.empty_cache()
        self._in_use = step

    def close(self) -> None:
        """Give all memory back; once the backward of the last forward has come, if it may."""
        self.is_closed = True
        if not self.is_waiting:
            self.use(None)
            self.recorder = None

    @property
    def is_waiting(self) -> bool:
        """Whether the backward of a launched forward may still come."""
        return self._pending is not None and not self._pending.expired()

    def wait_for(self, saved: torch.Tensor | None) -> None:
        """Let a backward be awaited, for as long as something that it needs is there; None for no more."""
        self._pending = StorageWeakRef(saved.untyped_storage()) if saved is not None else None
        if self.is_closed:
            self.close()

    def resident(self) -> set[int]:
        """Return where the memory of parameters and buffers begins."""
        model = self._model()
        assert model is not None
        return {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}

    def warn(self, why: str) -> None:
        """Say, once, why something runs without CUDA graphs."""
        if not self._is_said:
            self._is_said = True
            warnings.warn(f"{self.name} runs without CUDA graphs: {why}", stacklevel=2)


@dataclass(frozen=True)
class _Argument:
    """Stands for an argument that is given on as it is."""

    position: int


@dataclass
class _Graph:
    """A captured half of a step."""

    launch: Callable[[], None]
    inputs: list[tuple[int, torch.Tensor]]
    """Positions of arguments, and where they are copied to."""
    results: list[Any]
    """For each result a :class:`Place`, a :class:`Draw`, an :class:`_Argument`, or what it always is."""


@dataclass
class _Forward(_Graph):
    pool: Any
    pointers: list[int]
    """Of all arguments."""
    resident: list[int]
    """Positions of arguments that are read where they are."""
    written: list[int]
    """Positions of those that are written over."""
    saved: list[Any]
    """What is saved, with tensors for what lies in the graphs' memory."""
    saved_pointers: list[int]
    saved_at_places: list[int]
    """Positions of what lies in the graphs' memory, among what is saved."""
    saved_at_home: list[int]
    """Of parameters and buffers."""
    stream: int
    backward: _Backward | None = None


@dataclass
class _Backward(_Graph):
    states: list[tuple[int, torch.Generator]] = field(default_factory=list)
    """Positions of states, and the generators that draw from them again."""


class GraphedStep:
    """The forward and backward of one program, at fixed sizes."""

    def __init__(self, graphs: CudaGraphs) -> None:
        self._graphs = graphs
        self._offsets: list[int] = []
        self._saved_on: list[torch.device | None] | None = None
        """Where the forward saved each tensor when nothing was captured; None before its first call."""
        self._recorded: _Forward | None = None
        self._states = States(())
        self._recordings = self._launches = 0
        self._is_given_up = False

    def take(self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
        """Take the halves; the forward gives so many outputs, and then what it saves."""
        self._num_outputs = num_outputs
        arguments = forward.graph.find_nodes(op="placeholder")
        called = [node for node in forward.graph.nodes if node.op == "call_function"]
        written = {_viewed(node) for each in called for node in written_and_shown(each)[0]}
        self._written = [at for at, node in enumerate(arguments) if node in written]
        self._num_again = sum(node.target is run_again for node in backward.graph.nodes)
        nodes = chain(forward.graph.nodes, backward.graph.nodes)
        self._obstacle = next(filter(None, (_obstacle(node, self._graphs.device) for node in nodes)), "")
        self._forward, self._backward = boxed(forward), boxed(backward)

    def release(self) -> None:
        """Let the graphs go, and their memory be free."""
        self._recorded = None

    # The forward.

    def forward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the forward on arguments that are taken out of a list."""
        with entered(self._graphs.device):
            if self._graphs.is_waiting or self._graphs.is_closed or is_capturing():
                return self._plain_forward(arguments)
            self._graphs.use(None if self._is_given_up else self)
            if self._is_given_up:
                return self._plain_forward(arguments)
            if self._saved_on is None:
                return self._first_forward(arguments)
            recorded = self._recorded
            if recorded is None or recorded.backward is None or not self._is_as_recorded(recorded, arguments):
                recorded, saved = self._record_forward(arguments)
                if recorded is None:
                    return self._plain_forward(arguments)
            else:
                saved = self._saved(recorded)
            return self._launch_forward(recorded, saved, arguments)

    def _plain_forward(self, arguments: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = self._forward(arguments)
        return results

    def _first_forward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the forward as ever, and see where random operations draw, and where the rest is."""
        self._offsets.clear()
        with first_draws(self._offsets, is_captured=False):
            results = self._plain_forward(arguments)
        self._states = States(self._offsets)
        saved = results[self._num_outputs :]
        self._saved_on = [each.device if isinstance(each, torch.Tensor) else None for each in saved]
        return results

    def _is_as_recorded(self, recorded: _Forward, arguments: list[Any]) -> bool:
        here = stream_on(self._graphs.device)
        return recorded.stream == here and are_at(arguments, recorded.pointers, recorded.resident)

    def _saved(self, recorded: _Forward) -> list[Any]:
        """Return what a launched forward saves; one of it is new, by which it is seen whether the backward may come."""
        saved = list(recorded.saved)
        for at in recorded.saved_at_places[:1]:
            saved[at] = recorded.results[self._num_outputs + at].tensor()
        return saved

    def _record_forward(self, arguments: list[Any]) -> tuple[_Forward, list[Any]] | tuple[None, list[Any]]:
        """Capture the forward; return it, and what it saves: where it is freed, the backward is captured meanwhile."""
        self.release()
        if self._recordings > _FREE_RECORDINGS + self._launches // _LAUNCHES_EACH:
            return self._give_up("sizes or parameters change too often, or too many forwards have no backward")
        self._recordings += 1
        pool = new_pool()
        resident = self._graphs.resident()
        at_home = [
            at for at, x in enumerate(arguments) if self._is_here(x) and x.untyped_storage().data_ptr() in resident
        ]
        copied = [at for at in range(len(arguments)) if at not in set(at_home)]
        if why := self._cannot_copy([arguments[at] for at in copied], set(copied)):
            return self._give_up(why)
        slots: list[torch.Tensor] = []
        sources = list(arguments)

        def run() -> Any:
            taken = list(sources)
            places = []
            for at in copied:
                taken[at] = room_for(sources[at])
                places.append(Place.of(taken[at]))
            with first_draws(self._offsets, is_captured=True):
                made = list(self._forward(taken))
            slots.extend(place.tensor() for place in places)
            return made

        assert self._graphs.recorder is not None
        launch, made = self._graphs.recorder.record(pool, run)
        pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in arguments]
        by_storage = {arguments[at].untyped_storage().data_ptr(): at for at in at_home}
        results = [self._described(each, by_storage, arguments) for each in made]
        of_saved = results[self._num_outputs :]
        saved = [each if isinstance(each, torch.Tensor) else None for each in made[self._num_outputs :]]
        at_places = [at for at, found in enumerate(of_saved) if isinstance(found, Place)]
        recorded = _Forward(
            pool=pool,
            launch=launch,
            inputs=list(zip(copied, slots, strict=True)),
            results=results,
            pointers=pointers,
            resident=at_home,
            written=self._written,
            saved=[found.look if isinstance(found, Place) else found for found in of_saved],
            saved_pointers=[each.data_ptr() if each is not None else 0 for each in saved],
            saved_at_places=at_places,
            saved_at_home=[at for at, found in enumerate(of_saved) if isinstance(found, _Argument)],
            stream=stream_on(self._graphs.device),
        )
        self._recorded = recorded
        return recorded, [saved[at] if isinstance(found, Place) else found for at, found in enumerate(of_saved)]

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device == self._graphs.device

    def _described(self, made: Any, by_storage: dict[int, int], arguments: Sequence[Any]) -> Any:
        """Return what stands for a result of a captured graph, which is there again after each launch."""
        if not self._is_here(made):
            return made
        at, place = by_storage.get(made.untyped_storage().data_ptr()), Place.of(made)
        return _Argument(at) if at is not None and Place.of(arguments[at]) == place else place

    def _cannot_copy(self, given: list[Any], positions: set[int]) -> str:
        """Say what of the arguments that move from call to call no graph can be given; ``""`` if all can be."""
        if not all(map(self._is_here, given)):
            return "it is given numbers, or tensors on the CPU, of which a graph would know the first ones only"
        if not positions.isdisjoint(self._written):
            return "it writes over what it is given"
        return self._obstacle

    def _launch_forward(self, recorded: _Forward, saved: list[Any], arguments: list[Any]) -> Sequence[Any]:
        for at, place in recorded.inputs:
            place.copy_(arguments[at])
        states = self._states.now()
        self._launch(recorded)
        for at in recorded.written:
            torch.autograd.graph.increment_version(arguments[at])
        outputs = _copied(recorded.results[: self._num_outputs], arguments)
        for at, found in enumerate(recorded.results[self._num_outputs :]):
            if isinstance(found, Draw):
                saved[at] = states[found.number]
            elif isinstance(found, _Argument):
                saved[at] = arguments[found.position]
        first = recorded.saved_at_places[:1]
        self._graphs.wait_for(saved[first[0]] if first else None)
        arguments.clear()
        return [*outputs, *saved]

    # The backward.

    def backward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the backward on arguments that are taken out of a list."""
        with entered(self._graphs.device):
            recorded = self._recorded
            if recorded is None or not self._are_of(recorded, arguments, recorded.saved_at_places):
                return self._plain_backward(arguments)
            is_as_recorded = self._are_of(recorded, arguments, recorded.saved_at_home)
            if keeps_graph() or not is_as_recorded or is_capturing():
                return self._plain_backward_of_launch(arguments)
            tangents = arguments[len(recorded.saved) :]
            if recorded.backward is None:
                recorded.backward = self._record_backward(recorded, arguments)
            gradients = self._launch_backward(recorded.backward, tangents, arguments)
            self._graphs.wait_for(None)
            return gradients

    @staticmethod
    def _are_of(recorded: _Forward, arguments: list[Any], positions: list[int]) -> bool:
        """Whether what was saved at some positions is where a launched forward has it."""
        tangents = len(arguments) - len(recorded.saved)
        return are_at(arguments, [*recorded.saved_pointers, *[0] * tangents], positions)

    def _plain_backward(self, arguments: list[Any]) -> Sequence[Any]:
        gradients: Sequence[Any] = self._backward(arguments)
        return gradients

    def _plain_backward_of_launch(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the backward as ever on what a launched forward saved: seeds of attention are then on the GPU."""
        assert self._saved_on is not None
        for at, device in enumerate(self._saved_on):
            if device is not None and arguments[at].device != device:
                arguments[at] = arguments[at].to(device)
        return self._plain_backward(arguments)

    def _record_backward(self, recorded: _Forward, arguments: list[Any]) -> _Backward:
        """Capture the backward; what was saved is freed in it, as in a step that is not captured."""
        count = len(recorded.saved)
        of_saved = recorded.results[self._num_outputs :]
        states = {at: arguments[at] for at, found in enumerate(of_saved) if isinstance(found, Draw)}
        sources = arguments[count:]
        taken = arguments[:count]
        del arguments[:count]
        kept: list[Any] = [states.get(at) for at in range(count)]
        slots: list[torch.Tensor] = []
        generators = new_generators(self._num_again)
        used: list[tuple[int, torch.Generator]] = []

        def run() -> Any:
            slots_made = [room_for(x) for x in sources]
            places = [Place.of(slot) for slot in slots_made]
            given = [*taken, *slots_made]
            taken.clear()
            slots_made.clear()
            with draws_again(kept, generators) as draws:
                made = list(self._backward(given))
            used.extend(draws.used)
            slots.extend(place.tensor() for place in places)
            return made

        assert self._graphs.recorder is not None
        launch, made = self._graphs.recorder.record(recorded.pool, run, generators)
        arguments[:0] = kept
        return _Backward(
            launch=launch,
            inputs=[(count + at, slot) for at, slot in enumerate(slots)],
            results=[self._described(each, {}, ()) for each in made],
            states=used,
        )

    def _launch_backward(self, graph: _Backward, tangents: Sequence[Any], arguments: list[Any]) -> Sequence[Any]:
        for (_, slot), tangent in zip(graph.inputs, tangents, strict=True):
            slot.copy_(tangent)
        for at, generator in graph.states:
            generator.set_state(arguments[at])
        self._launch(graph)
        arguments.clear()
        return _copied(graph.results, ())

    def _launch(self, graph: _Graph) -> None:
        graph.launch()
        self._launches += 1
        self._graphs.launches += 1

    def _give_up(self, why: str) -> tuple[None, list[Any]]:
        """Run as ever from now on; the graphs' memory is free again."""
        self._is_given_up = True
        self._graphs.use(None)
        self._graphs.warn(why)
        return None, []


def _obstacle(node: fx.Node, device: torch.device) -> str:
    """Say why no CUDA graph can hold an operation; ``""`` if one can."""
    value = node.meta.get("val")
    if node.op != "call_function" or node.target in (run_and_save, run_again):
        return ""
    if is_opaque(node.target):
        return f"{node.target} keeps a state of its own"
    if not isinstance(value, torch.Tensor) or value.device.type == device.type:
        return ""
    read = [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    is_constant = not is_random(node) and all(x.device.type != device.type for x in read)
    return "" if is_constant else f"{node.target} gives the CPU what differs from call to call"


def _viewed(node: fx.Node) -> fx.Node:
    """Return what a view is of."""
    while node.op == "call_function" and len(shown := written_and_shown(node)[1]) == 1:
        (node,) = shown
    return node


def _copied(results: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Copy what lies in the graphs' memory."""
    copies = iter(copies_of([found.look for found in results if isinstance(found, Place)]))
    made: list[Any] = []
    for found in results:
        if isinstance(found, Place):
            made.append(next(copies))
        else:
            made.append(arguments[found.position] if isinstance(found, _Argument) else found)
    return made
