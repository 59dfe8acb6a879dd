"""Studies of a program that was captured with symbols: what two sizes agree on gives those of all others.

Made plain, a step has every operator run once more on fake tensors, and is lowered anew. Here bytes follow from sizes,
and each call that is unlike the others is asked once for its arithmetic, its traffic and its workspace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from cost_models.flops import count_flops, moved_bytes
from planner.analysis.study import Study
from planner.capture import operands
from planner.capture.expressions import expression_of
from planner.capture.joint import JointGraph, values_of
from planner.capture.lowering import LoweredGraph
from planner.capture.symbolic import SYMBOLIC_VALUE, SizedFloat, SizedInt, Sizes
from planner.session.sized import SizedStep
from planner.session.sized_calls import SizedCalls, UnknownSizeError
from planner.session.step import LoweredStep, Options, study_lowered

Program = tuple[JointGraph, Sequence[Any]]
"""A joint graph with symbols, and what it is given."""


@dataclass(frozen=True, eq=False)
class _Formula:
    step: SizedStep
    calls: _Calls


class SizedStudies:
    """Studies at sizes of one captured program; no plan of an earlier step, and no loss outside, is a part of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._formula: _Formula | None = None
        self._is_confirmed = False

    def at(self, joint: JointGraph, given: Sequence[Any], options: Options) -> Study | None:
        """Return the study for what the program is given; None if no formula is known that holds for it."""
        return self._by_formula(joint, given, options) if self._is_confirmed else None

    def learn(self, joint: JointGraph, given: Sequence[Any], step: LoweredStep, study: Study, options: Options) -> None:
        """Hold the formula against a step that was made plain, or take that one in its place."""
        if self._is_confirmed:
            return
        found = self._by_formula(joint, given, options)
        self._is_confirmed = found is not None and _said_by(found) == _said_by(study)
        if not self._is_confirmed:
            self._formula = self._formula_of(SizedStep(self._model, step, study, Sizes(joint, given)))

    def _formula_of(self, step: SizedStep) -> _Formula | None:
        try:
            return _Formula(step, _Calls(step.step.lowered, step.sizes))
        except UnknownSizeError:
            return None

    def _by_formula(self, joint: JointGraph, given: Sequence[Any], options: Options) -> Study | None:
        if self._formula is None:
            return None
        try:
            sizes = Sizes(joint, given)
            step = self._formula.step.lowered_at(given, sizes)
            step = replace(step, lowered=self._formula.calls.at(step.lowered, sizes), capture_seconds=0.0)
        except UnknownSizeError:
            return None
        return study_lowered(self._model, step, options)


def _said_by(study: Study) -> Any:
    """Return what a study says of a step; names of nodes are those of either graph."""
    operations = [replace(operation, name="") for operation in study.graph.operations]
    values = [replace(value, name="") for value in study.graph.values]
    return operations, values, study.graph.static_bytes, study.graph.runs_after, study.costs, study.static_memory


class _Calls:
    """The calls of a lowered step that differ, at any sizes; UnknownSizeError if some do not follow from sizes."""

    def __init__(self, lowered: LoweredGraph, known: Sizes) -> None:
        first: dict[Any, int] = {}
        nodes: list[fx.Node] = []
        self._of: list[int | None] = []
        """For each operation the call that it is."""
        for node in lowered.operation_nodes:
            if node is None:
                self._of.append(None)
                continue
            key = operands.signature(node), tuple(_expressions(node))
            if key not in first:
                first[key] = len(nodes)
                nodes.append(node)
            self._of.append(first[key])
        self._calls = SizedCalls(nodes, known)

    def at(self, lowered: LoweredGraph, sizes: Sizes) -> LoweredGraph:
        """Return a graph whose operations do and move what they do at some sizes."""
        nodes = [*self._calls.at(sizes)]
        facts = [_facts(node) for node in nodes]
        operations = tuple(
            operation if at is None else replace(operation, **facts[at])
            for operation, at in zip(lowered.graph.operations, self._of, strict=True)
        )
        return replace(
            lowered,
            graph=replace(lowered.graph, operations=operations),
            operation_nodes=[None if at is None else nodes[at] for at in self._of],
        )


def _facts(node: fx.Node) -> dict[str, Any]:
    """Return what lowering says of a call: what it does and moves, and what it is."""
    called = (node.target, *values_of((node.args, node.kwargs)), node.meta["val"])
    return {"flops": count_flops(*called), "moved_bytes": moved_bytes(*called), **operands.described(node)}


def _expressions(node: fx.Node) -> Iterator[Any]:
    """Return, in symbols, the sizes of what a call reads and makes, and its numbers."""
    for one in (*node.all_input_nodes, node):
        for leaf in tree_leaves(one.meta.get(SYMBOLIC_VALUE)):
            if isinstance(leaf, Tensor):
                yield from map(expression_of, (*leaf.shape, *leaf.stride(), leaf.storage_offset()))
    for argument in tree_leaves((node.args, node.kwargs)):
        if isinstance(argument, (SizedInt, SizedFloat)):
            yield expression_of(argument.made_by.meta["val"])
