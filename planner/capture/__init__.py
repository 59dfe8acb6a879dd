"""Torch in: a model's step as one joint graph, as a recorded eager step, or block by block."""

from planner.capture.fake_internals import fake_mode

__all__ = ["fake_mode"]
