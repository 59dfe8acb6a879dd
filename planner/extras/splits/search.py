"""The best splits of a model: all that go together are estimated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from planner.common.limits import Progress
from planner.common.units import format_bytes
from planner.errors import UsageError
from planner.extras.splits.estimate import Estimator
from planner.extras.splits.stages import can_cut
from planner.extras.splits.table import ModelTable, divisors
from planner.extras.splits.types import (
    PARTS,
    REPLICATED,
    SHARDINGS,
    Answer,
    Estimate,
    Lost,
    NoSplitFitsError,
    Question,
    Shape,
    Split,
)

_MOST_CHUNKS = 8


def shapes(table: ModelTable, question: Question) -> Iterator[Shape]:
    """Return all degrees that go together.

    Together they use all devices; layers and the global batch can be divided so. Devices that share layers are of one
    node: their sums cannot hide.
    """
    gpus, tokens = question.gpus, table.tokens
    for tensor in divisors(gpus):
        if tensor not in table.tensor_degrees or tensor > question.links.node_devices:
            continue
        if tokens > 1 and tokens % tensor:
            continue
        for pipeline in divisors(gpus // tensor):
            data = gpus // tensor // pipeline
            if question.global_batch % data == 0 and can_cut(len(table.row), pipeline):
                yield Shape(data, tensor, pipeline)


def splits_of(shape: Shape, table: ModelTable, question: Question) -> Iterator[Split]:
    """Return all splits of one shape: sizes of a micro-batch, numbers of chunks, and what the engines make of them."""
    samples = question.global_batch // shape.data
    for micro_batch in divisors(samples):
        for chunks in range(1, (_MOST_CHUNKS if shape.pipeline > 1 else 1) + 1):
            in_groups = chunks == 1 or (samples // micro_batch) % shape.pipeline == 0
            if in_groups and can_cut(len(table.row), shape.pipeline * chunks):
                for engine in question.engines:
                    for sharding in _shardings(shape, engine):
                        yield Split(*shape, micro_batch, chunks, sharding, engine)


def _shardings(shape: Shape, engine: str) -> Iterator[str]:
    """Return how an engine can spread weights over replicas.

    torchtitan replicates only where nothing else is split.
    """
    if shape.data == 1:
        yield REPLICATED
        return
    is_alone = shape.tensor * shape.pipeline == 1
    for sharding in SHARDINGS[engine]:
        if sharding != REPLICATED or engine != "torchtitan" or is_alone:
            yield sharding


def search(table: ModelTable, question: Question, progress: Progress | None = None) -> Answer:
    """Find the best splits of a model, of all that :func:`shapes` and :func:`splits_of` give.

    Raises
    ------
    UsageError
        If no degrees go together.
    NoSplitFitsError
        If nothing fits, with the smallest peak of all splits, and of which it is.
    """
    began = time.perf_counter()
    if progress is not None:
        progress(f"looking for the best split over {question.gpus} devices")
    estimate = Estimator(table, question).estimate
    of_shape = {
        shape: [estimate(split) for split in splits_of(shape, table, question)] for shape in shapes(table, question)
    }
    every = [one for found in of_shape.values() for one in found]
    if not every:
        raise UsageError(
            f"no degrees go together: {question.gpus} GPUs, a global batch of {question.global_batch} and "
            f"{len(table.row)} layers; take a batch that the number of GPUs divides"
        )
    fitting = sorted((one for one in every if one.fits), key=lambda one: one.key)
    if not fitting:
        raise NoSplitFitsError(min(every, key=lambda one: (one.peak_bytes, one.key)), question.memory_bytes)
    best = fitting[: question.most]
    winners = {one.split.shape for one in best}
    lost = [_lost(found, best[0], question) for shape, found in of_shape.items() if shape not in winners]
    of_engine = {one.split.engine: one for one in reversed(fitting)}
    return Answer(
        model=table.name,
        question=question,
        best=tuple(best),
        of_engine=of_engine,
        lost=tuple(sorted(lost, key=lambda one: (one.slower is None, one.slower or 0.0, one.missing_bytes or 0))),
        considered=len(every),
        assumed=table.assumed,
        seconds=time.perf_counter() - began,
    )


def _lost(found: Sequence[Estimate], winner: Estimate, question: Question) -> Lost:
    """Say of a shape that is not among the best why it is not: of its best split, or of its smallest."""
    best = min((one for one in found if one.fits), key=lambda one: one.key, default=None)
    if best is not None:
        slower = best.step_seconds / winner.step_seconds - 1
        return Lost(shape=best.split.shape, reason=_slower(best, winner), slower=slower)
    lowest = min(found, key=lambda one: one.peak_bytes)
    kind, size_bytes = max(lowest.memory_bytes.items(), key=lambda item: item[1])
    return Lost(
        shape=lowest.split.shape,
        reason=f"needs {format_bytes(lowest.peak_bytes)}, most of it {kind} ({format_bytes(size_bytes)})",
        missing_bytes=lowest.peak_bytes - question.memory_bytes,
    )


def _slower(one: Estimate, winner: Estimate) -> str:
    """Name what costs most more than it costs the winner, as a share of the winner's step."""
    more = {name: (one.seconds[name] - seconds) / winner.step_seconds for name, seconds in winner.seconds.items()}
    dearest = sorted(more, key=lambda name: -more[name])[:2]
    told = [f"{PARTS[name]} +{more[name]:.1%}" for name in dearest if more[name] >= 0.001]
    return ", ".join(told) or "as fast, but with more memory or later in order"
