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
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
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
from tests.models import perceptron
from tests.tiers import tiered


class Broken(Exception):
    """What breaks off a step."""


class Stream:
    """A stream, and how far it has come; also of each other one what must be over by then."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.seen, self.before = cuda, Counter[Any](), Counter[Any]()

    def __enter__(self) -> None:
        self.cuda.streams.append(self)

    def __exit__(self, *_: Any) -> None:
        self.cuda.streams.pop()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen if self.cuda.does("wait_stream") else Counter()

    def wait_event(self, event: Any) -> None:
        self.seen |= event.seen if self.cuda.does("wait_event") else Counter()

    def record_event(self) -> Any:
        seen = Counter(self.seen if self.cuda.does("copy before event") else self.before)
        return SimpleNamespace(seen=seen, synchronize=partial(self.cuda.wait, seen))

    def access(self, reads: list[Any], writes: list[Any]) -> None:
        self.before, self.seen = self.seen, self.seen | self.cuda.host
        self.seen[self] += 1
        for memory in (*reads, *writes):
            check_over(self.seen, memory, is_read=memory not in writes)
        for memory in reads:
            memory.read.append((self, self.seen[self]))
        for memory in writes:
            memory.written, memory.read = [(self, self.seen[self])], []


def check_over(seen: Counter[Any], memory: Any, *, is_read: bool = False) -> None:
    """Raise an error if some access of a memory may not be over."""
    earlier = [*memory.written, *([] if is_read else memory.read)]
    assert all(seen[stream] >= moment for stream, moment in earlier), "a race"


def new_memory() -> Any:
    return SimpleNamespace(holds=None, written=[], read=[])


class Tensor:
    """A tensor on the device with all its views, or on the host where it has a lease."""

    dtype, device = torch.uint8, torch.device("cuda")

    def __init__(self, cuda: Cuda, size_bytes: int, lease: Any = None) -> None:
        self.cuda, self.is_cuda, self.size_bytes = cuda, lease is None, size_bytes
        self.free = cuda.free[cuda.current_stream()] if self.is_cuda else []
        self.memory = self.free.pop() if self.free else new_memory()  # of whatever size: what was freed last
        if lease is not None:
            address = torch.frombuffer(lease, dtype=torch.uint8).data_ptr()
            self.data_ptr, self.memory = lambda: address, cuda.places[address]
            self.lease = lease

    def __del__(self) -> None:
        self.free.append(self.memory)

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        self.cuda.current_stream().access([source.memory], [self.memory])
        self.memory.holds = source.memory.holds

    def same(self, *_: Any) -> Any:
        return self

    view = as_strided = untyped_storage = same
    size = stride = storage_offset = lambda self: None

    def nbytes(self) -> int:
        return self.size_bytes

    numel = nbytes


class Cuda:
    """What stands for torch in ``host_copies``, and runs planned graphs."""

    uint8, Tensor = torch.uint8, torch.Tensor

    def __init__(self, *omitted: tuple[str, str]) -> None:
        self.omitted, self.inside, self.pinned, self.host = omitted, "", 0, Counter[Any]()
        self.free, self.places = defaultdict[Any, list[Any]](list), defaultdict[int, Any](new_memory)
        runtime = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        self.streams, self.cuda, self.accelerator, self.device = [Stream(self)], self, self, torch.device
        self.cudart, self.Stream = lambda: runtime, lambda device: Stream(self)
        self.frombuffer = lambda lease, dtype: Tensor(self, len(lease), lease)

    def does(self, call: str) -> bool:
        return (self.inside, call) not in self.omitted and ("", call) not in self.omitted

    def wait(self, seen: Counter[Any]) -> None:
        self.host |= seen if self.does("synchronize") else Counter()

    def register(self, address: int, *_: Any) -> int:
        self.pinned += 1
        return 0

    def unregister(self, address: int) -> None:
        check_over(self.host, self.places.pop(address))

    def current_stream(self, _: Any = None) -> Stream:
        return self.streams[-1]

    def empty(self, size_bytes: int, *, dtype: Any, device: Any) -> Any:
        if not size_bytes:
            return SimpleNamespace(set_=lambda storage: storage)
        with self.current_stream() if self.does("memory of its stream") else host_copies._streams(device)[1]:
            return Tensor(self, size_bytes)

    def made(self, name: Any, reads: list[Tensor], like: torch.Tensor | None) -> Tensor | None:
        if like is None:
            return None
        made = Tensor(self, like.untyped_storage().nbytes())
        self.current_stream().access([tensor.memory for tensor in reads], [made.memory])
        made.memory.holds = hash((name, *(tensor.memory.holds for tensor in reads)))
        return made

    def run(self, graph: fx.Graph, given: list[Any], breaks_at: int = -1) -> list[Any]:
        """Run a graph as generated code does: each value is let go of after its last use."""
        values: dict[fx.Node, Any] = {}
        for number, node in enumerate(graph.nodes):
            if number == breaks_at:
                raise Broken
            if node.op == "output":
                break
            values[node] = given.pop(0) if node.op == "placeholder" else self.call(node, values)
            for used in (node, *node.all_input_nodes):
                if max(used.users, default=node) is node:
                    values.pop(used, None)
        return [values.get(result) for result in graph.output_node().args[0]]

    def call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        self.inside = node.target.__name__
        reads, like = [values[used] for used in node.all_input_nodes], node.meta.get("val")
        if node.target.__module__ == host_copies.__name__:
            return getattr(host_copies, self.inside)(*reads)
        if node.target is operator.getitem:
            return reads[0][node.args[1]]
        if isinstance(like, tuple):
            return tuple(self.made((node.target, at), reads, one) for at, one in enumerate(like))
        shown = (tensor for used, tensor in zip(node.all_input_nodes, reads, strict=True) if shows(node, used))
        return next(shown, None) or self.made(node.target, reads, like)


def shows(*nodes: fx.Node) -> bool:
    return len({node.meta["val"].untyped_storage()._cdata for node in nodes}) == 1


@cache
def captured() -> LoweredGraph:
    model, options = nn.Sequential(perceptron(8), perceptron(8)), step.Options()
    joint = step.captured(model, Inputs.of(torch.randn(32, 8)), options)
    return step.lower_step(model, joint, options).lowered


def scheduled(rng: random.Random) -> Schedule:
    """Return a schedule that moves values as it pleases."""
    graph = captured().graph
    movable = Host(bytes_per_second=1.0, budget_bytes=0, least_bytes=1).movable(graph)
    while True:
        chance = {value: rng.random() for value in movable}
        again = [v for v in movable if chance[v] > 0.85 and graph.operations[graph.producer[v]].recomputable]
        offloads = []
        with suppress(ScheduleError):
            order = recompute_lazily(graph, {graph.loss_index: again}).order
            for value in (value for value in movable if chance[value] < 0.5):
                touching = {graph.producer[value], *graph.readers[value]}
                uses = [position for position, index in enumerate(order) if index in touching]
                gaps = [*pairwise(uses)][rng.randrange(len(uses) - 1) :]
                leaves = rng.randint(gaps[0][0] + 1, gaps[0][1])
                later = (rng.randint(use + 1, until) for use, until in gaps[1:] if rng.random() < 0.3)
                offloads.append(Offload(value, leaves, (rng.randint(leaves, gaps[0][1]), *later)))
            schedule = Schedule(order, tuple(offloads))
            simulate(graph, [OperationCost(seconds=0.0)] * len(graph.operations), schedule, UNTIMED)
            return schedule


def train(cuda: Cuda, seed: int) -> None:
    """Take some steps of one graph, on streams that do not wait for each other.

    A step is planned anew or as the last one was. Its backward may run twice, break off and run again, or never.
    """
    rng, lowered, streams = random.Random(seed), captured(), (cuda.current_stream(), Stream(cuda))
    results, resident = len(lowered.joint.outputs[0]), [Tensor(cuda, 64) for _ in lowered.joint.arguments]
    for name, tensor in enumerate(resident):
        tensor.memory.holds = name
    halves, wanted, waiting, pinned = extract_fwd_bwd(lowered, Schedule.keep_all(lowered.graph)), [], [], None

    def backward(graph: fx.Graph, stream: Stream, saved: list[Any], breaks_at: int = -1) -> None:
        with stream:
            tangents = [cuda.made("tangent", [], node.meta["val"]) for node in lowered.joint.tangents]
            found = cuda.run(graph, [*saved, *tangents], breaks_at)
        wanted.append([tensor and tensor.memory.holds for tensor in found])
        assert wanted[-1] == wanted[0], "a place was mixed up"

    for number in range(6):
        if number and rng.random() < 0.7:
            halves, pinned = extract_fwd_bwd(lowered, scheduled(rng)), None
        lengths = [len(half.graph.nodes) for half in halves]
        ends = rng.choice(["once", "once", "twice", "never", *lengths]) if number else "once"
        stream = rng.choice(streams)
        with suppress(Broken):
            with stream:
                breaks_at = rng.randrange(ends) if ends == lengths[0] else -1
                saved = cuda.run(halves[0].graph, [*resident], breaks_at)[results:]
            assert pinned in (None, cuda.pinned), "memory is pinned in a step like the last"
            run, saved, pinned = partial(backward, halves[1].graph, stream, saved), None, None
            if ends == lengths[1]:
                waiting.append(run)
                run(rng.randrange(ends))
            for _ in range({"once": 1, "twice": 2}.get(ends, 0)):
                run()
            pinned = None if waiting else cuda.pinned
        run = None
        while waiting and rng.random() < 0.5:
            waiting.pop()()


def look(monkeypatch: pytest.MonkeyPatch, seeds: range, *omitted: tuple[str, str]) -> None:
    for seed in seeds:
        cuda = Cuda(*omitted)
        monkeypatch.setattr(host_copies, "torch", cuda)
        monkeypatch.setattr(host_copies, "POOL", host_copies.Pool())
        monkeypatch.setattr(host_copies, "_streams", cache(host_copies._streams.__wrapped__))
        train(cuda, seed)


@pytest.mark.parametrize("first", tiered([0, 80, 160, 240], quick=[0]))
def test_no_order_of_copies_and_kernels_is_left_to_chance(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    look(monkeypatch, range(first, first + 80))  # which plan some 280 times


OMITTED = [
    ("offload", "wait_stream"),  # sent before it is made
    ("offload", "wait_event"),  # a place is overwritten from which another stream fetches
    ("offload", "copy before event"),  # nobody knows when it is sent
    ("wait_offload", "wait_event"),  # memory is used again before what was there has left
    ("reload", "wait_stream"),  # fetched to where others still compute
    ("reload", "copy before event"),  # nobody knows when it is fetched
    ("reload", "memory of its stream"),  # fetched to where another stream computes
    ("wait_reload", "wait_event"),  # read before it has arrived
    ("offload", "synchronize"),  # memory is unpinned, and a copy goes on
    ("", "synchronize"),  # so it does where a step breaks off
]


@pytest.mark.parametrize("omitted", OMITTED, ids=str)
def test_what_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, omitted: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match=r"a race|a place was mixed up"):
        look(monkeypatch, range(40), omitted)
