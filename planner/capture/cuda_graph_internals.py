"""Capture kernels into CUDA graphs and replay them: private torch APIs around CUDA graphs.

``tests/cuda/test_cuda_graphs.py`` tries them. A graph reads and writes where it did when it was captured. Its memory is
that of a pool, which lives as long as one of its graphs, and from which nothing else is allocated.

Random operations draw from a generator's seed and offset, which every launch of the graph reads anew, and moves on as
eager operations do. One that is to draw again what it drew before has, in the graph, a generator of its own, which is
put where the first one was before each launch.
"""

from __future__ import annotations

import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from planner.capture.operands import multiply_both_ways
from planner.capture.torch_internals import (
    VERSION,
    HigherOrderOperator,
    OpOverload,
    entered,
    run_and_save_rng_state,
    run_with_rng_state,
)
from planner.errors import RuntimeUnsupportedError

GENERATORS_REGISTER_THEMSELVES = VERSION >= (2, 14)
"""Whether a generator belongs to a graph as soon as something draws from it, and is not to be registered before."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies that a graph reads or writes, and how it looks at its memory."""

    pointer: int
    """Of its storage."""
    storage_bytes: int
    metadata: dict[str, Any]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Return the place of a tensor, which need not live on."""
        storage = tensor.untyped_storage()
        look = {"size": tensor.shape, "stride": tensor.stride(), "storage_offset": tensor.storage_offset()}
        metadata = {**look, "dtype": tensor.dtype, "device": tensor.device}
        return cls(storage.data_ptr(), storage.nbytes(), metadata)

    @cached_property
    def look(self) -> torch.Tensor:
        """A tensor at the place, the same whenever it is asked for."""
        return self.tensor()

    def tensor(self) -> torch.Tensor:
        """Return a new tensor at the place, whose memory it does not own."""
        storage = torch._C._construct_storage_from_data_pointer(
            self.pointer, self.metadata["device"], self.storage_bytes
        )
        made: torch.Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(self.metadata, storage)
        return made


def is_capturing() -> bool:
    """Whether what runs now is captured into a graph, of ours or of somebody else."""
    return torch.cuda.is_current_stream_capturing()


def stream_on(device: torch.device) -> int:
    """Identify the current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor, with its strides if no two elements share a place; nothing is launched to fill it."""
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        if torch._debug_has_internal_overlap(tensor) == 1:
            return torch.empty_like(tensor)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors, all of a type by few kernels."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    by_type: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for at, tensor in enumerate(tensors):
        by_type[tensor.dtype].append(at)
    for positions in by_type.values():
        torch._foreach_copy_([copies[at] for at in positions], [tensors[at] for at in positions])
    return copies


def are_at(values: list[Any], pointers: list[int], positions: list[int]) -> bool:
    """Whether the tensors at some positions begin where they did; ``pointers`` has something for every value."""
    same: bool = torch._C._tensors_data_ptrs_at_indices_equal(values, pointers, positions)  # type: ignore[arg-type]
    return same


def new_pool() -> Any:
    """Return the name of a new pool."""
    return torch.cuda.graph_pool_handle()


class Recorder:
    """Captures graphs on a stream of its own, for which libraries keep workspaces: nobody else gets their memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Were the workspaces cleared, what captured kernels still use would be in a pool that lives as long as this.
        with entered(device):
            self._keeps_workspaces, _ = self.record(new_pool(), lambda: multiply_both_ways(device))

    def record(
        self, pool: Any, run: Callable[[], Any], generators: Sequence[torch.Generator] = ()
    ) -> tuple[Callable[[], None], Any]:
        """Capture what a function launches, which then has not run; return what runs it, and what the function gave.

        All that is allocated meanwhile is from the pool, which goes when the last of its graphs does.
        A RuntimeUnsupportedError says that it cannot be captured, because it waits for the device, say.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # what belongs to generators is to lie in no large piece that is cached
        if not GENERATORS_REGISTER_THEMSELVES:
            for generator in generators:
                graph.register_generator_state(generator)
        before = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                made = run()
        except RuntimeError as error:  # CUDA's own, which leaves torch on the other stream
            torch.cuda.set_stream(before)
            cause = str(error.__context__ or error).partition("\n")[0]
            raise RuntimeUnsupportedError(f"CUDA captures no graph of the planned step: {cause}") from error
        return graph.replay, made


# Random operations.


class _Here(threading.local):
    draws: Any = None
    """What is told of random operations that this thread runs."""


_here = _Here()


@contextmanager
def _told(draws: Any) -> Iterator[None]:
    before, _here.draws = _here.draws, draws
    try:
        yield
    finally:
        _here.draws = before


def run_and_save(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random operation that is to run again; return what it is to draw from then, and its result."""
    if isinstance(_here.draws, FirstDraws):
        return _here.draws.first(operator, args, kwargs)
    return run_and_save_rng_state(operator, *args, **kwargs)


def run_again(state: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random operation again, from what was saved."""
    if isinstance(_here.draws, DrawsAgain):
        return _here.draws.again(state, operator, args, kwargs)
    return run_with_rng_state(state, operator, *args, **kwargs)


@dataclass(frozen=True)
class Draw:
    """Stands, in what a captured forward gives, for the state from which a random operation drew."""

    number: int


@dataclass
class FirstDraws:
    """The random operations of a forward that run again: where each draws, counted from where the forward begins."""

    offsets: list[int]
    """Those of an earlier run, where this one is captured: then nobody can be asked."""
    is_captured: bool
    count: int = 0
    begin: int = 0

    def first(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run one of them."""
        number, self.count = self.count, self.count + 1
        if self.is_captured:
            return Draw(number), operator(*args, **kwargs)
        self.offsets.append(_generator().get_offset() - self.begin)
        return run_and_save_rng_state(operator, *args, **kwargs)


@contextmanager
def first_draws(offsets: list[int], *, is_captured: bool) -> Iterator[None]:
    """Note down in ``offsets`` where random operations draw, or capture them."""
    begin = 0 if is_captured else _generator().get_offset()
    with _told(FirstDraws(offsets, is_captured, begin=begin)):
        yield


class States:
    """What the random operations of a captured forward drew from, as eager graphs save it."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._numbers = torch.tensor([[0, offset] for offset in offsets]).reshape(-1, 2)

    def now(self) -> list[torch.Tensor]:
        """Return them for a forward that begins now: seed and offset of each."""
        if not len(self._numbers):
            return []
        generator = _generator()
        begin = torch.tensor([generator.initial_seed(), generator.get_offset()])
        return [*(self._numbers + begin).view(torch.uint8).unbind(0)]


@dataclass
class DrawsAgain:
    """The random operations that a captured backward runs again, each with a generator of its own."""

    positions: dict[int, int]
    """Positions of states among the backward's arguments, by their identity."""
    generators: list[torch.Generator]
    used: list[tuple[int, torch.Generator]] = field(default_factory=list)
    """The position of the state of each."""

    def again(self, state: Any, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run one of them."""
        default, own = _generator(), self.generators[len(self.used)]
        self.used.append((self.positions[id(state)], own))
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(own)
        try:
            return operator(*args, **kwargs)
        finally:
            default.graphsafe_set_state(before)


@contextmanager
def draws_again(arguments: Sequence[Any], generators: list[torch.Generator]) -> Iterator[DrawsAgain]:
    """Capture random operations that run again from states among some arguments."""
    positions = {id(each): at for at, each in enumerate(arguments)}
    draws = DrawsAgain(positions, generators)
    with _told(draws):
        yield draws


def new_generators(count: int) -> list[torch.Generator]:
    """Return generators for random operations that run again."""
    return [_generator().clone_state() for _ in range(count)]


def _generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def written_and_shown(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments that a node writes over, and those whose memory its results may have."""
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return [], [source] if _is_one_storage(source) else []
    if isinstance(target, HigherOrderOperator):
        return [], []
    if not isinstance(target, OpOverload):
        return [], node.all_input_nodes
    schema = target._schema
    shows = any(result.alias_info is not None for result in schema.returns)
    written: list[fx.Node] = []
    shown: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        nodes: list[fx.Node] = []
        fx.map_arg(value, nodes.append)
        written += nodes if argument.alias_info.is_write else []
        shown += nodes if shows else []
    return written, shown


def _is_one_storage(source: fx.Node) -> bool:
    """Whether the elements of a tuple or list are views of one tensor."""
    target: Any = source.target
    if isinstance(target, OpOverload):
        return any(result.alias_info is not None for result in target._schema.returns)
    return not isinstance(target, HigherOrderOperator)
