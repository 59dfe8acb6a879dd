"""JAX's policies, for the whole step as one function: what may not be saved is made again at its first need.

``jax.checkpoint`` without more is ``nothing_saveable``; around the whole step that frees next to nothing, since
all is made again before the backward begins to use it. A fused attention kernel stands for the batched products
that ``jax.nn.dot_product_attention`` is made of. XLA may order and fuse differently.

``offload_dot_with_no_batch_dims`` offloads what ``dots_with_no_batch_dims_saveable`` would keep, and
``save_and_offload_only_these_names`` values that have a name; here those are what enters a block, and nothing else is
kept. XLA copies beside computing: transfers have the time here that there is without another peak.

Sources: ``checkpoint_policies`` in ``jax/_src/ad_checkpoint.py`` of jax-ml/jax (0018095): ``dots_saveable`` means
matrix products and convolutions, ``dots_with_no_batch_dims_saveable`` matrix products without batch dimensions alone;
``jax.checkpoint_policies`` in JAX's reference, and its page on memory spaces and host offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain

from planner.ir.cut_points import turning_point
from planner.ir.graph import Operation
from planner.ir.schedule import Schedule, recompute_lazily
from planner.strategies._offloads import hiding, offloaded
from planner.strategies._operators import is_linear, is_product_or_attention
from planner.strategies._step import Strategy, StrategyStep


def _policy(saveable: Callable[[Operation], bool]) -> Callable[[StrategyStep, int], Schedule]:
    return lambda step, _: _keeping(step, _made(step, saveable))


def _made(step: StrategyStep, by: Callable[[Operation], bool]) -> set[int]:
    return {value for operation in step.graph.operations if by(operation) for value in operation.outputs}


def _keeping(step: StrategyStep, kept: Collection[int]) -> Schedule:
    """Make again what the backward reads of all other values of the forward."""
    graph = step.graph
    turn = turning_point(graph)
    dropped = [
        value
        for operation in graph.operations[:turn]
        if operation.recomputable
        for value in operation.outputs
        if value not in kept
    ]
    return recompute_lazily(graph, {turn: dropped})


def _offloading(step: StrategyStep, values: Iterable[int]) -> Schedule:
    moved = set(filter(step.is_saved_freely, values))
    return hiding(step, offloaded(step, _keeping(step, moved), moved))


STRATEGIES = (
    Strategy(
        name="jax-nothing-saveable",
        summary="jax.checkpoint around the whole step, nothing_saveable",
        schedule=_policy(lambda operation: False),
    ),
    Strategy(
        name="jax-dots-saveable",
        summary="jax.checkpoint around the whole step, dots_saveable: products are kept",
        schedule=_policy(is_product_or_attention),
    ),
    Strategy(
        name="jax-dots-with-no-batch-dims-saveable",
        summary="jax.checkpoint around the whole step: products without batch dimensions are kept",
        schedule=_policy(is_linear),
    ),
    Strategy(
        name="jax-offload-dot-with-no-batch-dims",
        summary="jax.checkpoint around the whole step: products without batch dimensions wait on the host",
        schedule=lambda step, _: _offloading(step, _made(step, is_linear)),
    ),
    Strategy(
        name="jax-save-and-offload-only-these-names",
        summary="jax.checkpoint around the whole step: what enters a block waits on the host",
        schedule=lambda step, _: _offloading(step, chain.from_iterable(step.entering(step.regions(step.blocks)))),
    ),
)
