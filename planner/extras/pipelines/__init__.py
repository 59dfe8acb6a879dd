"""Plans for the stages of a pipeline that run under torch.distributed.pipelining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.common.registry import lazily

if TYPE_CHECKING:
    from planner.extras.pipelines.plan import StagePlan
    from planner.extras.pipelines.rank import wrap_pipeline

__all__ = ["StagePlan", "wrap_pipeline"]


def __getattr__(name: str) -> Any:
    return lazily(name, __name__, {"StagePlan": "plan", "wrap_pipeline": "rank"})
