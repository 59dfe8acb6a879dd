"""JAX's policies, for the whole step as one function: what may not be saved is made again at its first need.

``jax.checkpoint`` without more is ``nothing_saveable``; around the whole step that frees next to nothing, since
all is made again before the backward begins to use it. A fused attention kernel stands for the batched products
that ``jax.nn.dot_product_attention`` is made of. XLA may order and fuse differently.

Source: ``checkpoint_policies`` in ``jax/_src/ad_checkpoint.py`` of jax-ml/jax (0018095): ``dots_saveable`` means
matrix products and convolutions, ``dots_with_no_batch_dims_saveable`` matrix products without batch dimensions alone.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.cut_points import turning_point
from planner.graph import Operation
from planner.schedule import Schedule, recompute_lazily
from planner.strategies._operators import is_fused_attention, is_linear, is_product
from planner.strategies._step import Step, Strategy


def _policy(saveable: Callable[[Operation], bool]) -> Callable[[Step, int], Schedule]:
    def schedule(step: Step, number: int) -> Schedule:
        graph = step.graph
        turn = turning_point(graph)
        dropped = [
            value
            for operation in graph.operations[:turn]
            if operation.recomputable and not saveable(operation)
            for value in operation.outputs
        ]
        return recompute_lazily(graph, {turn: dropped})

    return schedule


STRATEGIES = (
    Strategy(
        name="jax-nothing-saveable",
        summary="jax.checkpoint around the whole step, nothing_saveable",
        schedule=_policy(lambda operation: False),
    ),
    Strategy(
        name="jax-dots-saveable",
        summary="jax.checkpoint around the whole step, dots_saveable: products are kept",
        schedule=_policy(lambda operation: is_product(operation) or is_fused_attention(operation)),
    ),
    Strategy(
        name="jax-dots-with-no-batch-dims-saveable",
        summary="jax.checkpoint around the whole step: products without batch dimensions are kept",
        schedule=_policy(is_linear),
    ),
)
