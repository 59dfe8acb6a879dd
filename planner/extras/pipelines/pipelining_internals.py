"""What ``torch.distributed.pipelining`` does on one rank, read off its schedule.

Torch keeps all of this in attributes of its own; nobody else here looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _ComputationType,
)

from planner.errors import RuntimeUnsupportedError, UsageError
from planner.extras.pipelines.schedules import Pass, passes

_FORWARD, _WHOLE = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
_FIRST, _REST = _ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT


@dataclass(frozen=True)
class RankOfPipeline:
    """One rank of a pipeline: its stages, and the order in which it runs their micro-batches."""

    schedule: Any
    stages: tuple[PipelineStage, ...]
    order: tuple[Pass, ...]
    warm_up: int | None = None
    """Forwards before the first backward, if the schedule is torch's 1F1B; see ``left_by``."""
    splits: bool = False
    """Whether the schedule asks for the gradients of inputs and of weights apart."""

    @classmethod
    def of(cls, schedule: Any) -> RankOfPipeline:
        """Read a schedule; UsageError or RuntimeUnsupportedError, with what to do, for one that no plan goes with."""
        is_single = isinstance(schedule, PipelineScheduleSingle)
        if not (is_single or isinstance(schedule, PipelineScheduleMulti)):
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
        own = next((stage for stage in stages if stage.dw_builder not in (None, _nothing_left)), None)
        order, splits = _several(schedule, stages)
        if own is not None and splits:
            raise RuntimeUnsupportedError(
                f"stage {own.stage_index} has a dw_builder, which computes gradients of weights, as its plan does: "
                "leave it out"
            )
        return cls(schedule, stages, order, splits=splits)

    @property
    def is_single(self) -> bool:
        """Whether each rank has one stage."""
        return isinstance(self.schedule, PipelineScheduleSingle)

    def hands_over(self, stage: Any) -> bool:
        """Whether the next stage is on this rank too, and takes the output itself in place of a copy that is sent."""
        return any(other.stage_index == stage.stage_index + 1 for other in self.stages)

    def takes_over(self, stage: Any) -> bool:
        """Whether the stage before is on this rank too."""
        return any(other.stage_index == stage.stage_index - 1 for other in self.stages)

    def give_weights_at_once(self) -> None:
        """Let a schedule that splits backwards find nothing left to do for the gradients of weights.

        That is what torch's ``dw_builder`` is for. Without one torch would walk autograd's graph for each part, and a
        planned stage is one node of it.
        """
        for stage in self.stages if self.splits else ():
            stage.dw_builder = _nothing_left

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
        return {
            "schedule": type(self.schedule).__name__,
            "micro-batches": self.micro_batches,
            "stages": self.stages[0].num_stages,
        }

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one micro-batch, of those of ``schedule.step``."""
        split_args, split_kwargs = self.schedule._split_inputs(args, dict(kwargs))
        return tuple(split_args[0]), dict(split_kwargs[0])

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Compute the loss of one micro-batch, as the schedule does."""
        value: torch.Tensor = self.schedule._compute_loss(output, target)
        return value

    def target_of(self, target: Any) -> Any:
        """Return the target of one micro-batch, of that of the whole batch."""
        return torch.tensor_split(target, self.micro_batches)[0] if isinstance(target, torch.Tensor) else target


def _single(schedule: Any, stage: PipelineStage) -> tuple[tuple[Pass, ...], int | None]:
    """Return the order of a schedule with one stage on each rank; torch's own list of 1F1B is not what it runs."""
    count = schedule._n_microbatches
    if type(schedule) is ScheduleGPipe:
        return passes(count, warm_up=count), None
    if type(schedule) is Schedule1F1B:
        stages_after = stage.num_stages - stage.stage_index - 1
        return passes(count, warm_up=min(count, stages_after)), min(count, stages_after + 1)
    raise _unknown(schedule)


def _several(schedule: Any, stages: Sequence[PipelineStage]) -> tuple[tuple[Pass, ...], bool]:
    """Return the order of a schedule with several stages on each rank, and whether it splits backwards."""
    chunk_of = {stage.stage_index: chunk for chunk, stage in enumerate(stages)}
    actions = getattr(schedule, "pipeline_order_with_comms", None)
    if not actions:
        raise _unknown(schedule)
    # A forward and a backward that overlap are run one after the other.
    single = [one for action in actions[schedule.rank] for one in (action.sub_actions or (action,))]
    splits = any(action.computation_type is _REST for action in single)
    order: list[Pass] = []
    for action in single:
        kind = action.computation_type
        if kind in (_FORWARD, _WHOLE, _FIRST):
            order.append(Pass(kind is not _FORWARD, chunk_of[action.stage_index], action.microbatch_index))
    return tuple(order), splits


def _nothing_left() -> Callable[..., None]:
    """Return what computes the gradients of weights that a backward has left, as a ``dw_builder`` does: nothing."""
    return lambda: None


def _unknown(schedule: Any) -> RuntimeUnsupportedError:
    return RuntimeUnsupportedError(
        f"what {type(schedule).__name__} holds while it runs is not known: use ScheduleGPipe, Schedule1F1B, "
        "ScheduleInterleaved1F1B, ScheduleLoopedBFS or a zero-bubble schedule"
    )
