"""Input sizes that change from call to call: which plan is tried for which, and sizes marked as dynamic."""

from __future__ import annotations

import math
from typing import Any

import torch

from planner.capture.inputs import Inputs, Varying, varying_dimensions
from planner.capture.torch_internals import dynamic_dimensions, dynamic_ranges, is_marked_dynamic
from planner.errors import UsageError
from planner.plans.plan import Plan

InputSizes = tuple[tuple[int, ...], ...]


class PlansBySize:
    """The plans of one wrapped model, by how many elements the inputs had that they were made for.

    What keeps the budget for large inputs nearly always does for smaller ones, so the plan of the
    nearest size above is the one to try first: it fits, and recomputes least of those that do. One that was
    given, for sizes that are not known, is tried where there is none from above.
    """

    def __init__(self, given: Plan | None = None) -> None:
        self._plans: dict[float, Plan] = {math.inf: given} if given is not None else {}

    @property
    def largest(self) -> float:
        """The most elements that there is a plan for."""
        return max(self._plans, default=0)

    def nearest(self, elements: int) -> Plan | None:
        """Return the plan of the nearest size that is not smaller, else that of the largest."""
        above = [size for size in self._plans if size >= elements]
        return self._plans[min(above)] if above else self._plans.get(max(self._plans, default=0))

    def add(self, elements: int, plan: Plan) -> None:
        """Remember a plan; of two for the same size, the later."""
        self._plans[elements] = plan


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


def largest_sizes(inputs: Inputs) -> InputSizes | None:
    """Return the largest sizes that the marks allow, tensor by tensor; None if they name none.

    Raises UsageError if an input is larger than its mark says.
    """
    bounded = False
    sizes = []
    for tensor in inputs.tensors():
        size = list(tensor.shape)
        for dimension, largest in dynamic_ranges(tensor).items():
            if largest is None:
                continue
            if size[dimension] > largest:
                raise UsageError(
                    f"an input of size {tuple(tensor.shape)} is marked to have at most {largest} in dimension "
                    f"{dimension}: raise max= of mark_dynamic"
                )
            size[dimension], bounded = largest, True
        sizes.append(tuple(size))
    return tuple(sizes) if bounded else None


def with_sizes(inputs: Inputs, sizes: InputSizes) -> Inputs:
    """Return inputs of other sizes, without values and marks: enough to be planned for."""
    wanted = iter(sizes)
    seen: dict[int, torch.Tensor] = {}  # one tensor that is passed twice stays one

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        size = next(wanted)
        if not is_marked_dynamic(tensor):
            return tensor
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # channels last stay last
        empty = torch.empty_permuted(size, order, dtype=tensor.dtype, device=tensor.device)
        return seen.setdefault(id(tensor), empty.requires_grad_(tensor.requires_grad))

    return inputs.map_tensors(resized)
