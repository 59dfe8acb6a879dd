"""The host's memory as an offload target: its rate, its size, and which values may go there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cost_models
from cost_models.devices import DeviceSpec
from planner.common.options import LEAST_BYTES
from planner.common.units import Size, parse_size
from planner.errors import UsageError
from planner.ir.graph import Phase, TrainingGraph

_SHARE_OF_HOST = 50
"""How much of the host's memory offloaded values may take by default, in percent."""


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


def host_of(spec: DeviceSpec, budget: Size | None = None, *, at_least: Size = LEAST_BYTES) -> Host:
    """Return the host memory of a device; a budget of ``"60%"`` is of what this machine has, by default half of it.

    The link is taken to reach the same share of its peak as the device's own memory does. Where nothing is known of
    it, or the budget cannot be read, a UsageError says so.
    """
    if spec.host_link_bytes_per_second <= 0:
        raise UsageError(
            f"device {spec.name!r} has no figure for its link to the host's memory, so nothing can be offloaded: give "
            "host_link_bytes_per_second in its device file ('calibrate' measures it), or plan without offload"
        )
    whole_bytes = cost_models.device("cpu").memory_bytes
    budget_bytes = parse_size(f"{_SHARE_OF_HOST}%" if budget is None else budget, whole_bytes=whole_bytes)
    return Host(
        bytes_per_second=spec.host_link_bytes_per_second * spec.bandwidth_efficiency,
        budget_bytes=budget_bytes,
        least_bytes=parse_size(at_least),
    )
