"""Races between streams, looked for in all that a step with offload does on CUDA.

The functions of ``host_copies`` run as they are, called by planned graphs, over a model of CUDA: streams, events, and
memory that the allocator hands out again as soon as Python has let go of it. Two accesses of one memory, one of which
writes, must be in an order that streams have waited for (vector clocks). Then they are in that order however long a
copy or a kernel takes: no delay of a slow link or of a stalled stream need be tried. What values hold is followed by
name: gradients are those of the step without a plan, or a place was mixed up.
"""

from __future__ import annotations

import operator
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from planner.capture.inputs import Inputs
from planner.capture.lowering import LoweredGraph
from planner.errors import ScheduleError
from planner.ir.graph import OperationCost
from planner.ir.host import UNTIMED, Host
from planner.ir.schedule import Offload, Schedule, recompute_lazily
from planner.ir.simulator import simulate
from planner.rewrite import host_copies
from planner.rewrite.graphs import extract_fwd_bwd
from planner.session import step
from tests.tiers import tiered

COPIES = {host_copies.offload, host_copies.wait_offload, host_copies.reload, host_copies.wait_reload, host_copies.keep}


class Race(AssertionError):
    """Two accesses that no stream has put in order."""


class Broken(Exception):
    """Stands for what breaks off a step."""


class Memory:
    """Some memory of the device or the host: what it holds, and who wrote and read it last."""

    def __init__(self, holds: Any = None) -> None:
        self.holds, self.written, self.read = holds, None, []


class Stream:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.seen, self.before = cuda, Counter(), Counter()
        """How far this stream has come, and of each other one what must be over; the same before its last access."""

    def wait_stream(self, other: Stream) -> None:
        if not self.cuda.omits("wait_stream"):
            self.seen |= other.seen

    def wait_event(self, event: Event) -> None:
        if not self.cuda.omits("wait_event"):
            self.seen |= event.seen

    def record_event(self) -> Event:
        return Event(self.cuda, Counter(self.before if self.cuda.omits("copy in event") else self.seen))

    def access(self, reads: list[Memory], writes: list[Memory]) -> None:
        self.before = Counter(self.seen)
        self.seen |= self.cuda.host
        self.seen[self] += 1
        for memory in (*reads, *writes):
            earlier = [memory.written, *(memory.read if memory in writes else ())]
            if any(one is not None and self.seen[one[0]] < one[1] for one in earlier):
                raise Race(f"in {self.cuda.inside}")
        for memory in reads:
            memory.read.append((self, self.seen[self]))
        for memory in writes:
            memory.written, memory.read = (self, self.seen[self]), []


class Event:
    def __init__(self, cuda: Cuda, seen: Counter[Stream]) -> None:
        self.cuda, self.seen = cuda, seen

    def synchronize(self) -> None:
        if not self.cuda.omits("synchronize"):
            self.cuda.host |= self.seen


class Storage:
    """Memory of the device for as long as a tensor refers to it."""

    def __init__(self, cuda: Cuda, size_bytes: int) -> None:
        self.free, self.size_bytes = cuda.free[cuda.current], size_bytes
        self.memory = self.free.pop() if self.free else Memory()  # of whatever size: what was freed last

    def __del__(self) -> None:
        self.free.append(self.memory)

    def nbytes(self) -> int:
        return self.size_bytes


class Tensor:
    """A tensor on the device, or, with the lease of a place, on the host."""

    def __init__(self, cuda: Cuda, storage: Storage | None, lease: memoryview | None = None) -> None:
        self.cuda, self.storage, self.lease = cuda, storage, lease
        self.is_cuda, self.device, self.dtype = lease is None, SimpleNamespace(type="cuda"), torch.uint8

    @property
    def memory(self) -> Memory:
        return self.storage.memory if self.storage is not None else self.cuda.places[self.data_ptr()]

    def numel(self) -> int:
        return len(self.lease) if self.lease is not None else self.storage.size_bytes

    def data_ptr(self) -> int:
        return torch.frombuffer(self.lease, dtype=torch.uint8).data_ptr()

    def untyped_storage(self) -> Storage:
        return self.storage

    def set_(self, storage: Storage) -> Tensor:
        return Tensor(self.cuda, storage)

    def same(self, *_: Any) -> Any:
        return self

    size = stride = storage_offset = lambda self: None
    view = as_strided = same

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.current.access([source.memory], [self.memory])
        self.memory.holds = source.memory.holds


class Cuda:
    """What stands for torch in ``host_copies``, and runs planned graphs."""

    uint8, Tensor = torch.uint8, torch.Tensor

    def __init__(self, *omitted: tuple[str, str]) -> None:
        self.omitted, self.inside = omitted, ""
        self.host: Counter[Stream] = Counter()
        self.free: defaultdict[Stream, list[Memory]] = defaultdict(list)
        self.places: defaultdict[int, Memory] = defaultdict(Memory)
        self.pinned = 0
        runtime = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        self.cuda = SimpleNamespace(
            Stream=lambda device: Stream(self), stream=self.on, current_stream=lambda device: self.current,
            cudart=lambda: runtime, is_available=lambda: True,
        )  # fmt: skip
        self.current = Stream(self)

    def omits(self, call: str) -> bool:
        return (self.inside, call) in self.omitted or ("", call) in self.omitted

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        self.places[address] = Memory()
        self.pinned += 1
        return 0

    def unregister(self, address: int) -> None:
        memory = self.places.pop(address)
        if any(one is not None and self.host[one[0]] < one[1] for one in (memory.written, *memory.read)):
            raise Race("memory of the host is unpinned")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def device(self, kind: str) -> Any:
        return SimpleNamespace(type=kind)

    def empty(self, size_bytes: int, *, dtype: Any, device: Any) -> Tensor:
        with self.on(host_copies._streams(device)[1] if self.omits("memory of its stream") else self.current):
            return Tensor(self, Storage(self, size_bytes) if size_bytes else None)

    def frombuffer(self, lease: Any, dtype: Any) -> Tensor:
        return Tensor(self, None, lease)

    def made(self, name: Any, reads: list[Tensor], like: torch.Tensor) -> Tensor:
        made = Tensor(self, Storage(self, like.untyped_storage().nbytes()))
        self.current.access([tensor.memory for tensor in reads], [made.memory])
        made.memory.holds = hash((name, tuple(tensor.memory.holds for tensor in reads)))
        return made

    def run(self, graph: fx.Graph, given: list[Any], breaks_at: int = -1) -> list[Any]:
        """Run a graph as generated code does: each value is let go of after its last use."""
        values: dict[fx.Node, Any] = {}
        for number, node in enumerate(graph.nodes):
            if number == breaks_at:
                raise Broken
            if node.op == "output":
                return [values.get(result) for result in node.args[0]]
            values[node] = given.pop(0) if node.op == "placeholder" else self.call(node, values)
            for used in (node, *node.all_input_nodes):
                if max(used.users, default=node) is node:
                    values.pop(used, None)
        raise AssertionError

    def call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        self.inside = node.target.__name__
        reads = [values[used] for used in node.all_input_nodes]
        if node.target in COPIES:
            return getattr(host_copies, self.inside)(*reads)
        if node.target is operator.getitem:
            return reads[0][node.args[1]]
        like = node.meta["val"]
        if isinstance(like, tuple):
            made = enumerate(like)
            return tuple(None if one is None else self.made((node.target, at), reads, one) for at, one in made)
        for used, tensor in zip(node.all_input_nodes, reads, strict=True):
            if used.meta["val"].untyped_storage()._cdata == like.untyped_storage()._cdata:
                return tensor  # a view
        return self.made(node.target, reads, like)


@cache
def captured() -> LoweredGraph:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in "ab")
    )
    options = step.Options()
    joint = step.captured(model, Inputs.of(torch.randn(32, 8)), options)
    return step.lower_step(model, joint, options).lowered


def scheduled(rng: random.Random) -> Schedule:
    """Return a schedule that moves values as it pleases."""
    graph = captured().graph
    movable = Host(bytes_per_second=1.0, budget_bytes=0, least_bytes=1).movable(graph)
    while True:
        moved = {value for value in movable if rng.random() < 0.5}
        again = {v for v in movable if v not in moved and graph.operations[graph.producer[v]].recomputable}
        try:
            kept = recompute_lazily(graph, {graph.loss_index: [v for v in again if rng.random() < 0.3]})
            offloads = []
            for value in moved:
                makes_or_reads = {graph.producer[value], *graph.readers[value]}
                uses = [position for position, index in enumerate(kept.order) if index in makes_or_reads]
                away = rng.randrange(len(uses) - 1)
                leaves = rng.randint(uses[away] + 1, uses[away + 1])
                returns = [rng.randint(leaves, uses[away + 1])]
                later = zip(uses[away + 1 :], uses[away + 2 :], strict=False)
                returns += [rng.randint(use + 1, next_use) for use, next_use in later if rng.random() < 0.3]
                offloads.append(Offload(value, leaves, tuple(returns)))
            schedule = Schedule(kept.order, tuple(offloads))
            simulate(graph, [OperationCost(seconds=0.0)] * len(graph.operations), schedule, UNTIMED)
        except ScheduleError:
            continue
        return schedule


def train(cuda: Cuda, seed: int) -> None:
    """Take some steps of one graph, on streams that do not wait for each other; nothing may race or be mixed up.

    A step is planned anew or as the last one was. Its backward may run twice, break off and run again, or never.
    """
    rng, lowered = random.Random(seed), captured()
    results = len(lowered.joint.outputs[0])
    resident = [Tensor(cuda, Storage(cuda, 64)) for _ in lowered.joint.arguments]
    for name, tensor in enumerate(resident):
        tensor.memory.holds = name
    streams, halves = [cuda.current, Stream(cuda)], extract_fwd_bwd(lowered, Schedule.keep_all(lowered.graph))
    waiting: list[Callable[[], None]] = []
    wanted: list[Any] = []
    has_places = False

    def backward(graph: fx.Graph, stream: Stream, saved: list[Any], breaks_at: int) -> None:
        with cuda.on(stream):
            tangents = [cuda.made("tangent", [], node.meta["val"]) for node in lowered.joint.tangents]
            found = cuda.run(graph, [*saved, *tangents], breaks_at)
        wanted.append([tensor and tensor.memory.holds for tensor in found])
        assert wanted[-1] == wanted[0]

    for number in range(6):
        if number and rng.random() < 0.7:
            halves, has_places = extract_fwd_bwd(lowered, scheduled(rng)), False
        forward, stream, pinned = halves[0].graph, rng.choice(streams), cuda.pinned if has_places else None
        ends = rng.choice(["once", "once", "twice", "never", "breaks"]) if number else "once"
        try:
            with cuda.on(stream):
                broken = rng.randrange(len(forward.nodes)) if ends == "breaks" and rng.random() < 0.5 else -1
                saved = cuda.run(forward, [*resident], broken)[results:]
        except Broken:
            continue
        assert pinned in (None, cuda.pinned), "memory is pinned in a step like the last"
        run = partial(backward, halves[1].graph, stream, saved)
        if ends == "breaks":
            with suppress(Broken):
                run(rng.randrange(len(halves[1].graph.nodes)))
            waiting.append(partial(run, -1))  # as where the graph is retained
        elif ends != "never":
            for _ in range(2 if ends == "twice" else 1):
                run(-1)
        del run, saved
        while waiting and rng.random() < 0.5:
            waiting.pop()()
        has_places = not waiting


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> Iterator[Cuda]:
    streams = cache(host_copies._streams.__wrapped__)
    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "torch", cuda)
        patch.setattr(host_copies, "POOL", host_copies.Pool())
        patch.setattr(host_copies, "_streams", lambda device: streams("cuda"))
        yield cuda


def held_by_nobody(patch: pytest.MonkeyPatch) -> None:
    def copy(record: Any, *args: Any, real: Any = host_copies._Record.copy) -> None:
        real(record, *args)
        record.moving = "memory that is held by nobody"

    patch.setattr(host_copies._Record, "copy", copy)


def given_back_at_once(patch: pytest.MonkeyPatch) -> None:
    def take(pool: host_copies.Pool, size_bytes: int, *, pinned: bool, real: Any = host_copies.Pool.take) -> Any:
        place = real(pool, size_bytes, pinned=pinned)
        pool._free[size_bytes, pinned].append((place.lease.obj, None))
        pool._free_bytes += size_bytes
        return place

    patch.setattr(host_copies.Pool, "take", take)


def waited_for_by_another(patch: pytest.MonkeyPatch) -> None:
    def wait(record: Any) -> None:
        host_copies._streams(record.device)[1].wait_event(record.copied)
        record.moving = None

    patch.setattr(host_copies._Record, "wait", wait)


def waited_for_too_late(patch: pytest.MonkeyPatch) -> None:
    """Let graphs wait for what is fetched after the first run that reads it."""

    def extracted(*args: Any, real: Any = extract_fwd_bwd) -> Any:
        halves = real(*args)
        for half in halves:
            for node in half.graph.find_nodes(op="call_function", target=host_copies.wait_reload):
                reader = min(node.users)
                node.replace_all_uses_with(node.args[0])
                reader.append(node)
        return halves

    patch.setattr(f"{__name__}.extract_fwd_bwd", extracted)


OMITTED = [
    ("offload", "wait_stream"),  # sent before it is made
    ("offload", "wait_event"),  # a place is overwritten from which another stream fetches
    ("offload", "copy in event"),  # nobody knows when it is sent
    ("wait_offload", "wait_event"),  # memory is used again before what was there has left
    ("reload", "wait_stream"),  # fetched to where others still compute
    ("reload", "copy in event"),  # nobody knows when it is fetched
    ("reload", "memory of its stream"),  # fetched to where another stream computes
    ("wait_reload", "wait_event"),  # read before it has arrived
    ("", "synchronize"),  # a step breaks off, or memory is unpinned, and copies go on
]
SPOILED = [held_by_nobody, given_back_at_once, waited_for_by_another, waited_for_too_late]


def look(monkeypatch: pytest.MonkeyPatch, seeds: range, *omitted: tuple[str, str]) -> None:
    for seed in seeds:
        with installed(monkeypatch, Cuda(*omitted)) as cuda:
            train(cuda, seed)


@pytest.mark.parametrize("first", tiered([0, 80, 160, 240], quick=[0]))
def test_no_order_of_copies_and_kernels_is_left_to_chance(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    look(monkeypatch, range(first, first + 80))  # which plan some 280 times


@pytest.mark.parametrize("omitted", OMITTED, ids=str)
def test_what_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, omitted: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        look(monkeypatch, range(40), omitted)


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_is_spoiled_is_found(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]) -> None:
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        look(monkeypatch, range(40))
