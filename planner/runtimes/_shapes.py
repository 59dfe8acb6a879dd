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
"""Stands for sizes that are not known."""

_SECONDS_OF_AN_OPERATION = 1e-3
"""What planning anew and writing the code takes for each operation of the step, roughly: 0.3 s for a Llama of twelve
layers on one core (``benchmarks.sizes``), and a search may take as much again."""


class PlansBySize:
    """The plans of one wrapped model, by the sizes of the inputs that they were solved for.

    What keeps the budget for large inputs nearly always does for smaller ones, so the plan of the nearest larger sizes
    is the one to try first: it fits, and recomputes least of those that do. How large inputs are is how many elements
    they have. A plan that was given, for sizes that are not known, is tried where there is none from above.

    Smaller sizes have room for some of what that plan recomputes. What calls pay in vain is added up. Once it is as
    much as planning takes, the sizes at hand get a plan of their own, which smaller ones take over in turn. As with
    skis that are rented until as much was paid as a pair costs, that is never far from the best that could have been
    done (Karlin, Manasse, Rudolph and Sleator, Algorithmica 3, 1988).
    """

    def __init__(self, given: Plan | None = None, *, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        """Whether the plan that was given is what smaller sizes run, too."""
        self._plans: dict[InputSizes, Plan] = {_ANY: given} if given is not None else {}
        self._offered: dict[InputSizes, InputSizes | None] = {}
        """For sizes that came, those whose plan was offered to them."""
        self._in_vain_seconds = 0.0
        self.largest: float = math.inf if given is not None else 0
        """The most elements that there is a plan for."""

    def nearest(self, sizes: InputSizes) -> Plan | None:
        """Return the plan of the nearest sizes that are not smaller, else that of the largest."""
        nearest = self._nearest(sizes)
        return None if nearest is None else self._plans[nearest]

    def _nearest(self, sizes: InputSizes) -> InputSizes | None:
        if sizes in self._plans:
            return sizes
        least = elements(sizes)
        above = [known for known in reversed(self._plans) if elements(known) >= least]
        return min(above, key=elements) if above else max(self._plans, key=elements, default=None)

    def add(self, sizes: InputSizes, plan: Plan, *, is_settled: bool = False) -> None:
        """Remember a plan that was solved for such sizes, or that nothing better is looked for."""
        self._offered[sizes] = self._nearest(sizes)
        self.largest = max(self.largest, elements(sizes))
        if is_settled or not is_reused(plan):
            self._plans[sizes] = plan

    def paid(self, plan: Plan) -> None:
        """Count a call that runs a plan."""
        self._in_vain_seconds += in_vain_seconds(plan)

    def may_be_better(self, sizes: InputSizes, plan: Plan) -> bool:
        """Whether to look again at a plan that was taken over: since then there is a nearer one, or planning is due."""
        if sizes in self._plans or not in_vain_seconds(plan):
            return False
        return self._offered.get(sizes) != self._nearest(sizes) or self.is_due(plan)

    def is_due(self, plan: Plan) -> bool:
        """Whether a plan that was taken over pays in vain, and all that did so far paid as much as planning takes."""
        if self._is_kept or not in_vain_seconds(plan):
            return False
        return self._in_vain_seconds >= planning_seconds(plan)

    def looked(self) -> None:
        """Begin to count anew."""
        self._in_vain_seconds = 0.0


def sizes_of(tensors: Iterable[torch.Tensor]) -> InputSizes:
    """Return the sizes of inputs."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


@lru_cache(maxsize=4096)
def elements(sizes: InputSizes) -> float:
    """Return how many elements inputs have."""
    return math.inf if sizes == _ANY else sum(map(math.prod, sizes))


def planning_seconds(plan: Plan) -> float:
    """Estimate how long it takes to plan a step anew and to write its code; the same on every machine."""
    return _SECONDS_OF_AN_OPERATION * len(plan.operations)


class CallsSeen:
    """Earlier calls that were captured: a dimension that was of two sizes is captured as a symbol from then on."""

    def __init__(self) -> None:
        self._sizes: list[list[torch.Size]] = []
        """Of calls that ran: what failed says nothing of the sizes to come."""
        self._others: list[dict[str, Any]] = []

    def ran(self, inputs: Inputs) -> None:
        """Remember the sizes of a call that ran."""
        sizes = [tensor.shape for tensor in inputs.tensors()]
        if sizes not in self._sizes:
            self._sizes.append(sizes)

    def changed(self, inputs: Inputs) -> str:
        """Name the arguments that are no tensors and differ from those of the last call; ``""`` if none does."""
        now, before = _others(inputs), self._others[0] if len(self._others) > 1 else {}
        changed = [f"{name} is {now[name]!r} and was {old!r}" for name, old in before.items() if now.get(name) != old]
        return "; ".join(changed)

    def varying(self, inputs: Inputs) -> list[Varying]:
        """Return the inputs with dimensions that vary, or are marked as dynamic, and remember the other arguments."""
        found = varying_dimensions(inputs, self._sizes)
        self._others = [*self._others[-1:], _others(inputs)]
        return [*found, *((tensor, dynamic_dimensions(tensor)) for tensor in marked(inputs))]


def _others(inputs: Inputs) -> dict[str, Any]:
    """Return the arguments that are plain numbers and strings, by how an error calls them."""
    named = {**{f"argument {at}": x for at, x in enumerate(inputs.args)}, **inputs.kwargs}
    return {name: x for name, x in named.items() if isinstance(x, (bool, int, float, complex, str))}


def marked(inputs: Inputs) -> list[torch.Tensor]:
    """Return the inputs that are marked by ``mark_dynamic`` or its kin."""
    return [tensor for tensor in inputs.tensors() if is_marked_dynamic(tensor)]
