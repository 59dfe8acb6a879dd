"""The host's memory as an offload target: its rate, its size, and which values may go there."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cost_models
from cost_models.devices import DeviceSpec
from planner.common.options import LEAST_BYTES
from planner.common.units import Size, parse_size
from planner.errors import UsageError
from planner.ir.graph import Phase, TrainingGraph

_SHARE_OF_HOST = 50
"""How much of the free host memory the values of all processes here may take by default, in percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Host memory beside a device."""

    bytes_per_second: float
    """Rate of a transfer, the same in both directions. Each direction has one copy engine: transfers one way queue
    up, those of the two ways and computing go on at the same time."""
    budget_bytes: int
    """What offloaded values may take of the host's memory."""
    least_bytes: int = LEAST_BYTES
    """Values below this size stay on the device."""
    least_gain: float = 0.0
    """What offload must save to be taken, as a share of the step; nothing if no plan is known without."""

    def seconds(self, size_bytes: int) -> float:
        """Return the time of a transfer one way."""
        return size_bytes / self.bytes_per_second

    def movable(self, graph: TrainingGraph) -> tuple[int, ...]:
        """Return the values that may be offloaded: all large ones of the forward that only their unit holds."""
        return tuple(
            u
            for u, value in enumerate(graph.values)
            if graph.operations[graph.producer[u]].phase is Phase.FORWARD
            and value.size_bytes >= max(self.least_bytes, 1)
            and graph.readers[u]
            and not value.retained
            and value.kind != "output"  # the caller holds it until there is a loss
            and graph.is_private(u)
        )


UNTIMED = Host(bytes_per_second=math.inf, budget_bytes=0)
"""Where only the bytes of a schedule are asked for."""


def host_of(
    spec: DeviceSpec, budget: Size | None = None, *, at_least: Size = LEAST_BYTES, link: Size | None = None
) -> Host:
    """Return the host memory of a device; a budget of ``"60%"`` is of what this machine has.

    By default it is half of what is free, shared by the processes that torchrun started here. The link is the device's
    unless its peak is given, and taken to reach the same share of that as the device's own memory does. Where nothing
    is known of it, or the budget cannot be read, a UsageError says so.
    """
    peak = spec.host_link_bytes_per_second if link is None else parse_size(str(link).removesuffix("/s"))
    if peak <= 0:
        raise UsageError(
            f"device {spec.name!r} has no figure for its link to the host's memory, so nothing can be offloaded: give "
            "host_link_bytes_per_second in its device file ('calibrate' measures it), or plan without offload"
        )
    if budget is None:
        budget_bytes = free_bytes() * _SHARE_OF_HOST // 100 // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    else:
        budget_bytes = parse_size(budget, whole_bytes=cost_models.device("cpu").memory_bytes)
    return Host(
        bytes_per_second=peak * spec.bandwidth_efficiency, budget_bytes=budget_bytes, least_bytes=parse_size(at_least)
    )


def free_bytes() -> int:
    """Return what programs may still take of this machine's memory, as Linux estimates it; elsewhere all of it."""
    with suppress(OSError, IndexError):
        return 1024 * int(re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())[0])
    return cost_models.device("cpu").memory_bytes
