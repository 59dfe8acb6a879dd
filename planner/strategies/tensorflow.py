"""TensorFlow's ``tf.recompute_grad`` around every block: the whole function runs again under a tape of its own.

Source: ``tensorflow/python/ops/custom_gradient.py`` of TensorFlow 2.13, ``recompute_grad``.
"""

from __future__ import annotations

from planner.strategies._step import Strategy

STRATEGIES = (
    Strategy(
        name="tensorflow-recompute-grad",
        summary="tf.recompute_grad around every block",
        schedule=lambda step, _: step.checkpointed(step.blocks, whole=True),
    ),
)
