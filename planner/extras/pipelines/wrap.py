"""Plan and wrap the stages of this rank for a schedule of torch.distributed.pipelining."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner import runtimes
from planner.analysis.compatibility import check_solver
from planner.api import unwrap
from planner.capture.inputs import Inputs
from planner.capture.model_facts import of_model
from planner.capture.planned_call import install_planned_call
from planner.capture.torch_internals import entered
from planner.common.options import Budget, Search, Target, Training
from planner.common.units import Size
from planner.extras.pipelines.deferred_weight_grads import LaterWeights
from planner.extras.pipelines.pipelining_internals import RankOfPipeline
from planner.extras.pipelines.plan import StagePlan
from planner.extras.pipelines.rank import plan_rank
from planner.report.progress import tell
from planner.session.step import Options


def wrap_pipeline(
    schedule: Any,
    inputs: Any = None,
    *,
    budget: Budget | Size | None = None,
    labels: Any = None,
    return_outputs: bool = True,
    training: Training | str = Training(),
    search: Search | str = Search(),
    target: Target | str = Target(),
) -> StagePlan:
    """Make the stages of this rank keep a memory budget in a schedule of ``torch.distributed.pipelining``.

    Every rank of the pipeline calls it, after it has made its schedule and before the first step. A rank's stages are
    planned together, for as many micro-batches as the schedule has in flight there, and their modules are wrapped.
    Calls of ``schedule.step`` do not change.

    Parameters
    ----------
    schedule : torch.distributed.pipelining schedule
        ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ``ScheduleLoopedBFS`` or a zero-bubble one
        (``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``, ``ScheduleDualPipeV``), with a ``loss_fn``; its
        stages are made by ``PipelineStage(module, ...)``.
    inputs, labels
        What ``schedule.step`` is called with on this rank, the whole batch: inputs where the first stage is, and as
        ``labels`` its ``target`` where the last one is.
    budget : int, float, str or Budget
        What this rank may hold, or may allocate on top of what is resident; see :func:`planner.plan`. ``"60%"`` is of
        what this rank holds without recompute.
    return_outputs : bool
        As ``schedule.step`` is called: whether the rank of the last stage keeps the outputs of all micro-batches, and
        puts them together.
    training, search, target
        See :func:`planner.plan`; ``gradient_accumulation`` says whether gradients of earlier steps are there when
        ``schedule.step`` begins.

    Returns
    -------
    StagePlan
        What this rank does, its predicted peak, and the plan of each of its stages.

    Raises
    ------
    UsageError
        If an argument is wrong.
    RuntimeUnsupportedError
        For schedules that are not torch's, whose memory is not known, and stages with a ``dw_builder`` of their own.
    CaptureError, NoPlanFitsError
        If a stage cannot be captured as one graph, or no plan fits this rank.
    PlanMismatchError
        If ranks have different schedules.
    PlannerError
        If another rank failed, or went away.
    """
    options = Options.of({**locals(), "runtime": "graph"})
    check_solver(options.runtime.name, options.search.solver)
    options.budget.check()
    search = replace(options.search, compare=False, progress=options.search.progress or tell)
    options = replace(options, search=search)
    rank = RankOfPipeline.of(schedule)
    example = Inputs.of(inputs) if inputs is not None else Inputs((), {})
    for stage in rank.stages:
        unwrap(stage.submod)
    with entered(of_model(rank.stages[0].submod, example.args, example.kwargs)):
        made, planned = plan_rank(rank, example, labels, options, return_outputs=return_outputs)
    deferred = []
    for one in planned:
        later = None if one.options.deferred is None else LaterWeights()
        budget_of_stage = Budget(one.plan.budget_bytes)
        own = replace(one.options, budget=budget_of_stage, reused_plan=one.plan, deferred=later)
        running = runtimes.get(own.runtime.name).start(one.module, own, plan=one.plan, replan=False)
        install_planned_call(one.module, running)
        deferred.append(later)
    rank.give_weights_by(deferred)
    return made
