"""Plans by input sizes: which one is reused for new sizes, and which dimensions are dynamic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch

from planner.capture.inputs import Inputs, Varying, varying_dimensions
from planner.capture.torch_internals import dynamic_dimensions, is_marked_dynamic
from planner.plans.plan import Plan
from planner.plans.reuse import is_reused

InputSizes = tuple[tuple[int, ...], ...]

_ANY: InputSizes = ((-1,),)
"""Placeholder for unknown sizes."""

_NEAR = 0.7
"""Share of a larger size's elements from which inputs reuse its plan: a search for each size would make training wait,
and with no plans of their own small sizes would recompute in vain."""


class PlansBySize:
    """The plans of one wrapped model, by the input sizes that they were solved for.

    A plan that keeps the budget for large inputs nearly always keeps it for smaller ones. So new sizes first try the
    plan of the nearest larger sizes (by number of elements): of the plans that fit, it recomputes least. A given plan,
    whose sizes are unknown, is tried if there is no larger one.
    """

    def __init__(self, given: Plan | None = None, *, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        """Whether smaller sizes must run the given plan too."""
        self._plans: dict[InputSizes, Plan] = {_ANY: given} if given is not None else {}
        self.largest: float = math.inf if given is not None else 0
        """The largest number of elements that there is a plan for."""

    def nearest(self, sizes: InputSizes) -> Plan | None:
        """Return the plan of the nearest size that is not smaller, else of the largest."""
        nearest = self._nearest(sizes)
        return None if nearest is None else self._plans[nearest]

    def near(self, sizes: InputSizes) -> Plan | None:
        """Return that plan if it is for sizes that are little larger, or unknown; else None."""
        nearest = self._nearest(sizes)
        is_far = nearest not in (None, _ANY) and elements(sizes) < _NEAR * elements(nearest)
        return None if is_far and not self._is_kept else self.nearest(sizes)

    def _nearest(self, sizes: InputSizes) -> InputSizes | None:
        if sizes in self._plans:
            return sizes
        least = elements(sizes)
        above = [known for known in reversed(self._plans) if elements(known) >= least]
        return min(above, key=elements) if above else max(self._plans, key=elements, default=None)

    def add(self, sizes: InputSizes, plan: Plan) -> None:
        """Store a plan, unless it is that of sizes that are little larger."""
        self.largest = max(self.largest, elements(sizes))
        if not is_reused(plan) or self.near(sizes) is None:
            self._plans[sizes] = plan


def sizes_of(tensors: Iterable[torch.Tensor]) -> InputSizes:
    """Return the sizes of inputs."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


@lru_cache(maxsize=4096)
def elements(sizes: InputSizes) -> float:
    """Return the total number of elements."""
    return math.inf if sizes == _ANY else sum(map(math.prod, sizes))


class CallsSeen:
    """Earlier captured calls: a dimension seen in two sizes is captured as a symbol from then on."""

    def __init__(self) -> None:
        self._sizes: list[list[torch.Size]] = []
        """Sizes of calls that ran; a call that failed does not count."""

    def ran(self, inputs: Inputs) -> None:
        """Remember the sizes of a call that ran."""
        sizes = [tensor.shape for tensor in inputs.tensors()]
        if sizes not in self._sizes:
            self._sizes.append(sizes)

    def varying(self, inputs: Inputs) -> list[Varying]:
        """Return the inputs with varying or marked dimensions."""
        found = varying_dimensions(inputs, self._sizes)
        return [*found, *((tensor, dynamic_dimensions(tensor)) for tensor in marked(inputs))]


def marked(inputs: Inputs) -> list[torch.Tensor]:
    """Return the inputs marked by ``mark_dynamic`` or a relative of it."""
    return [tensor for tensor in inputs.tensors() if is_marked_dynamic(tensor)]
