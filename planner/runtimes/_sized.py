"""Compiled code for each size of one graph that was captured with symbolic sizes.

The first sizes are specialized: numbers replace the symbols, as a capture at that size would have them. Once two of
them agree, in bytes and in code, on what sizes decide, one is the formula for all others: these are planned from
numbers alone, and reuse its code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from planner.capture.joint import JointGraph
from planner.capture.programs import Program
from planner.capture.symbolic import SizedFloat, SizedInt, Sizes, at_sizes
from planner.capture.torch_internals import boxed
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.session.sized import SizedStep, UnknownSizeError
from planner.session.step import PlannedStep

InputSizes = tuple[tuple[int, ...], ...]

ANY: InputSizes = ((-1,),)
"""Placeholder for unknown sizes."""

NEAR = 0.7
"""Share of a larger size's elements from which inputs reuse its plan: a search for each size would make training wait,
and with no plans of their own small sizes would recompute in vain."""


def sizes_of(tensors: Iterable[torch.Tensor]) -> InputSizes:
    """Return the sizes of inputs."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


def elements(sizes: InputSizes) -> float:
    """Return the total number of elements."""
    return math.inf if sizes == ANY else sum(map(math.prod, sizes))


@dataclass(frozen=True)
class SizedGraph:
    """A graph whose first input is a list of numbers that depend on sizes."""

    module: fx.GraphModule
    run: Callable[[list[Any]], Any]
    numbers: tuple[fx.Node, ...]
    """The nodes of the symbolic graph that compute these numbers."""

    @classmethod
    def of(cls, module: fx.GraphModule) -> SizedGraph:
        """Replace numbers that depend on sizes by items of an input list, in place."""
        graph = module.graph
        taken: dict[fx.Node, fx.Node] = {}
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            given = graph.placeholder("numbers_of_sizes")
        after = next((node for node in graph.nodes if node.op != "placeholder"), None)

        def replaced(number: Any) -> Any:
            if not isinstance(number, (SizedInt, SizedFloat)):
                return number
            if number.made_by not in taken:
                with graph.inserting_before(after):
                    taken[number.made_by] = made = graph.call_function(operator.getitem, (given, len(taken)))
                    made.meta["val"] = int(number) if isinstance(number, int) else float(number)
            return taken[number.made_by]

        for node in list(graph.nodes):
            if node.op in ("call_function", "output") and node.args[:1] != (given,):
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), replaced)
        return cls(module, boxed(module), tuple(taken))

    @property
    def text(self) -> str:
        """The graph's code, without the sizes."""
        return f"{self.numbers}\n{self.module.code}"

    def at(self, sizes: Sizes) -> Callable[[list[Any]], Any]:
        """Return what runs the graph at given sizes."""
        numbers = [sizes.number(node) for node in self.numbers]

        def run(arguments: list[Any]) -> Any:
            arguments.insert(0, numbers)
            return self.run(arguments)

        return run


Code = tuple[SizedGraph, SizedGraph]
"""Forward and backward graphs that serve many sizes."""


class SizedPrograms:
    """Programs of one symbolic joint graph; ``plan`` plans a specialized graph, ``follow`` a size by the formula.

    Every call enters its plan by what
    ``entering`` returns for it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Callable[[JointGraph], PlannedStep],
        follow: Callable[[SizedStep, Sequence[Any], Sizes], PlannedStep],
        entering: Callable[[Plan], Callable[[], bool | None]],
    ) -> None:
        self._model, self._plan, self._follow, self._entering = model, plan, follow, entering
        self._formula: SizedStep | None = None
        self._is_confirmed = False
        self._code: dict[Any, Code] = {}
        """Code of the formula, by schedule and by what is written over inputs."""

    def program(self, joint: JointGraph, given: Sequence[Any]) -> Program:
        """Return the program for these inputs."""
        sizes = Sizes(joint, given)
        planned = None
        if self._formula is not None and self._is_confirmed:
            with suppress(UnknownSizeError):
                planned = self._follow(self._formula, given, sizes)
        if planned is None:
            planned = self._plan(at_sizes(joint, given))
            code = self._confirmed(planned, given, sizes)
        else:
            assert self._formula is not None
            code = self._code_for(self._formula, planned)
        return _bound(code, self._entering(planned.plan), joint, given)

    def _confirmed(self, planned: PlannedStep, given: Sequence[Any], sizes: Sizes) -> Code:
        """Check the formula against a specialized step, or take that step as the formula; return its code."""
        step = SizedStep(self._model, planned.step, planned.study, sizes)
        code = _written(step, planned)
        if self._formula is not None and self._formula.agrees(step, given):
            same = self._code_for(self._formula, planned)
            if [half.text for half in same] == [half.text for half in code]:
                self._is_confirmed = True
                return same
        if not self._is_confirmed:
            self._formula, self._code = step, {_run_by(planned): code}
        return code

    def _code_for(self, formula: SizedStep, planned: PlannedStep) -> Code:
        run = _run_by(planned)
        if run not in self._code:
            self._code[run] = _written(formula, planned)
        return self._code[run]


def _bound(code: Code, enter: Callable[[], bool | None], joint: JointGraph, given: Sequence[Any]) -> Program:
    """Return code bound to the numbers of one size."""
    sizes = Sizes(joint, given)
    forward, backward = (half.at(sizes) for half in code)
    return Program(forward, backward, enter, partial(_bound, code, enter, joint))


def _run_by(planned: PlannedStep) -> Any:
    return planned.schedule, tuple(sorted(planned.over.items()))


def _written(step: SizedStep, planned: PlannedStep) -> Code:
    forward, backward = extract_fwd_bwd(step.step.lowered, planned.schedule, planned.over)
    return SizedGraph.of(forward), SizedGraph.of(backward)
