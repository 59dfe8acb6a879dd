"""What is alive at the peak and what happens to each layer, read off a schedule's lifetimes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from planner.ir.checkpoints import BOOKKEEPING
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.layers import Layers
from planner.ir.schedule import Schedule
from planner.ir.simulate import Evaluation, lifetimes
from planner.plans.liveness import allocations_of, backward_begins
from planner.plans.parts import LayerPlacement, PeakLocation


def anatomy_of_peak(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule, evaluation: Evaluation
) -> dict[str, int]:
    """Say what is alive at the peak, by kind.

    Returns
    -------
    dict of str to int
        Adds up to the peak on the whole device exactly. Kinds: those of ``graph.static_bytes``;
        ``gradients``, ``outputs``, ``tangents``, ``autocast weight copies`` and ``other micro-batches``;
        ``saved activations`` (the forward's copies that the backward waits for), ``forward temporaries`` (its
        others), ``recomputed values``, ``fetched values``, ``gradient temporaries``, ``workspace`` and
        ``random state``.
    """
    alive: Counter[str] = Counter(graph.static_bytes)
    for made in allocations_of(graph, costs, schedule):
        if made.born <= evaluation.peak_position <= made.died:
            alive[made.kind] += made.size_bytes
    return {kind: size for kind, size in alive.items() if size}


def locate_peak(graph: TrainingGraph, schedule: Schedule, evaluation: Evaluation) -> PeakLocation:
    """Say which operation is under way at the peak."""
    if not schedule.order:
        return PeakLocation(operation="")
    position = evaluation.peak_position
    index = schedule.order[position]
    again = index in schedule.order[:position]
    place = locate_operation(graph, graph.operations[index].name)
    return replace(place, phase="recompute") if again else place


def locate_operation(graph: TrainingGraph, name: str) -> PeakLocation:
    """Say where the operation of a name is; one that the graph does not have stands for itself."""
    for operation in graph.operations:
        if operation.name == name:
            return PeakLocation(
                operation=operation.target,
                module=operation.module,
                source=operation.source,
                phase=operation.phase.value,
            )
    return PeakLocation(operation=name)


def saved_bytes_by_layer(graph: TrainingGraph, layers: Layers, schedule: Schedule) -> Counter[str]:
    """Give the bytes of each layer's forward activations whose first copy lives into the backward."""
    saved: Counter[str] = Counter()
    backward_position = backward_begins(graph, schedule)
    made: set[int] = set()
    for copy in lifetimes(graph, schedule):
        producer = graph.producer[copy.value]
        if copy.value in made or graph.operations[producer].phase is not Phase.FORWARD:
            continue
        made.add(copy.value)
        if copy.died >= backward_position and not graph.values[copy.value].retained:
            saved[layers.of[producer]] += graph.values[copy.value].size_bytes
    return saved


def placement(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule, layers: Layers
) -> tuple[LayerPlacement, ...]:
    """Say for each layer what is saved, what is freed, and what that adds to the step.

    Returns
    -------
    tuple of LayerPlacement
        In forward order. Freed bytes are those that the step without recompute saves and this
        schedule does not; they are negative where a boundary is held only to recompute from it.
    """
    before = saved_bytes_by_layer(graph, layers, Schedule.keep_all(graph))
    after = saved_bytes_by_layer(graph, layers, schedule)
    offloaded: Counter[str] = Counter()
    for offload in schedule.offloads:
        offloaded[layers.of[graph.producer[offload.value]]] += graph.values[offload.value].size_bytes
    targets: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: defaultdict[str, float] = defaultdict(float)
    forward_seconds: defaultdict[str, float] = defaultdict(float)
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.FORWARD:
            forward_seconds[layers.of[index]] += costs[index].seconds
    ran: set[int] = set()
    for index in schedule.order:
        if index in ran and graph.operations[index].target not in BOOKKEEPING:
            targets[layers.of[index]][graph.operations[index].target] += 1
            seconds[layers.of[index]] += costs[index].seconds
        ran.add(index)
    blocks = set(layers.blocks)
    return tuple(
        LayerPlacement(
            module=name,
            block=name in blocks,
            saved_bytes=after[name],
            freed_bytes=before[name] - after[name],
            recomputed=targets[name].total(),
            added_seconds=seconds[name],
            forward_seconds=forward_seconds[name],
            targets=dict(sorted(targets[name].items())),
            offloaded_bytes=offloaded[name],
        )
        for name in dict.fromkeys(layers.of)
        if name in blocks or before[name] or after[name] or targets[name]
    )
