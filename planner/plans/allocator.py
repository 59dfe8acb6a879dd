"""What PyTorch's CUDA caching allocator reserves for a planned step, on paper, and the optimizer's own peak.

``planner.ir.simulator`` counts the bytes that a step uses. The device must hold more: the allocator
takes memory in segments, hands out pieces of them, and keeps what comes back.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of
PyTorch 2.11 and later, one stream and all options at their defaults but expandable segments: no
largest block to split, no rounding to powers of two, no garbage collection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.common.units import format_bytes, round_up
from planner.errors import UsageError
from planner.findings.finding import Finding
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import lifetimes
from planner.ir.static_memory import StaticMemory
from planner.plans.plan import ReservedMemory

# In brackets, what the real allocator calls it.
MIN_BLOCK_BYTES = 512  # requests are rounded up to this, and no smaller block is split off (kMinBlockSize)
SMALL_REQUEST_BYTES = 2**20  # largest request of the small pool; a rest in the large one is larger (kSmallSize)
SMALL_SEGMENT_BYTES = 2 * 2**20  # segment of the small pool (kSmallBuffer)
LARGE_REQUEST_BYTES = 10 * 2**20  # smallest request with a segment of its own size (kMinLargeAlloc)
LARGE_SEGMENT_BYTES = 20 * 2**20  # segment for requests between those two (large_segment_size, once kLargeBuffer)
ROUND_LARGE_BYTES = 2 * 2**20  # a segment of its own size is rounded up to this (kRoundLarge)
_ADDRESSES = 2**60  # that a segment which can grow never fills


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of one pool as ``(size, address)``, sorted: the first that is large enough fits best."""

    least_split_bytes: int
    free: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0
    """Where a segment that can grow ends; 0 if there is none."""


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, linked to the pieces before and after it in the same segment."""

    pool: _Pool
    address: int
    size_bytes: int
    requested_bytes: int = 0
    before: _Block | None = None
    after: _Block | None = None

    @property
    def is_free(self) -> bool:
        return not self.requested_bytes


class Allocator:
    """The caching allocator of one device and stream, which may take as much of the device as it wants.

    It counts what is asked for, each request rounded up to 512 bytes (``allocated_bytes``); the blocks handed out, what
    ``torch.cuda.memory_allocated`` reads (``block_bytes``: a large block may be up to 1 MiB larger than what was asked
    for); and the segments, what ``torch.cuda.memory_reserved`` reads (``reserved_bytes``, which never falls).

    Addresses grow with each segment, so among free blocks of one size the oldest segment's comes
    first, then the lowest. A call takes O(log n) comparisons among n free blocks.
    """

    # What is left of a large block must be above 1 MiB, and sizes are multiples of 512 bytes.
    _least_large_split_bytes = SMALL_REQUEST_BYTES + MIN_BLOCK_BYTES

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.block_bytes = self.peak_block_bytes = 0
        self.reserved_bytes = 0
        self._small = _Pool(least_split_bytes=MIN_BLOCK_BYTES)
        self._large = _Pool(least_split_bytes=self._least_large_split_bytes)
        self._blocks: dict[int, _Block] = {}

    def allocate(self, size_bytes: int) -> int:
        """Allocate a block and return its handle; raise UsageError for sizes below 1."""
        if size_bytes <= 0:
            raise UsageError(f"cannot allocate {size_bytes} bytes")
        rounded_bytes = round_up(size_bytes, MIN_BLOCK_BYTES)
        pool = self._small if rounded_bytes <= SMALL_REQUEST_BYTES else self._large
        block = self._found(pool, rounded_bytes) or self._made(pool, rounded_bytes)
        if block.size_bytes - rounded_bytes >= pool.least_split_bytes:
            self._split(block, rounded_bytes)
        block.requested_bytes = rounded_bytes
        self.allocated_bytes += rounded_bytes
        self.block_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_block_bytes = max(self.peak_block_bytes, self.block_bytes)
        return block.address

    def free(self, handle: int) -> None:
        """Free a block and merge it with free neighbours; raise UsageError for an unknown handle."""
        block = self._blocks.get(handle)
        if block is None or block.is_free:
            raise UsageError(f"no block is handed out as {handle}")
        self.allocated_bytes -= block.requested_bytes
        self.block_bytes -= block.size_bytes
        block.requested_bytes = 0
        if block.before is not None and block.before.is_free:
            self._leave_pool(block.before)
            self._join(block.before, block)
            block = block.before
        if block.after is not None and block.after.is_free:
            self._leave_pool(block.after)
            self._join(block, block.after)
        insort(block.pool.free, (block.size_bytes, block.address))

    def _found(self, pool: _Pool, size_bytes: int) -> _Block | None:
        """Take the free block that fits best; one at the end that could grow only where no other fits."""
        place = bisect_left(pool.free, (size_bytes, 0))
        if place == len(pool.free):
            return None
        if sum(pool.free[place]) == pool.end and place + 1 < len(pool.free):
            place += 1
        return self._blocks[pool.free.pop(place)[1]]

    def _made(self, pool: _Pool, size_bytes: int) -> _Block:
        """Take a segment from the device."""
        block = _Block(pool, self.reserved_bytes, _segment_bytes(size_bytes))
        self._blocks[block.address] = block
        self.reserved_bytes += block.size_bytes
        return block

    def _split(self, block: _Block, size_bytes: int) -> None:
        """Cut a block down to a size and put the rest, the upper part, among the free ones."""
        rest = _Block(block.pool, block.address + size_bytes, block.size_bytes - size_bytes)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        block.size_bytes = size_bytes
        self._blocks[rest.address] = rest
        insort(rest.pool.free, (rest.size_bytes, rest.address))

    def _leave_pool(self, block: _Block) -> None:
        free = block.pool.free
        del free[bisect_left(free, (block.size_bytes, block.address))]

    def _join(self, block: _Block, joined: _Block) -> None:
        block.size_bytes += joined.size_bytes
        block.after = joined.after
        if block.after is not None:
            block.after.before = block
        del self._blocks[joined.address]


class ExpandableAllocator(Allocator):
    """The same with ``expandable_segments:True``: one segment a pool, which grows at its end by pages.

    Every block is split, so what is handed out is what is asked for. A call that lets a segment grow takes O(n).
    """

    _least_large_split_bytes = MIN_BLOCK_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._large.end = _ADDRESSES

    def _made(self, pool: _Pool, size_bytes: int) -> _Block:
        """Let the segment grow by whole pages, from the free block at its end on if there is one."""
        end = next((b for b in self._blocks.values() if b.pool is pool and b.address + b.size_bytes == pool.end), None)
        is_free = end is not None and end.is_free
        there_bytes = end.size_bytes if end is not None and is_free else 0
        page_bytes = SMALL_SEGMENT_BYTES if pool is self._small else LARGE_SEGMENT_BYTES
        grown_bytes = round_up(size_bytes - there_bytes, page_bytes)
        block = _Block(pool, pool.end, grown_bytes, before=end)
        if end is not None:
            end.after = block
        self._blocks[block.address] = block
        self.reserved_bytes += grown_bytes
        pool.end += grown_bytes
        if end is None or not is_free:
            return block
        self._leave_pool(end)
        self._join(end, block)
        return end


def simulate_reserved(
    graph: TrainingGraph,
    costs: Sequence[OperationCost],
    schedule: Schedule,
    *,
    resident_bytes: Sequence[int] = (),
    expandable: bool = False,
) -> Allocator:
    """Run a schedule against a new allocator, twice in a row, as training does, and return that.

    What is resident before the step and stays (parameters, buffers, optimizer state, inputs) is given as the size of
    each tensor in the order of their making. Retained values go before the next step begins, as with
    ``zero_grad(set_to_none=True)``. What the optimizer allocates in its own step is left out, and so is random state:
    it is kept on the host. A workspace is a block, and one for what is small of it, made after the outputs.
    O(runs x outputs) calls of the allocator.
    A ScheduleError says that the schedule cannot be run, a UsageError that a resident tensor has a negative size.
    """
    allocator = ExpandableAllocator() if expandable else Allocator()
    for size_bytes in filter(None, resident_bytes):
        allocator.allocate(size_bytes)
    born: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    died: defaultdict[int, list[int]] = defaultdict(list)
    for number, copy in enumerate(lifetimes(graph, schedule)):
        if size_bytes := graph.values[copy.value].size_bytes:
            born[copy.born].append((number, size_bytes))
            died[copy.died].append(number)
    handles: dict[int, int] = {}
    for _ in range(2):  # the second step finds the segments as the first one left them
        for position, index in enumerate(schedule.order):
            for number, size_bytes in born[position]:
                handles[number] = allocator.allocate(size_bytes)
            small_bytes = min(costs[index].small_bytes, costs[index].workspace_bytes)
            blocks_bytes = (costs[index].workspace_bytes - small_bytes, small_bytes)
            for handle in [allocator.allocate(size_bytes) for size_bytes in blocks_bytes if size_bytes > 0]:
                allocator.free(handle)
            for number in died[position]:
                allocator.free(handles[number])
    return allocator


def _segment_bytes(rounded_bytes: int) -> int:
    if rounded_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(rounded_bytes, ROUND_LARGE_BYTES)


OPTIMIZER_STEP = "the optimizer's step"


def optimizer_peak_bytes(graph: TrainingGraph, static_memory: StaticMemory) -> int:
    """Return the bytes live during the optimizer's step: resident memory, gradients, outputs and temporaries.

    Gradients that are accumulated into are resident already, so those of the step are gone by then.
    """
    kinds = ("output",) if "gradients" in graph.static_bytes else ("output", "gradient")
    left_bytes = sum(value.size_bytes for value in graph.values if value.retained and value.kind in kinds)
    return graph.total_static_bytes + left_bytes + static_memory.optimizer_step_bytes


def reserved_by_cuda(problem: Problem, schedule: Schedule, static_memory: StaticMemory) -> ReservedMemory | None:
    """Predict the bytes that CUDA's caching allocator reserves; None for other devices."""
    if not static_memory.has_caching_allocator:
        return None
    found = simulate_reserved(
        problem.graph,
        problem.costs,
        schedule,
        resident_bytes=static_memory.resident_bytes,
        expandable=static_memory.has_expandable_segments,
    )
    return ReservedMemory(allocated_bytes=found.peak_block_bytes, reserved_bytes=found.reserved_bytes)


def reserve_warnings(
    problem: Problem, reserved: ReservedMemory | None, static_memory: StaticMemory
) -> Iterator[Finding]:
    """Warn where fragmentation would eat what the budget leaves free, and of what is set and not simulated."""
    if static_memory.allocator_settings:
        yield Finding(
            rule="allocator-settings",
            evidence=static_memory.allocator_settings,
            cause="allocated and reserved memory are predicted by the rules of torch's own allocator without that",
            fix="leave room beside the budget, or train without this setting; the bytes asked for stay the same",
        )
    static_bytes = problem.graph.static_bytes
    available_bytes = problem.budget_bytes + problem.graph.total_static_bytes - static_bytes.get("reserve", 0)
    if reserved is None or reserved.reserved_bytes <= available_bytes:
        return
    yield Finding(
        rule="fragmentation",
        evidence=f"CUDA's allocator would reserve {format_bytes(reserved.reserved_bytes)} for this plan, more than the "
        f"{format_bytes(available_bytes)} that it may have",
        cause="holes between segments are lost to the budget",
        fix="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan with a reserve of "
        f"{format_bytes(reserved.reserved_bytes - available_bytes + static_bytes.get('reserve', 0))}, if the budget is "
        "all that the card has",
    )


def whole_peak_bytes(problem: Problem, schedule: Schedule, static_memory: StaticMemory) -> int:
    """Return the peak bytes of the whole device under a schedule, as its allocator counts them."""
    static_bytes = problem.graph.static_bytes
    asked_bytes = problem.evaluate(schedule).peak_bytes + problem.graph.total_static_bytes
    reserved = reserved_by_cuda(problem, schedule, static_memory)
    if reserved is None:
        return asked_bytes
    return max(asked_bytes, reserved.allocated_bytes + static_bytes.get("reserve", 0))
