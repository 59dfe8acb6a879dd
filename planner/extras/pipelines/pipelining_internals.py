"""What ``torch.distributed.pipelining`` does on one rank, read off its schedule.

Torch keeps all of this in attributes of its own; nobody else here looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as of_torch

from planner.errors import RuntimeUnsupportedError, UsageError
from planner.extras.pipelines.schedules import Pass, passes

_FORWARD, _BACKWARD = of_torch._ComputationType.FORWARD, of_torch._ComputationType.FULL_BACKWARD


@dataclass(frozen=True)
class RankOfPipeline:
    """One rank of a pipeline: its stages, and the order in which it runs their micro-batches."""

    schedule: Any
    stages: tuple[PipelineStage, ...]
    order: tuple[Pass, ...]
    warm_up: int | None = None
    """Forwards before the first backward, if the schedule is torch's 1F1B; see ``left_by``."""

    @classmethod
    def of(cls, schedule: Any) -> RankOfPipeline:
        """Read a schedule; UsageError or RuntimeUnsupportedError, with what to do, for one that no plan goes with."""
        is_single = isinstance(schedule, of_torch.PipelineScheduleSingle)
        if not (is_single or isinstance(schedule, of_torch.PipelineScheduleMulti)):
            raise UsageError(
                f"wrap_pipeline takes a schedule of torch.distributed.pipelining, not {type(schedule).__name__}: "
                "make the stages and the schedule as without a plan, and pass the schedule"
            )
        name = type(schedule).__name__
        if schedule._loss_fn is None:
            raise UsageError(f"{name} has no loss_fn, so it runs no backward and needs no plan: pass loss_fn to it")
        stages: tuple[Any, ...] = (schedule._stage,) if is_single else tuple(schedule._stages)
        if foreign := next((stage for stage in stages if not isinstance(stage, PipelineStage)), None):
            raise RuntimeUnsupportedError(
                f"stage {foreign.stage_index} was made from a traced pipeline, whose graph is no module to plan: make "
                "it by PipelineStage(module, ...)"
            )
        if is_single:
            order, warm_up = _single(schedule, stages[0])
            return cls(schedule, stages, order, warm_up)
        return cls(schedule, stages, _several(schedule, stages))

    @property
    def is_single(self) -> bool:
        """Whether each rank has one stage."""
        return isinstance(self.schedule, of_torch.PipelineScheduleSingle)

    @property
    def group(self) -> Any:
        """The process group of the pipeline."""
        return self.stages[0].group

    @property
    def micro_batches(self) -> int:
        """How many one step has."""
        return int(self.schedule._n_microbatches)

    @property
    def facts(self) -> dict[str, str | int]:
        """What all ranks must have in common."""
        name, stages = type(self.schedule).__name__, self.stages[0].num_stages
        return {"schedule": name, "micro-batches": self.micro_batches, "stages": stages}

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one micro-batch, of those of ``schedule.step``."""
        split_args, split_kwargs = self.schedule._split_inputs(args, dict(kwargs))
        return tuple(split_args[0]), dict(split_kwargs[0])

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Compute the loss of one micro-batch, as the schedule does."""
        return self.schedule._compute_loss(output, target)

    def target_of(self, target: Any) -> Any:
        """Return the target of one micro-batch, of that of the whole batch."""
        return torch.tensor_split(target, self.micro_batches)[0] if isinstance(target, torch.Tensor) else target


def _single(schedule: Any, stage: PipelineStage) -> tuple[tuple[Pass, ...], int | None]:
    """Return the order of a schedule with one stage on each rank; torch's own list of 1F1B is not what it runs."""
    count = schedule._n_microbatches
    if type(schedule) is of_torch.ScheduleGPipe:
        return passes(count, warm_up=count), None
    if type(schedule) is of_torch.Schedule1F1B:
        stages_after = stage.num_stages - stage.stage_index - 1
        return passes(count, warm_up=min(count, stages_after)), min(count, stages_after + 1)
    raise _unknown(schedule)


def _several(schedule: Any, stages: Sequence[PipelineStage]) -> tuple[Pass, ...]:
    """Return the order of a schedule with several stages on each rank."""
    if type(schedule) not in (of_torch.ScheduleInterleaved1F1B, of_torch.ScheduleLoopedBFS):
        raise _unknown(schedule)
    if len(stages) == stages[0].num_stages:
        raise RuntimeUnsupportedError(
            "all stages of the pipeline are on this rank: plan the whole model, or start the script on more ranks"
        )
    chunk_of = {stage.stage_index: chunk for chunk, stage in enumerate(stages)}
    actions = schedule.pipeline_order_with_comms[schedule.rank]
    return tuple(
        Pass(action.computation_type is _BACKWARD, chunk_of[action.stage_index], action.microbatch_index)
        for action in actions
        if action.computation_type in (_FORWARD, _BACKWARD)
    )


def _unknown(schedule: Any) -> RuntimeUnsupportedError:
    return RuntimeUnsupportedError(
        f"{type(schedule).__name__} runs without a plan only. A planned stage computes all its gradients at once and "
        "fills no zero bubbles, and what a schedule of your own holds is not known: use ScheduleGPipe, Schedule1F1B, "
        "ScheduleInterleaved1F1B or ScheduleLoopedBFS"
    )
