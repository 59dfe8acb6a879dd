"""Plans for the stages of a pipeline: of a whole model, or of stages that run under torch.distributed.pipelining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.common.registry import lazily

if TYPE_CHECKING:
    from planner.extras.pipelines.plan import PipelinePlan, StagePlan
    from planner.extras.pipelines.rank import wrap_pipeline
    from planner.extras.pipelines.whole_model import plan_pipeline

__all__ = ["PipelinePlan", "StagePlan", "plan_pipeline", "wrap_pipeline"]


def __getattr__(name: str) -> Any:
    modules = {"PipelinePlan": "plan", "StagePlan": "plan", "plan_pipeline": "whole_model", "wrap_pipeline": "rank"}
    return lazily(name, __name__, modules)
