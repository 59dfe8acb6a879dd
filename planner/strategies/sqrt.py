"""Chen's segmentation of the forward, wherever it is narrow, whether or not the model has blocks.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from itertools import islice

from planner.ir.schedule import Schedule
from planner.solving.segmentations import segmentations
from planner.strategies._step import Strategy, StrategyStep


def _square_root(step: StrategyStep, _: int) -> Schedule:
    """Take about as many segments as the square root of the places to cut."""
    segmented = next(islice(segmentations(step.graph), 1, 2), None)
    if segmented is None:
        raise step.cannot("has a forward that cannot be cut into segments")
    return segmented


STRATEGIES = (
    Strategy(
        name="sqrt",
        summary="segments of the forward, about as many as the square root of the places to cut (Chen et al. 2016)",
        schedule=_square_root,
    ),
)
