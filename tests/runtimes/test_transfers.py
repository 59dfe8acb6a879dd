"""Races between streams, looked for in all that a step with offload does where copies run beside computing.

Planned graphs run as they are, and so do the functions that they call, on a CPU. Streams and events are counted only:
two accesses of one memory, one of which writes, must be in an order that streams have waited for. Then they are in
that order however long a copy or a kernel takes: no delay of a slow link or of a stalled stream need be tried. Memory
is used again as soon as Python lets go of it, by what the same stream runs next, as CUDA's allocator does.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.inputs import Inputs
from planner.capture.lowering import LoweredGraph
from planner.capture.torch_internals import boxed
from planner.capture.trees import leaf_tensors
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

_ALLOCATES = {torch.ops.aten.empty.memory_format}


class Broken(Exception):
    """What breaks off a step."""


class Stream:
    """A stream, and the accesses that are over when it comes to what it does next."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.over: set[int] = set()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event(), "wait_stream")

    def wait_event(self, event: Any, call: str = "wait_event") -> None:
        self.over |= event.over if self.cuda.does(call) else set()

    def record_event(self) -> Any:
        over = self.over - (set() if self.cuda.does("copy before event") else {self.cuda.accesses})
        return SimpleNamespace(over=over, synchronize=partial(self.cuda.wait, over))

    def __enter__(self) -> None:
        self.cuda.streams.append(self if self.cuda.does("enter") else self.cuda.streams[-1])

    def __exit__(self, *_: Any) -> None:
        self.cuda.streams.pop()


class Cuda(TorchDispatchMode):
    """Watches what reads and writes which memory."""

    def __init__(self, *omitted: tuple[str, str]) -> None:
        super().__init__()
        self.omitted, self.streams = omitted, [Stream(self)]
        self.pinned, self.accesses, self.breaks_at, self.host = 0, 0, -1, set[int]()
        self.owner, self.read, self.written = dict[int, Stream](), defaultdict[Any, set[int]](set), defaultdict(set)

    def does(self, call: str) -> bool:
        frame, inside = sys._getframe(), set()
        while len(inside) < 6 and frame is not None:
            inside.add(frame.f_code.co_name)
            frame = frame.f_back
        return not any(call == one and function in inside for function, one in self.omitted)

    def wait(self, over: set[int]) -> None:
        self.host |= over if self.does("synchronize") else set()

    def check(self, over: set[int], memory: Any, *, writes: bool) -> None:
        assert over >= self.written[memory] | (self.read[memory] if writes else set()), "a race"

    def cudaHostRegister(self, *_: Any) -> int:
        self.pinned += 1
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.check(self.host, (address, None), writes=True)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.breaks_at -= 1
        if not self.breaks_at:
            raise Broken
        result, stream = function(*args, **(kwargs or {})), self.streams[-1]
        given, made = ({t.untyped_storage().data_ptr() for t in leaf_tensors(x)} for x in ((args, kwargs), result))
        self.owner |= dict.fromkeys(made - given, stream)
        if function.is_view or function in _ALLOCATES:
            return result
        writes = {args[0].untyped_storage().data_ptr()} if function is torch.ops.aten.copy_.default else made - given
        stream.over |= self.host
        self.accesses += 1
        for memory in ((address, self.owner.get(address)) for address in given | writes):
            self.check(stream.over, memory, writes=memory[0] in writes)
            (self.written if memory[0] in writes else self.read)[memory].add(self.accesses)
        stream.over.add(self.accesses)
        return result


@cache
def captured() -> LoweredGraph:
    torch.manual_seed(0)
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
    rng, lowered, streams = random.Random(seed), captured(), (cuda.streams[0], Stream(cuda))
    results, resident = len(lowered.joint.outputs[0]), [torch.randn(t.shape) for t in lowered.joint.inputs]
    plan, wanted, waiting, pinned = Schedule.keep_all(lowered.graph), [], [], None

    def run(half: Any, given: list[Any], stream: Stream, breaks_at: int = -1) -> list[Any]:
        cuda.breaks_at = breaks_at
        with stream, cuda:
            found, cuda.breaks_at = list(boxed(half)(given)), -1
        return found

    def backward(half: Any, saved: list[Any], stream: Stream, breaks_at: int = -1) -> None:
        with stream, cuda:
            tangents = [torch.ones(node.meta["val"].shape) for node in lowered.joint.tangents]
        found = run(half, [*saved, *tangents], stream, breaks_at)
        wanted[:] = wanted or found
        assert all(a is b or torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), "mixed up"

    for number in range(6):
        if number and rng.random() < 0.7:
            plan, pinned = scheduled(rng), None
        ends = rng.choice(["once", "once", "twice", "never", "forward", "backward"]) if number else "once"
        (forward, half), stream, breaks_at = extract_fwd_bwd(lowered, plan), rng.choice(streams), rng.randint(1, 40)
        with suppress(Broken):
            saved = run(forward, [*resident], stream, breaks_at if ends == "forward" else -1)[results:]
            assert pinned in (None, cuda.pinned), "memory is pinned in a step like the last"
            back, saved, pinned = partial(backward, half, saved, stream), None, None
            if ends == "backward":
                waiting.append(back)
                back(breaks_at)
            for _ in range({"once": 1, "twice": 2}.get(ends, 0)):
                back()
            pinned = None if waiting else cuda.pinned
        back = None
        while waiting and rng.random() < 0.5:
            waiting.pop()()


def look(monkeypatch: pytest.MonkeyPatch, seeds: range, *omitted: tuple[str, str]) -> None:
    for seed in seeds:
        cuda = Cuda(*omitted)
        monkeypatch.setattr(host_copies, "POOL", host_copies.Pool())
        monkeypatch.setattr(host_copies, "_copies_beside", lambda device: True)
        monkeypatch.setattr(host_copies, "_streams", cache(lambda _, cuda=cuda: (Stream(cuda), Stream(cuda))))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _, cuda=cuda: cuda.streams[-1])
        monkeypatch.setattr(host_copies, "_cuda_runtime", lambda cuda=cuda: cuda)
        train(cuda, seed)


# Seven of these find what of the calls below is missed least often; of the fifty first none does.
QUICK = range(40, 80)


@pytest.mark.parametrize("seeds", tiered([range(40), QUICK, range(80, 160), range(160, 320)], quick=[QUICK]))
def test_no_order_of_copies_and_kernels_is_left_to_chance(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    look(monkeypatch, seeds)  # which plan some 140 times


OMITTED = [
    ("offload", "wait_stream"),  # sent before it is made
    ("offload", "wait_event"),  # a place is overwritten from which another stream fetches
    ("offload", "copy before event"),  # nobody knows when it is sent
    ("wait_offload", "wait_event"),  # memory is used again before what was there has left
    ("reload", "wait_stream"),  # fetched to where others still compute
    ("reload", "copy before event"),  # nobody knows when it is fetched
    ("wait_reload", "wait_event"),  # read before it has arrived
    ("reload", "enter"),  # fetched by the stream that computes: nobody knows when
    ("settle", "synchronize"),  # what a broken step has begun goes on
    ("_shrink", "synchronize"),  # memory is unpinned, and a copy goes on
]


@pytest.mark.parametrize("omitted", OMITTED, ids=str)
def test_what_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, omitted: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match=r"a race|mixed up"):
        look(monkeypatch, range(QUICK[0], 280), omitted)
