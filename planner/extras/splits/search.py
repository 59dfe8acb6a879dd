"""The best splits of a model: all are bounded, in the order of their bounds they are estimated, until none can win."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.common.limits import Progress
from planner.common.options import ENGINES
from planner.common.units import format_bytes
from planner.errors import UsageError
from planner.extras.splits.estimate import Estimator
from planner.extras.splits.stages import can_cut
from planner.extras.splits.table import ModelTable, divisors
from planner.extras.splits.types import (
    DIGITS,
    REPLICATED,
    SHARDINGS,
    Answer,
    Estimate,
    Lost,
    NoSplitFitsError,
    Question,
    Shape,
    Split,
    described,
)

_MOST_CHUNKS = 8


def shapes(table: ModelTable, question: Question) -> Iterator[Shape]:
    """Return all degrees that go together: data, tensor, pipeline, context, expert.

    Together they use all devices; layers and the global batch can be divided so. Devices that share layers are of one
    node: their sums cannot hide.
    """
    gpus, row = question.gpus, len(table.row)
    contexts = divisors(gpus) if table.splits_sequences else (1,)
    for tensor in divisors(gpus):
        if tensor not in table.tensor_degrees or tensor > question.links.node_devices:
            continue
        for pipeline in divisors(gpus // tensor):
            if not can_cut(row, pipeline):
                continue
            for context in contexts:
                rest, left = divmod(gpus // tensor // pipeline, context)
                # Each device has a piece of the sequence's start and one of its end, so that all are equally busy.
                if left or table.tokens % (2 * context * tensor) * (context > 1):
                    continue
                if table.tokens % tensor * (table.tokens > 1) or question.global_batch % rest:
                    continue
                for expert in divisors(table.experts):
                    if (rest * context) % expert == 0:
                        yield rest, tensor, pipeline, context, expert


def splits_of(shape: Shape, table: ModelTable, question: Question) -> Iterator[Split]:
    """Return all splits of one shape for the engines that are asked about."""
    for micro_batch, chunks in placements(shape, table, question):
        yield from variants(shape, micro_batch, chunks, question.engines)


def placements(shape: Shape, table: ModelTable, question: Question) -> Iterator[tuple[int, int]]:
    """Return the sizes of a micro-batch, and the numbers of chunks, that go with a shape."""
    data, _, pipeline, *_ = shape
    samples, layers = question.global_batch // data, len(table.row)
    for micro_batch in divisors(samples):
        for chunks in range(1, (_MOST_CHUNKS if pipeline > 1 else 1) + 1):
            in_groups = chunks == 1 or (samples // micro_batch) % pipeline == 0
            if in_groups and can_cut(layers, pipeline * chunks):
                yield micro_batch, chunks


def variants(shape: Shape, micro_batch: int, chunks: int, engines: tuple[str, ...]) -> Iterator[Split]:
    """Return what engines can make of the same degrees: how weights are spread over replicas."""
    data, tensor, pipeline, context, expert = shape
    for engine in engines:
        for sharding in SHARDINGS[engine]:
            if data * context == 1 and sharding != REPLICATED:
                continue
            # torchtitan replicates only where nothing else is split; what shares experts is sharded in both engines.
            is_alone = tensor * pipeline * context * expert == 1
            if engine == "torchtitan" and sharding == REPLICATED and data * context > 1 and not is_alone:
                continue
            yield Split(data, tensor, pipeline, context, expert, micro_batch, chunks, sharding, engine)


@dataclass
class ShapeFound:
    """What a search knows of one shape."""

    bound: tuple[float, Split] | None = None
    """The lowest bound of what was not estimated, and whose it is."""
    best: Estimate | None = None
    lowest: Estimate | None = None
    """The smallest peak of what does not fit."""
    state: tuple[int, Split] | None = None
    """The smallest state alone that does not fit, and whose it is."""


@dataclass
class _Search:
    table: ModelTable
    question: Question
    estimator: Estimator
    found: dict[Shape, ShapeFound] = field(default_factory=dict)
    best: list[Estimate] = field(default_factory=list)
    of_engine: dict[str, Estimate] = field(default_factory=dict)
    considered: int = 0
    estimated: int = 0

    def run(self) -> None:
        waiting = []
        for shape in shapes(self.table, self.question):
            self.found[shape] = ShapeFound()
            for micro_batch, chunks in placements(shape, self.table, self.question):
                ways = self._within_state(list(variants(shape, micro_batch, chunks, self.question.engines)))
                if ways:
                    waiting.append((self.estimator.lower_bound_seconds(ways[0]), ways))
        heapq.heapify(waiting)
        while waiting:
            bound_seconds, ways = heapq.heappop(waiting)
            open_engines = [way for way in ways if bound_seconds <= self._enough(way.engine)]
            for way in open_engines:
                self._estimate(way)
            if len(open_engines) < len(ways):
                self._pass_over(bound_seconds, ways[0])

    def _within_state(self, ways: list[Split]) -> list[Split]:
        """Return the splits whose state alone leaves room."""
        self.considered += len(ways)
        left = []
        for way in ways:
            state_bytes = self.estimator.state_bytes(way)
            if state_bytes < self.question.memory_bytes:
                left.append(way)
                continue
            known = self.found[way.shape]
            if known.state is None or state_bytes < known.state[0]:
                known.state = state_bytes, way
        return left

    def _enough(self, engine: str) -> float:
        """Return the time above which a split is neither among the best nor the best of its engine."""
        if len(self.best) < self.question.most or engine not in self.of_engine:
            return float("inf")
        slowest = max(self.best[-1].step_seconds, self.of_engine[engine].step_seconds)
        return slowest * (1 + 10.0 ** (1 - DIGITS))

    def _estimate(self, way: Split) -> None:
        made = self.estimator.estimate(way)
        self.estimated += 1
        known = self.found[way.shape]
        if not made.fits:
            if known.lowest is None or made.peak_bytes < known.lowest.peak_bytes:
                known.lowest = made
            return
        if known.best is None or made.key < known.best.key:
            known.best = made
        if way.engine not in self.of_engine or made.key < self.of_engine[way.engine].key:
            self.of_engine[way.engine] = made
        self.best = sorted([*self.best, made], key=lambda one: one.key)[: self.question.most]

    def _pass_over(self, bound_seconds: float, way: Split) -> None:
        known = self.found[way.shape]
        if known.bound is None or bound_seconds < known.bound[0]:
            known.bound = bound_seconds, way

    def lowest(self) -> Estimate:
        """Return the split with the smallest peak, of all."""
        ways = (way for shape in self.found for way in splits_of(shape, self.table, self.question))
        return min(map(self.estimator.estimate, ways), key=lambda one: (one.peak_bytes, one.key))


def search(table: ModelTable, question: Question, progress: Progress | None = None) -> Answer:
    """Find the best splits of a model.

    The search is exact over what :func:`shapes` and :func:`splits_of` give: a split is passed over only if its state
    alone is too large, or if a time that it cannot be below is above that of the last answer.

    Raises
    ------
    UsageError
        If no degrees go together.
    NoSplitFitsError
        If nothing fits, with the smallest peak of all splits, and of which it is.
    """
    began = time.perf_counter()
    looking = _Search(table, question, Estimator(table, question))
    if progress is not None:
        progress(f"looking for the best split over {question.gpus} devices")
    looking.run()
    if not looking.considered:
        raise UsageError(
            f"no degrees go together: {question.gpus} GPUs, a global batch of {question.global_batch} and "
            f"{len(table.row)} layers; take a batch that the number of GPUs divides"
        )
    if not looking.best:
        raise NoSplitFitsError(looking.lowest(), question.memory_bytes)
    lost = why_lost(looking.found, looking.best, looking.estimator)
    return Answer(
        model=table.name,
        question=question,
        best=tuple(looking.best),
        of_engine={engine: looking.of_engine[engine] for engine in ENGINES if engine in looking.of_engine},
        lost=lost,
        considered=looking.considered,
        estimated=looking.estimated,
        assumed=table.assumed,
        seconds=time.perf_counter() - began,
    )


_WORDS = {
    "compute": "arithmetic on small pieces or an uneven cut",
    "recompute": "recompute",
    "bubble": "the pipeline's bubble",
    "tensor": "sums between devices that share layers",
    "context": "waiting for keys and values",
    "expert": "sending tokens to experts",
    "data": "waiting for other replicas",
    "pipeline": "sending between stages",
    "optimizer": "the optimizer's step",
}


def why_lost(found: Mapping[Shape, ShapeFound], best: Sequence[Estimate], estimator: Estimator) -> tuple[Lost, ...]:
    """Say of each shape that is not among the best why it is not, the nearest first."""
    winners = {one.split.shape for one in best}
    lost = [_lost(known, best[0], estimator) for shape, known in found.items() if shape not in winners]
    known = [one for one in lost if one is not None]
    return tuple(sorted(known, key=lambda one: (one.slower is None, one.slower or 0.0, one.missing_bytes or 0)))


def _lost(known: ShapeFound, winner: Estimate, estimator: Estimator) -> Lost | None:
    bound, made = known.bound, known.best
    if made is not None and (bound is None or made.step_seconds <= bound[0]):
        slower = made.step_seconds / winner.step_seconds - 1
        return Lost(shape=made.split.shape, reason=_slower(made.seconds, winner), slower=slower)
    if bound is not None:
        parts = estimator.bound_parts(bound[1])
        slower = bound[0] / winner.step_seconds - 1
        return Lost(shape=bound[1].shape, reason=_slower(parts, winner), slower=slower, is_bound=True)
    if known.lowest is None and known.state is None:
        return None
    lowest = known.lowest
    if lowest is None:
        assert known.state is not None
        state_bytes, split = known.state
        missing = state_bytes - estimator.question.memory_bytes
        reason = f"parameters, gradients and optimizer alone take {format_bytes(state_bytes)} ({described(split)})"
        return Lost(shape=split.shape, reason=reason, missing_bytes=missing)
    missing = lowest.peak_bytes - estimator.question.memory_bytes
    kind, size_bytes = max(lowest.memory.items(), key=lambda item: item[1])
    reason = f"needs {format_bytes(lowest.peak_bytes)}, most of it {kind} ({format_bytes(size_bytes)})"
    return Lost(shape=lowest.split.shape, reason=reason, missing_bytes=missing)


def _slower(parts: Mapping[str, float], winner: Estimate) -> str:
    """Name what costs most more than it costs the winner, as a share of the winner's step."""
    told = list(_more(parts, winner))
    return ", ".join(told[:2]) if told else "as fast, but with more memory or later in order"


def _more(parts: Mapping[str, float], winner: Estimate) -> Iterator[str]:
    more = {name: seconds - winner.seconds.get(name, 0.0) for name, seconds in parts.items()}
    for name, seconds in sorted(more.items(), key=lambda item: -item[1]):
        share = seconds / winner.step_seconds
        if share >= 0.001:
            yield f"{_WORDS[name]} +{share:.1%}"
