"""Tensors alive at one position of a schedule, by kind; saved and freed bytes of each layer."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add

from planner.ir.checkpoints import BOOKKEEPING
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, named_by
from planner.ir.layers import Layers, number_ranges
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation, FetchedCopy, lifetimes
from planner.plans.plan import AliveTensors, CallMemory, LayerPlacement, PeakLocation

_OWN_KINDS = {
    "gradient": "gradients",
    "output": "outputs",
    "tangent": "tangents",
    "weight copy": "autocast weight copies",
    "in flight": "other micro-batches",
}

WORKSPACE, RANDOM_STATE = "workspace", "random state"

_MOST_ROWS = 40
"""Of what is alive at the peak; the rest is one row."""


def alive_at(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule, position: int
) -> Iterator[AliveTensors]:
    """Yield the tensors that are live at a position of a schedule, as the simulator counts them.

    That is each copy of a value, of a kind that :func:`anatomy_of_peak` has; ``workspace`` for the run that needs it;
    and ``random state`` from the first to the last run of what is recomputed. O(runs x (inputs + outputs)).
    """
    backward_position = backward_begins(graph, schedule)
    made: set[int] = set()
    copies = lifetimes(graph, schedule)
    for copy in copies:
        value = graph.values[copy.value]
        operation = graph.operations[graph.producer[copy.value]]
        if isinstance(copy, FetchedCopy):
            kind = "fetched values"
        elif copy.value in made:
            kind = "recomputed values"
        elif value.kind in _OWN_KINDS:
            kind = _OWN_KINDS[value.kind]
        elif operation.phase is Phase.BACKWARD:
            kind = "gradient temporaries"
        elif copy.died >= backward_position:
            kind = "saved activations"
        else:
            kind = "forward temporaries"
        made.add(copy.value)
        if copy.born <= position <= copy.died:
            key, _ = operation.made_by(operation.outputs.index(copy.value))
            yield _alive(operation, kind, value.size_bytes, key)
    if schedule.order and (size_bytes := costs[schedule.order[position]].workspace_bytes):
        yield _alive(graph.operations[schedule.order[position]], WORKSPACE, size_bytes)
    last = {index: at for at, index in enumerate(schedule.order)}
    for index, first in sorted(schedule.first_runs().items()):
        operation = graph.operations[index]
        if operation.state_bytes and first < last[index] and first <= position <= last[index]:
            yield _alive(operation, RANDOM_STATE, operation.state_bytes)


def _alive(operation: Operation, kind: str, size_bytes: int, key: str = "") -> AliveTensors:
    """Describe a live output of an operation; of joined operations, of the one with this key."""
    module, target, source = operation.module, operation.target, operation.source
    if key and key != operation.key:
        module, target = named_by(key)
    return AliveTensors(count=1, size_bytes=size_bytes, kind=kind, operation=target, module=module, source=source)


def backward_begins(graph: TrainingGraph, schedule: Schedule) -> int:
    """Return the position where the backward begins, its recomputations included; past the end if there is none."""
    order = schedule.order
    positions = (at for at, index in enumerate(order) if graph.operations[index].phase is Phase.BACKWARD)
    return next(positions, len(order))


def call_memory(graph: TrainingGraph, schedule: Schedule, evaluation: Evaluation) -> CallMemory | None:
    """Return what a call holds before and after the loss; None of a step that has no loss."""
    if graph.loss_index not in schedule.order:
        return None
    last = {index: at for at, index in enumerate(schedule.order)}
    loss, others, saved = last[graph.loss_index], *([0] * (len(schedule.order) + 1) for _ in range(2))
    for value, born, died in lifetimes(graph, schedule):
        size_bytes, kind = graph.values[value].size_bytes, graph.values[value].kind
        if kind in ("output", "tangent"):  # what is kept of the last call, and what the loop holds of this one
            read = max((last[reader] for reader in graph.readers[value]), default=loss) if kind == "tangent" else loss
            others[min(read, died) + 1 if died >= loss else born] -= size_bytes
            others[died + 1] += size_bytes
        elif born < loss < died:
            saved[died + 1] += size_bytes
    held = [*map(add, evaluation.timeline_bytes, accumulate(others))]
    made_bytes = sum(graph.values[value].size_bytes for value in graph.operations[graph.loss_index].outputs)
    return CallMemory(
        forward_bytes=max(held[:loss], default=0),
        saved_bytes=held[loss] - made_bytes,
        backward_bytes=max(held[loss + 1 :], default=0),
        keeping_bytes=max([*map(add, held, accumulate(saved))][loss + 1 :], default=0),
    )


def joined(alive: Iterable[AliveTensors]) -> tuple[AliveTensors, ...]:
    """Merge rows of equal layers; the largest come first."""
    groups: defaultdict[tuple[str, str, str, str], list[AliveTensors]] = defaultdict(list)
    for one in alive:
        if one.size_bytes:
            groups[(one.kind, one.operation, re.sub(r"\d+", "#", one.module), one.source)].append(one)
    rows = [_sum(group, module=_joined([one.module for one in group])) for group in groups.values()]
    rows.sort(key=lambda row: -row.size_bytes)
    shown, rest = rows[:_MOST_ROWS], rows[_MOST_ROWS:]
    if rest:
        shown.append(_sum(rest, kind="", operation="", module="", source=""))
    return tuple(shown)


def _sum(alive: Sequence[AliveTensors], **called: str) -> AliveTensors:
    count, size_bytes = sum(one.count for one in alive), sum(one.size_bytes for one in alive)
    return replace(alive[0], count=count, size_bytes=size_bytes, **called)


def _joined(modules: list[str]) -> str:
    """Write paths that differ only in numbers as one.

    >>> _joined(["h.0.attn", "h.2.attn", "h.1.attn", "h.1.attn"])
    'h.0-2.attn'
    """
    parts = [re.split(r"(\d+)", module) for module in modules]
    joined = []
    for column in zip(*parts, strict=True):
        same = len(set(column)) == 1
        joined.append(column[0] if same else number_ranges(sorted({int(number) for number in column})))
    return "".join(joined)


def anatomy_of_peak(
    graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule, evaluation: Evaluation
) -> dict[str, int]:
    """Return the bytes alive at the peak, by kind; they add up to the peak of the whole device.

    Kinds are those of ``graph.static_bytes``; ``gradients``, ``outputs``, ``tangents``, ``autocast weight copies`` and
    ``other micro-batches``; ``saved activations`` (the forward's copies that the backward waits for), ``forward
    temporaries`` (its others), ``recomputed values``, ``fetched values``, ``gradient temporaries``, ``workspace`` and
    ``random state``.
    """
    alive: Counter[str] = Counter(graph.static_bytes)
    for made in alive_at(graph, costs, schedule, evaluation.peak_position):
        alive[made.kind] += made.size_bytes
    return {kind: size for kind, size in alive.items() if size}


def locate_peak(graph: TrainingGraph, schedule: Schedule, evaluation: Evaluation) -> PeakLocation:
    """Locate the operation that runs at the peak."""
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
    """Return the bytes of each layer's forward activations whose first copy lives into the backward."""
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
    """Return, by layer in forward order, bytes saved and freed, and the time that recompute adds.

    Freed bytes are those that the step without recompute saves and this schedule does not; they are negative where a
    boundary is held only to recompute from it.
    """
    unplanned = Schedule.keep_all(graph)
    before = saved_bytes_by_layer(graph, layers, unplanned)
    after = before if schedule == unplanned else saved_bytes_by_layer(graph, layers, schedule)
    offloaded: Counter[str] = Counter()
    for offload in schedule.offloads:
        offloaded[layers.of[graph.producer[offload.value]]] += graph.values[offload.value].size_bytes
    targets: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: defaultdict[str, float] = defaultdict(float)
    forward_seconds: defaultdict[str, float] = defaultdict(float)
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.FORWARD:
            forward_seconds[layers.of[index]] += costs[index].first_seconds
    first = schedule.first_runs()
    for position, index in enumerate(schedule.order):
        if position > first[index] and graph.operations[index].target not in BOOKKEEPING:
            targets[layers.of[index]].update(named_by(key)[1] for key in graph.operations[index].keys)
            seconds[layers.of[index]] += costs[index].seconds
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
