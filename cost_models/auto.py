"""Measured costs where the model and its device are here, roofline costs otherwise: the default of a plan.

What may be measured, and for how long, is decided by ``planner.measure.costing``; asked alone, for a device by its
name, this is the roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cost_models.base import CostedOperation, OperationCost
from cost_models.devices import DeviceSpec
from cost_models.roofline import RooflineCosts


@dataclass(frozen=True, slots=True)
class AutoCosts:
    """The cost model of this file."""

    device: DeviceSpec
    name: ClassVar[str] = "auto"

    def costs(self, operations: Sequence[CostedOperation]) -> tuple[OperationCost, ...]:
        """Return the cost of one run of each operation, in their order; workspace is not known, so 0."""
        return RooflineCosts(self.device).costs(operations)


COST_MODEL = AutoCosts
