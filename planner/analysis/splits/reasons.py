"""Why splits of one shape are not among the best: by how much they do not fit, or what they lose their time with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from planner.analysis.splits.types import Estimate, Lost, Shape, described
from planner.common.units import format_bytes

if TYPE_CHECKING:
    from planner.analysis.splits.estimate import Estimator
    from planner.analysis.splits.search import ShapeFound

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
