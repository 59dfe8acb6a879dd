"""The host's memory as an offload target: its rate, its size, and which values may go there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cost_models
from cost_models.devices import DeviceSpec
from planner.common.options import LEAST_BYTES
from planner.common.units import Size, parse_size
from planner.errors import UsageError
from planner.ir.graph import Phase, TrainingGraph, Value
from planner.ir.schedule import host_bytes

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
    lossy: bool = False
    """Whether values of float32 are rounded to bfloat16 on their way, where that leaves gradients a little off and
    breaks nothing."""

    def rounds(self, value: Value) -> bool:
        """Whether a value is rounded on its way."""
        return self.lossy and value.roundable

    def bytes_of(self, value: Value) -> int:
        """Return what a value takes here."""
        return host_bytes(value, lossy=self.rounds(value))

    def seconds(self, size_bytes: int) -> float:
        """Return the time of a transfer one way."""
        return size_bytes / self.bytes_per_second

    def movable(self, graph: TrainingGraph) -> tuple[int, ...]:
        """Return the values that may be offloaded: all large ones of the forward that are not retained."""
        return tuple(
            u
            for u, value in enumerate(graph.values)
            if graph.operations[graph.producer[u]].phase is Phase.FORWARD
            and value.size_bytes >= max(self.least_bytes, 1)
            and graph.readers[u]
            and not value.retained
        )


def graph_for(graph: TrainingGraph, host: Host | None) -> TrainingGraph:
    """Return a graph as plans may carry it out: where copies are rounded, what decides by numbers runs once."""
    if host is None or not host.lossy or not any(operation.decides for operation in graph.operations):
        return graph
    once = (replace(each, recomputable=False) if each.decides else each for each in graph.operations)
    return replace(graph, operations=tuple(once))


def host_of(
    spec: DeviceSpec,
    budget: Size | None = None,
    *,
    at_least: Size = LEAST_BYTES,
    lossy: bool = False,
) -> Host:
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
        lossy=lossy,
    )
