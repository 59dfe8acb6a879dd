"""OneFlow's flag ``config.activation_checkpointing`` on modules of an ``nn.Graph``: here on every block.

Each flagged module is doubled in the compiled graph, whole, and its backward reads the double; an identity
before it ends the segment. Batch norms are left out: their output stays.

Sources: ``oneflow/core/job_rewriter/checkpointing_pass.cpp`` and ``python/oneflow/nn/graph/graph_block.py`` in
Oneflow-Inc/oneflow (03b7b8a); https://docs.oneflow.org/en/master/cookies/activation_checkpointing.html.
"""

from __future__ import annotations

from planner.strategies._operators import is_batch_norm
from planner.strategies._step import Strategy

STRATEGIES = (
    Strategy(
        name="oneflow",
        summary="OneFlow's activation_checkpointing flag on every block",
        schedule=lambda step, _: step.checkpointed(step.blocks, saved=is_batch_norm, whole=True),
    ),
)
