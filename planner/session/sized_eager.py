"""What eager's own step needs at sizes at which it was never recorded, from recordings at others.

Percentages are of eager's peak, and recording a step takes a second or more: in a training loop of many sizes that
would be paid at each size that is larger than all before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.analysis.eager_baseline import eager_step
from planner.analysis.study import Study
from planner.capture.symbolic import Sizes
from planner.common.units import round_up
from planner.ir.resized import resized, scaled
from planner.plans.plan import EagerStep

_Seen = tuple[int, ...]
"""The bytes of one thing in every recording."""


@dataclass(frozen=True, eq=False)
class RecordedAt:
    """Eager's step, and the sizes at which it was recorded."""

    step: Study
    sizes: Sizes
    workspaces_bytes: Sequence[int]
    """What each kernel of the captured step needs at these sizes: eager runs most of them too."""


class SizedEager:
    """Recordings of one step, and the expressions in symbols that bytes of its values may be.

    An expression stands for some bytes if it says those of all recordings, and a kernel of the captured step for the
    workspace of one of eager's likewise. Where several do, they must say the same of the size that is asked about;
    otherwise one more recording tells them apart.
    """

    def __init__(self, expressions: Collection[Any]) -> None:
        self._expressions = expressions
        self._recorded: list[RecordedAt] = []

    def learn(self, recorded: RecordedAt) -> None:
        """Take a recording into account; one that ran other operations begins anew."""
        if self._recorded and _shape(recorded.step) != _shape(self._recorded[0].step):
            self._recorded = []
        self._recorded.append(recorded)

    def at(self, sizes: Sizes, inputs_bytes: int, workspaces_bytes: Sequence[int]) -> EagerStep | None:
        """Return what the step needs at these sizes, or None if no formula says it.

        Inputs then have so many bytes, and the kernels of the captured step such workspaces.
        """
        if len(self._recorded) < 2:
            return None
        steps = [recorded.step for recorded in self._recorded]
        values_bytes = _all(
            zip(*([value.size_bytes for value in step.graph.values] for step in steps), strict=True),
            self._by_expressions(sizes),
        )
        workspaces = _all(
            zip(*([cost.workspace_bytes for cost in step.costs] for step in steps), strict=True),
            self._by_kernels(workspaces_bytes),
        )
        if values_bytes is None or workspaces is None:
            return None
        step = steps[0]
        graph = resized(step.graph, values_bytes, {**step.graph.static_bytes, "inputs": inputs_bytes})
        return eager_step(replace(step, graph=graph, costs=scaled(step.costs, step.graph, graph, workspaces)))

    def _by_expressions(self, sizes: Sizes) -> Callable[[_Seen], set[int]]:
        alignment_bytes = self._recorded[0].step.graph.alignment_bytes
        now: dict[_Seen, set[int]] = defaultdict(set)
        for expression in self._expressions:
            *then, here = (
                round_up(known.of(expression), alignment_bytes)
                for known in (*(recorded.sizes for recorded in self._recorded), sizes)
            )
            now[tuple(then)].add(here)
        return lambda seen: now[seen]

    def _by_kernels(self, workspaces_bytes: Sequence[int]) -> Callable[[_Seen], set[int]]:
        now: dict[_Seen, set[int]] = defaultdict(set)
        then: Iterator[_Seen] = zip(*(recorded.workspaces_bytes for recorded in self._recorded), strict=True)
        for seen, here in zip(then, workspaces_bytes, strict=True):
            now[seen].add(here)
        return lambda seen: now[seen]


def _all(things: Iterable[_Seen], said_of: Callable[[_Seen], set[int]]) -> list[int] | None:
    """Return what becomes of each thing's bytes, if all that is said of it is one and the same.

    What nothing is said of stays as it is.
    """
    known: dict[_Seen, int] = {}
    found = []
    for seen in things:
        if seen not in known:
            said = said_of(seen) or set(seen)
            if len(said) != 1:
                return None
            known[seen] = said.pop()
        found.append(known[seen])
    return found


def _shape(step: Study) -> Any:
    """Return all of a step but its bytes and seconds."""
    return [(o.key, o.inputs, o.outputs, o.then) for o in step.graph.operations], step.graph.producer
