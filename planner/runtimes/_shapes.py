"""Plans by input sizes: which one is reused for new sizes, and which dimensions are dynamic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from planner.capture.inputs import Inputs, Varying, varying_dimensions
from planner.capture.torch_internals import dynamic_dimensions, is_marked_dynamic
from planner.plans.plan import Plan
from planner.plans.reuse import in_vain_seconds, is_reused

InputSizes = tuple[tuple[int, ...], ...]

_ANY: InputSizes = ((-1,),)
"""Placeholder for unknown sizes."""

_SECONDS_OF_AN_OPERATION = 1e-3
"""Rough time to plan again and write code, per operation of the step: 0.3 s for a Llama of twelve layers on one core
(``benchmarks.sizes``), and a search may take as long."""


class PlansBySize:
    """The plans of one wrapped model, by the input sizes that they were solved for.

    A plan that keeps the budget for large inputs nearly always keeps it for smaller ones. So new sizes first try the
    plan of the nearest larger sizes (by number of elements): of the plans that fit, it recomputes least. A given plan,
    whose sizes are unknown, is tried if there is no larger one.

    Smaller inputs have room for some values that such a plan recomputes. The seconds that this wastes are added up.
    Once they reach the time that planning takes, the sizes at hand get a plan of their own, which smaller ones reuse.
    This is the ski-rental rule, within a factor of two of the best in hindsight (Karlin, Manasse, Rudolph and Sleator,
    Algorithmica 3, 1988).
    """

    def __init__(self, given: Plan | None = None, *, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        """Whether smaller sizes must run the given plan too."""
        self._plans: dict[InputSizes, Plan] = {_ANY: given} if given is not None else {}
        self._offered: dict[InputSizes, InputSizes | None] = {}
        """For each seen size, the size whose plan it was offered."""
        self._in_vain_seconds = 0.0
        self.largest: float = math.inf if given is not None else 0
        """The largest number of elements that there is a plan for."""

    def nearest(self, sizes: InputSizes) -> Plan | None:
        """Return the plan of the nearest size that is not smaller, else of the largest."""
        nearest = self._nearest(sizes)
        return None if nearest is None else self._plans[nearest]

    def _nearest(self, sizes: InputSizes) -> InputSizes | None:
        if sizes in self._plans:
            return sizes
        least = elements(sizes)
        above = [known for known in reversed(self._plans) if elements(known) >= least]
        return min(above, key=elements) if above else max(self._plans, key=elements, default=None)

    def add(self, sizes: InputSizes, plan: Plan, *, is_settled: bool = False) -> None:
        """Store a plan that was solved for these sizes, or is settled for them."""
        self._offered[sizes] = self._nearest(sizes)
        self.largest = max(self.largest, elements(sizes))
        if is_settled or not is_reused(plan):
            self._plans[sizes] = plan

    def paid(self, plan: Plan) -> None:
        """Add the seconds that a call under this plan wastes."""
        self._in_vain_seconds += in_vain_seconds(plan)

    def may_be_better(self, sizes: InputSizes, plan: Plan) -> bool:
        """Whether to replan these sizes: a nearer plan came since, or wasted time reached that of planning."""
        if sizes in self._plans or not in_vain_seconds(plan):
            return False
        return self._offered.get(sizes) != self._nearest(sizes) or self.is_due(plan)

    def is_due(self, plan: Plan) -> bool:
        """Whether a reused plan wastes time, and the total wasted so far reached the time of planning."""
        if self._is_kept or not in_vain_seconds(plan):
            return False
        return self._in_vain_seconds >= planning_seconds(plan)

    def looked(self) -> None:
        """Reset the wasted seconds."""
        self._in_vain_seconds = 0.0


def sizes_of(tensors: Iterable[torch.Tensor]) -> InputSizes:
    """Return the sizes of inputs."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


@lru_cache(maxsize=4096)
def elements(sizes: InputSizes) -> float:
    """Return the total number of elements."""
    return math.inf if sizes == _ANY else sum(map(math.prod, sizes))


def planning_seconds(plan: Plan) -> float:
    """Estimate the time to plan a step again and write its code; the same on every machine."""
    return _SECONDS_OF_AN_OPERATION * len(plan.operations)


class CallsSeen:
    """Earlier captured calls: a dimension seen in two sizes is captured as a symbol from then on."""

    def __init__(self) -> None:
        self._sizes: list[list[torch.Size]] = []
        """Sizes of calls that ran; a call that failed does not count."""
        self._others: list[dict[str, Any]] = []

    def ran(self, inputs: Inputs) -> None:
        """Remember the sizes of a call that ran."""
        sizes = [tensor.shape for tensor in inputs.tensors()]
        if sizes not in self._sizes:
            self._sizes.append(sizes)

    def changed(self, inputs: Inputs) -> str:
        """Describe the non-tensor arguments that differ from the last call's; ``""`` if none does."""
        now, before = _others(inputs), self._others[0] if len(self._others) > 1 else {}
        changed = [f"{name} is {now[name]!r} and was {old!r}" for name, old in before.items() if now.get(name) != old]
        return "; ".join(changed)

    def varying(self, inputs: Inputs) -> list[Varying]:
        """Return the inputs with varying or marked dimensions, and remember the non-tensor arguments."""
        found = varying_dimensions(inputs, self._sizes)
        self._others = [*self._others[-1:], _others(inputs)]
        return [*found, *((tensor, dynamic_dimensions(tensor)) for tensor in marked(inputs))]


def _others(inputs: Inputs) -> dict[str, Any]:
    """Return arguments that are plain numbers or strings, by the names that errors give them."""
    named = {**{f"argument {at}": x for at, x in enumerate(inputs.args)}, **inputs.kwargs}
    return {name: x for name, x in named.items() if isinstance(x, (bool, int, float, complex, str))}


def marked(inputs: Inputs) -> list[torch.Tensor]:
    """Return the inputs marked by ``mark_dynamic`` or a relative of it."""
    return [tensor for tensor in inputs.tensors() if is_marked_dynamic(tensor)]
