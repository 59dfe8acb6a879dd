"""The simulated caching allocator: sizes and places by hand, all rules against a second, plain one, and whole steps."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import ScheduleError, UsageError
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.plans import allocator as rules
from planner.plans.allocator import Allocator, ExpandableAllocator, simulate_reserved
from tests import oracle
from tests.example_graphs import by_reads
from tests.ir.test_simulate import random_schedule

KIB, MIB = 2**10, 2**20
seeds = st.integers(0, 10**6)


def figures(allocator: Allocator) -> tuple[int, int, int]:
    return allocator.allocated_bytes, allocator.block_bytes, allocator.reserved_bytes


def peaks(allocator: Allocator) -> tuple[int, int, int]:
    return allocator.peak_allocated_bytes, allocator.peak_block_bytes, allocator.reserved_bytes


def test_among_equals_the_lowest_address_is_taken() -> None:
    allocator = Allocator()
    handles = [allocator.allocate(MIB // 2) for _ in range(8)]
    for place in (5, 1, 3):
        allocator.free(handles[place])
    assert [allocator.allocate(MIB // 2) for _ in range(3)] == [handles[place] for place in (1, 3, 5)]


def test_only_what_is_handed_out_can_be_freed() -> None:
    allocator = Allocator()
    handles = [allocator.allocate(KIB) for _ in range(2)]
    for handle in handles:
        allocator.free(handle)
    for handle in (*handles, 123):
        with pytest.raises(UsageError, match="handed out"):
            allocator.free(handle)


def test_the_sizes_are_those_of_the_torch_that_is_installed() -> None:
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    header = Path(spec.origin).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text() if header.exists() else ""
    found = {name: int(size) for name, size in re.findall(r"(k\w+|large_segment_size_)(?: = |\{)(\d+)[;}]", text)}
    if not found:
        pytest.skip("this torch has the sizes elsewhere")
    ours = {
        "kMinBlockSize": rules.MIN_BLOCK_BYTES,
        "kSmallSize": rules.SMALL_REQUEST_BYTES,
        "kSmallBuffer": rules.SMALL_SEGMENT_BYTES,
        "kMinLargeAlloc": rules.LARGE_REQUEST_BYTES,
        "large_segment_size_": rules.LARGE_SEGMENT_BYTES,
        "kRoundLarge": rules.ROUND_LARGE_BYTES,
    }
    assert {name: found[name] for name in ours} == ours


@dataclass
class Plain:
    """The same rules a second time: segments are lists of [owner, size] that are looked through from the start."""

    segments: list[list[list[int]]] = field(default_factory=list)
    requested: dict[int, int] = field(default_factory=dict)

    def allocate(self, owner: int, size: int) -> None:
        size = (size + 511) // 512 * 512
        small = size <= MIB
        pool = [segment for segment in self.segments if (self._total(segment) == 2 * MIB) == small]
        free = [(piece[1], at, segment, piece) for at, segment in enumerate(pool) for piece in segment if not piece[0]]
        fitting = [found for found in free if found[0] >= size]
        if fitting:
            _, _, segment, piece = min(fitting, key=lambda found: found[:2])
        else:
            needed = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            piece = [0, needed]
            segment = [piece]
            self.segments.append(segment)
        rest = piece[1] - size
        if rest >= 512 if small else rest > MIB:
            segment.insert(next(at for at, other in enumerate(segment) if other is piece) + 1, [0, rest])
            piece[1] = size
        piece[0] = owner
        self.requested[owner] = size

    def free(self, owner: int) -> None:
        del self.requested[owner]
        for place, segment in enumerate(self.segments):
            joined: list[list[int]] = []
            for holder, size in segment:
                holder = 0 if holder == owner else holder
                if joined and not holder and not joined[-1][0]:
                    joined[-1][1] += size
                else:
                    joined.append([holder, size])
            self.segments[place] = joined

    @property
    def reserved(self) -> int:
        return sum(map(self._total, self.segments))

    @property
    def figures(self) -> tuple[int, int, int]:
        blocks = sum(size for segment in self.segments for holder, size in segment if holder)
        return sum(self.requested.values()), blocks, self.reserved

    @staticmethod
    def _total(segment: Sequence[Sequence[int]]) -> int:
        return sum(size for _, size in segment)


def random_size(rng: random.Random) -> int:
    return rng.choice(
        [
            rng.randint(1, 4 * KIB),
            rng.randint(1, MIB),
            rng.randint(MIB - KIB, MIB + KIB),
            rng.randint(MIB, 10 * MIB),
            rng.randint(10 * MIB - KIB, 10 * MIB + KIB),
            rng.randint(1, 20) * MIB,
            rng.randint(1, 60 * MIB),
        ]
    )


@given(seeds)
@settings(max_examples=120, deadline=None)
def test_all_rules_together_give_what_a_plain_search_gives(seed: int) -> None:
    rng = random.Random(seed)
    allocator, plain = Allocator(), Plain()
    handles: dict[int, int] = {}
    highest = (0, 0, 0)
    for owner in range(1, 80):
        if handles and rng.random() < 0.45:
            gone = rng.choice(list(handles))
            allocator.free(handles.pop(gone))
            plain.free(gone)
        else:
            size = random_size(rng)
            handles[owner] = allocator.allocate(size)
            plain.allocate(owner, size)
        now = figures(allocator)
        assert now == plain.figures
        assert now[0] <= now[1] <= now[2]
        highest = tuple(map(max, highest, now))  # type: ignore[assignment]
    assert highest == peaks(allocator)


def grown(*sizes: int) -> ExpandableAllocator:
    allocator = ExpandableAllocator()
    for size in sizes:
        allocator.allocate(size)
    return allocator


def test_segments_that_grow_do_so_by_pages() -> None:
    assert grown(1).reserved_bytes == 2 * MIB and grown(MIB, MIB, 1).reserved_bytes == 4 * MIB
    assert grown(MIB + 1).reserved_bytes == 20 * MIB
    assert grown(21 * MIB).reserved_bytes == 40 * MIB
    assert grown(21 * MIB, 19 * MIB).reserved_bytes == 40 * MIB  # no hole between the two
    assert figures(grown(21 * MIB, 20 * MIB)) == (41 * MIB, 41 * MIB, 60 * MIB)


def test_the_end_of_a_segment_that_grows_is_taken_last() -> None:
    allocator = ExpandableAllocator()
    first = allocator.allocate(8 * MIB)
    allocator.allocate(6 * MIB)  # leaves 6 MiB at the end
    allocator.free(first)
    assert allocator.allocate(5 * MIB) == first
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(7 * MIB)  # the end grows on from what is free there
    assert allocator.reserved_bytes == 40 * MIB


def costs_of(*workspaces: int) -> tuple[OperationCost, ...]:
    return tuple(OperationCost(seconds=1.0, workspace_bytes=workspace) for workspace in workspaces)


def test_a_step_by_hand() -> None:
    graph = by_reads([(), (0,), (1,), (2,)], [12 * MIB, 14 * MIB, 12 * MIB, 0])
    costs, resident_bytes = costs_of(0, 0, 0, 0), [3 * MIB, 0, KIB]
    reserved = simulate_reserved(graph, costs, Schedule.keep_all(graph), resident_bytes=resident_bytes)
    # Segments of 20 and 2 MiB for what is resident; the first 12 go into the 20, and 14 get their own.
    assert peaks(reserved) == (29 * MIB + KIB, 29 * MIB + KIB, 36 * MIB)


def test_the_workspace_is_there_beside_the_outputs_and_gone_before_the_next_run() -> None:
    graph = by_reads([(), (0,)], [12 * MIB, 12 * MIB])
    reserved = simulate_reserved(graph, costs_of(0, 16 * MIB), Schedule.keep_all(graph))
    assert (reserved.peak_allocated_bytes, reserved.reserved_bytes) == (40 * MIB, 40 * MIB)
    # The second operation's output takes the block that the first one's workspace had.
    reserved = simulate_reserved(graph, costs_of(12 * MIB, 12 * MIB), Schedule.keep_all(graph))
    assert (reserved.peak_allocated_bytes, reserved.reserved_bytes) == (36 * MIB, 36 * MIB)


def test_small_blocks_of_a_workspace_are_not_part_of_a_large_one() -> None:
    graph = by_reads([(), ()], [12 * MIB, 0])
    first, second = costs_of(0, 12 * MIB + KIB)
    for small_bytes, reserved_bytes in ((0, 26 * MIB), (KIB, 14 * MIB)):  # without it takes the block that is there
        costs = first, replace(second, small_bytes=small_bytes)
        assert simulate_reserved(graph, costs, Schedule.keep_all(graph)).reserved_bytes == reserved_bytes


def test_a_retained_value_that_is_made_again_is_there_twice_for_a_moment() -> None:
    graph = by_reads([(), (0,)], [12 * MIB, 14 * MIB], retained=[0])
    once = simulate_reserved(graph, costs_of(0, 0), Schedule((0, 1)))
    again = simulate_reserved(graph, costs_of(0, 0), Schedule((0, 0, 1)))
    assert (once.peak_allocated_bytes, once.reserved_bytes) == (26 * MIB, 26 * MIB)
    assert (again.peak_allocated_bytes, again.reserved_bytes) == (26 * MIB, 38 * MIB)


def test_random_state_takes_nothing_of_the_device() -> None:
    graph = by_reads([(), (0,)], [12 * MIB, 14 * MIB])
    first = replace(graph.operations[0], state_bytes=100 * MIB)
    graph = replace(graph, operations=(first, graph.operations[1]))
    assert simulate_reserved(graph, costs_of(0, 0), Schedule((0, 0, 1))).reserved_bytes == 26 * MIB


def test_retained_values_go_before_the_next_step() -> None:
    graph = by_reads([(), (0,)], [12 * MIB, 14 * MIB], retained=[0, 1])
    reserved = simulate_reserved(graph, costs_of(0, 0), Schedule.keep_all(graph))
    assert (reserved.peak_allocated_bytes, reserved.reserved_bytes) == (26 * MIB, 26 * MIB)


def test_the_second_step_may_need_more_than_the_first() -> None:
    # First step: 24 in a segment, gone; 14 of those 24; 20 in a segment; 10 in what the 14 have left. 44 MiB.
    # Second step: now 14 fit best into the 20, the 20 into the 24, and 6 and 4 are left for the 10.
    graph = by_reads([(), (), (), (1, 2)], [24 * MIB, 14 * MIB, 20 * MIB, 10 * MIB])
    reserved = simulate_reserved(graph, costs_of(0, 0, 0, 0), Schedule.keep_all(graph))
    assert (reserved.peak_allocated_bytes, reserved.reserved_bytes) == (44 * MIB, 54 * MIB)


def test_what_is_wrong_is_refused() -> None:
    graph = by_reads([(), (0,)], [KIB, KIB])
    with pytest.raises(ScheduleError, match="not been made"):
        simulate_reserved(graph, costs_of(0, 0), Schedule((1, 0)))
    with pytest.raises(UsageError, match="allocate -1 bytes"):
        simulate_reserved(graph, costs_of(0, 0), Schedule((0, 1)), resident_bytes=[-1])


def test_an_empty_step_takes_what_is_resident() -> None:
    graph = TrainingGraph(operations=(), values=())
    assert simulate_reserved(graph, (), Schedule(())).reserved_bytes == 0
    assert simulate_reserved(graph, (), Schedule(()), resident_bytes=[11 * MIB]).reserved_bytes == 12 * MIB


def random_step(seed: int, count: int) -> tuple[TrainingGraph, tuple[OperationCost, ...], Schedule]:
    """Make a random graph with sizes that mean something to the allocator, no random state, and reruns anywhere."""
    rng = random.Random(seed)
    graph, costs = oracle.random_graph(seed, operations=count)

    def scale(size: int) -> int:
        return size * rng.choice([512, 64 * KIB, 384 * KIB, MIB, 5 * MIB + 512])

    graph = replace(
        graph,
        operations=tuple(replace(operation, state_bytes=0) for operation in graph.operations),
        values=tuple(replace(value, size_bytes=scale(value.size_bytes)) for value in graph.values),
    )
    costs = tuple(replace(cost, workspace_bytes=scale(cost.workspace_bytes)) for cost in costs)
    return graph, costs, random_schedule(graph, rng)


@given(seeds, st.integers(1, 9), st.lists(st.integers(0, 40).map(lambda size: size * 700 * 512), max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_is_asked_for_is_what_the_simulator_counts(seed: int, count: int, resident: list[int]) -> None:
    graph, costs, schedule = random_step(seed, count)
    found = simulate_reserved(graph, costs, schedule, resident_bytes=resident)
    assert found.peak_allocated_bytes - sum(resident) == simulate(graph, costs, schedule).peak_bytes
    assert found.peak_allocated_bytes <= found.peak_block_bytes <= found.reserved_bytes
    assert peaks(simulate_reserved(graph, costs, schedule, resident_bytes=resident)) == peaks(found)
