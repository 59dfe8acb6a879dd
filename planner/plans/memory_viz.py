"""The planned step as the memory snapshot that https://pytorch.org/memory_viz draws.

The format is that of ``torch.cuda.memory._snapshot()``: what was allocated and freed, in order, and
the blocks that are there at the end. Addresses are made up: each allocation gets the lowest gap that
holds it. Nothing is ever unpickled here.
"""

from __future__ import annotations

import pickle
from bisect import insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planner.common.atomic import write_bytes
from planner.errors import UsageError
from planner.plans.plan import Allocation, Plan

_BASE = 2**32
"""Where memory begins: no address is 0."""

_PROTOCOL = 4
"""Of pickle: what the page's own reader understands."""


def save(plan: Plan, path: str | Path) -> None:
    """Write the predicted allocations of a plan, just made, as a file to drop on https://pytorch.org/memory_viz."""
    write_bytes(path, pickle.dumps(snapshot(plan), protocol=_PROTOCOL))


def snapshot(plan: Plan) -> dict[str, Any]:
    """Return the predicted allocations of a plan as a memory snapshot.

    What is resident is not in the trace but in the blocks of the end. So is what the step leaves behind. A UsageError
    says that the plan does not know its allocations, as one from a file.
    """
    if plan.details is None or not plan.details.allocations:
        raise UsageError(
            f"this plan (of runtime {plan.runtime!r}, perhaps from a file) does not know its allocations: make it "
            "anew, with a runtime that plans by the graph"
        )
    space = _Space()
    blocks: dict[int, dict[str, Any]] = {}
    for kind, size_bytes in plan.static_bytes.items():
        if size_bytes:
            frames = [{"name": kind, "filename": "resident before the step", "line": 0}]
            blocks[space.take(size_bytes)] = {"requested_size": size_bytes, "frames": frames}
    trace: list[dict[str, Any]] = []
    for made, address, is_taken in _events(plan.details.allocations, space):
        event = {"addr": address, "size": made.size_bytes, "stream": 0, "frames": _frames(made), "category": made.kind}
        if is_taken:
            trace.append({"action": "alloc", **event})
            blocks[address] = {"requested_size": made.size_bytes, "frames": event["frames"]}
        else:
            trace += ({"action": action, **event} for action in ("free_requested", "free_completed"))
            del blocks[address]
    return {"segments": [_segment(blocks, space.highest)], "device_traces": [trace]}


def _events(allocations: Sequence[Allocation], space: _Space) -> Iterator[tuple[Allocation, int, bool]]:
    """Return what is taken and given back, in order, with its address; what lives to the end is not given back."""
    end = max(made.died for made in allocations)
    real = [(number, made) for number, made in enumerate(allocations) if made.size_bytes]
    taken = [(made.born, False, number) for number, made in real]
    given_back = [(made.died, True, number) for number, made in real if made.died < end]
    address: dict[int, int] = {}
    for _, is_given_back, number in sorted(taken + given_back):
        made = allocations[number]
        if is_given_back:
            space.give_back(address[number], made.size_bytes)
        else:
            address[number] = space.take(made.size_bytes)
        yield made, address[number], not is_given_back


class _Space:
    """Addresses without end: the lowest gap that is large enough is taken."""

    def __init__(self) -> None:
        self.highest = _BASE
        self._taken: list[tuple[int, int]] = []
        """Begin and end of what is taken, by address."""

    def take(self, size_bytes: int) -> int:
        address = _BASE
        for begin, end in (*self._taken, (self.highest, self.highest)):
            if begin - address >= size_bytes:
                break
            address = end
        insort(self._taken, (address, address + size_bytes))
        self.highest = max(self.highest, address + size_bytes)
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        self._taken.remove((address, address + size_bytes))


def _frames(made: Allocation) -> list[dict[str, Any]]:
    """Return what made it as a stack: the operator at the user's line, then the module."""
    file, _, line = made.source.rpartition(":")
    number = int(line) if line.isdigit() else 0
    return [
        {"name": made.operation, "filename": file or "unknown", "line": number},
        {"name": made.module or "the model", "filename": "module", "line": 0},
    ]


def _segment(blocks: dict[int, dict[str, Any]], highest: int) -> dict[str, Any]:
    """Return all memory as one segment, with the blocks of the end and the gaps between them."""
    shown: list[dict[str, Any]] = []
    at = _BASE
    for address in [*sorted(blocks), highest]:
        if address > at:
            shown.append({"address": at, "size": address - at, "requested_size": 0, "state": "inactive", "frames": []})
        if address in blocks:
            size_bytes = blocks[address]["requested_size"]
            shown.append({"address": address, "size": size_bytes, "state": "active_allocated", **blocks[address]})
            at = address + size_bytes
    active_bytes = sum(block["requested_size"] for block in blocks.values())
    return {
        "device": 0,
        "address": _BASE,
        "total_size": highest - _BASE,
        "allocated_size": active_bytes,
        "active_size": active_bytes,
        "requested_size": active_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": shown,
    }
