"""Study and plan an eager step that was recorded and not captured, for the runtime ``modules``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from planner.analysis.study import Study
from planner.capture.eager.graph import lower_eager
from planner.capture.eager.record import record
from planner.capture.eager.trace import Trace
from planner.capture.inputs import Inputs, check_device, check_own_checkpointing
from planner.capture.model_facts import has_several_ranks, kinds_of, of_model, units_of
from planner.capture.operands import is_opaque
from planner.capture.parallel_events import found_by_autograd
from planner.capture.sharding import resident
from planner.common.garbage import not_collected
from planner.common.options import Runtime, Training
from planner.common.units import format_bytes
from planner.errors import CaptureError, InfeasibleBudgetError, UsageError
from planner.findings.finding import Finding
from planner.ir.layers import find_blocks
from planner.measure.costing import eager_costs
from planner.measure.devices import device_here, device_spec
from planner.plans.plan import Plan
from planner.session.rank_consensus import made_by_all, planned_by_first, prepared_by_all, trained, who_agrees
from planner.session.step import (
    Options,
    carried_over,
    context_of,
    cost,
    elsewhere_for,
    fingerprint_of_graph,
    notes_on,
    origin_of,
    outputs_of,
    plan_study,
    problems_of,
    static_memory_of,
)

DEPENDS_ON_DATA = "depends-on-data"
"""The rule that a plan breaks which holds for the batch that was recorded."""

_SHARES = (1.0, 0.95, 0.9, 0.8, 0.65)
"""Of a budget that each rank has on top of what is resident, how much it chooses modules for, one after the other."""

_NO_TROUBLE = ("full-backward-hooks",)
"""Rules that an eager step may break."""


def plan_eager(model: nn.Module, inputs: Inputs, options: Options, **known: Any) -> Plan:
    """Plan one eager step; see :func:`plan_alike`."""
    return plan_alike(model, study_alike(model, inputs, options), options, **known)


def study_alike(model: nn.Module, inputs: Inputs, options: Options) -> Study:
    """Record and cost one eager step, on all ranks alike if they share every layer.

    No rank runs it for real, and communicates, unless all of them have to.
    """
    agreed = who_agrees(model, options)
    if not agreed:
        return study_eager(model, inputs, options)
    (group,) = agreed
    recorded: list[Study | CaptureError] = []

    def record_without_data() -> str:
        try:
            recorded.append(study_eager(model, inputs, options, may_run=False))
        except CaptureError as error:
            recorded.append(error)
            return str(error)
        return ""

    failed = made_by_all(record_without_data, "recorded a step", group)

    def taken() -> Study:
        (found,) = recorded
        if isinstance(found, Study):
            return found
        if not all(failed):
            raise found
        return study_eager(model, inputs, options)

    return prepared_by_all(taken, lambda study: {**trained(model), **_in_common(study)}, group)


def _in_common(study: Study) -> Mapping[str, str | int]:
    """Say what ranks that share layers must have in common: all, but for what data decide."""
    fingerprint = study.origin.fingerprint
    return {key: fingerprint[key] for key in fingerprint if not (study.varies and key in ("operations", "graph"))}


def plan_alike(model: nn.Module, study: Study, options: Options, **known: Any) -> Plan:
    """Plan such a step, on one rank for all that share every layer; ``known`` is for :func:`plan_study`."""
    agreed = who_agrees(model, options)
    if not agreed:
        return plan_study(study, options, **known)
    if study.varies:
        return _planned_by_each(study, options, *agreed, **known)
    return planned_by_first(lambda: plan_study(study, options, **known), study.graph, *agreed)


def _planned_by_each(study: Study, options: Options, group: Any, **known: Any) -> Plan:
    """Plan a step of sizes that data decide, which are other ones on each rank, with modules that all run again.

    Each rank plans its own step, and all take the choice of modules that runs most again. If that does not keep every
    rank's budget, each rank chooses as if it had less.
    """

    def choice(share: float) -> str | None:
        if share == 1.0:
            return plan_study(study, options, **known).to_json()
        static_bytes = study.graph.total_static_bytes
        budget_bytes = options.budget.in_bytes(study.whole_bytes, static_bytes)
        less_bytes = static_bytes + int(share * (budget_bytes - static_bytes))
        try:
            return plan_study(study, replace(options, budget=options.budget.within(less_bytes))).to_json()
        except InfeasibleBudgetError:
            return None

    for share in _SHARES:
        made = made_by_all(partial(choice, share), "planned its step", group)
        proposed = [Plan.from_json(text) for text in made if text is not None]
        strictest = max(proposed, key=lambda plan: plan.recompute_seconds, default=None)
        carried = strictest and carried_over(study, options, strictest, even_unneeded=True)
        tried = made_by_all(lambda: (study.whole_bytes, carried is not None), "tried another rank's plan", group)  # noqa: B023
        if carried is not None and all(fits for _, fits in tried):
            return carried
    enough_bytes = max(whole_bytes for whole_bytes, _ in tried)
    raise InfeasibleBudgetError(
        "no rank's choice of modules keeps the budget on every rank. Data decide sizes, and ranks that share "
        "layers must recompute the same modules: raise the budget. "
        f"{format_bytes(enough_bytes)} is known to be enough for each, without recompute",
        minimum_feasible_peak_bytes=enough_bytes,
        operation="all modules",
    )


def study_eager(model: nn.Module, inputs: Inputs, options: Options, *, may_run: bool = True) -> Study:
    """Record and cost one eager step; a CaptureError says that it must run for real, and may not."""
    if isinstance(options.eager, Study):
        return options.eager
    check_device(model, inputs)
    check_own_checkpointing(model)
    return _recorded(model, inputs, options, may_run=may_run)


def with_eager(model: nn.Module, options: Options, inputs: Inputs) -> Options:
    """Return the options with the model's own step, where a plan of a captured one is to be held against that.

    It is recorded without data, so that nothing runs: the model may be one that does not fit. The step of one of
    several devices is not held against it, and a recorded one is the model's own.
    """
    asked = options.budget.is_share or options.search.compare
    if not asked or has_several_ranks() or options.runtime.name == "modules" or options.reused_plan is not None:
        return options
    try:
        check_own_checkpointing(model)
        own = replace(options, runtime=Runtime("modules"))
        with not_collected():  # what is there is the whole model, and walking all of it took half a second
            eager: Study | CaptureError = _recorded(model, inputs, own, may_run=False)
    except (CaptureError, UsageError) as error:  # the latter where it checkpoints itself, which is not followed
        # The error as raised would hold all frames below it, and what the caller's loop has in them, for good.
        eager = CaptureError(str(error))
    return replace(options, eager=eager)


def _recorded(model: nn.Module, inputs: Inputs, options: Options, *, may_run: bool = True) -> Study:
    """Record a step and return it as plain data."""
    begun = time.perf_counter()
    options.search.tell("recording a step")
    elsewhere, spec = elsewhere_for(model, options), device_spec(of_model(model), options.target.device)
    gradients = replace(options.gradients, found=_found(model, options.training))
    around_step: dict[str, Any] = {"loss": options.loss, "gradients": gradients, "outputs": outputs_of(options)}
    trace = record(model, inputs, elsewhere=elsewhere, may_run=may_run, **around_step)

    def blocks() -> Collection[str]:
        return find_blocks(Counter(run.module for run in trace.runs[: trace.backward]), kinds_of(model))

    tensors = inputs.tensors()
    around = static_memory_of(model, tensors, spec, options, blocks)
    if around.gradient_shards > 1 and (units := units_of(model)):
        around = resident(around, {unit.path: unit for unit in units}, spec.alignment_bytes)
    if options.training.data_parallel != "none":
        around = around.without("gradients")  # they are seen in the step
    step = lower_eager(trace, model, tensors, context_of(model, spec, around, options))
    costing = cost(model, step.lowered, spec, options)
    calls = 0 if options.target.profile else trace.operators
    here, parts = device_here(of_model(model), spec), lambda name: len(list(model.get_submodule(name).modules()))
    costs = eager_costs(step.lowered.graph, costing, here, calls, step.regions, parts)
    outside_bytes = trace.outside_bytes if trace.outside_bytes > spec.alignment_bytes else 0
    problems = problems_of(
        model, options, outside_bytes=outside_bytes, returned_cache=trace.returned_cache, allowed=_NO_TROUBLE
    )
    notes = _notes(trace, has_kernels_of_here=trace.is_real and elsewhere is not None)
    return Study(
        graph=step.lowered.graph,
        costs=tuple(
            replace(cost, workspace_bytes=step.workspace_bytes.get(index, cost.workspace_bytes))
            for index, cost in enumerate(costs)
        ),
        origin=origin_of(
            costing,
            spec,
            fingerprint=fingerprint_of_graph(model, step.lowered, spec),
            capture_seconds=time.perf_counter() - begun,
            runtime=options.runtime.name,
            warnings=(*costing.warnings, *notes, *notes_on(step.lowered.graph), *problems),
        ),
        static_memory=around,
        device=spec,
        regions=step.regions,
        varies=trace.is_real,
        draws=trace.draws,
    )


def _found(model: nn.Module, training: Training) -> frozenset[str]:
    """Return the parameters with gradients of earlier backwards; of one process these are resident."""
    if training.data_parallel == "none":
        return frozenset()
    accumulates = training.gradient_accumulation
    units = [unit.as_planned(finds_gradients=accumulates) for unit in units_of(model)]
    return found_by_autograd(model, units or None, accumulates=accumulates and training.data_parallel == "ddp")


def recorded_for_real(*, depends_on_data: bool) -> Finding:
    """Say that a plan is for the batch with which a real step was recorded."""
    known = "what the model runs" if depends_on_data else "what its kernels keep"
    return Finding(
        rule=DEPENDS_ON_DATA if depends_on_data else "recorded-for-real",
        evidence=f"a real step was recorded: {known} is known only with data",
        cause="another batch may need more, or less, than is predicted",
        fix="plan with a batch of the kind that needs most, and leave some room in the budget",
    )


def _notes(trace: Trace, *, has_kernels_of_here: bool) -> Iterator[Finding]:
    if has_kernels_of_here:
        yield Finding(
            rule="attention-of-here",
            evidence="a real step was recorded on this machine, for a device that is not here",
            cause="its attention kernels are those of this machine, which keep other tensors, and more of them",
            fix="plan there, or a model that can be followed without data",
        )
    if trace.is_real:
        yield recorded_for_real(depends_on_data=trace.depends_on_data)
    if opaque := sorted(
        {str(run.node.target) for run in trace.runs if is_opaque(run.node.target) and run.workspace_bytes is None}
    ):
        yield Finding(
            rule="workspace-unknown",
            evidence=", ".join(opaque),
            cause="the workspace of these kernels cannot be measured alone, and counts as none",
            fix="verify the plan, and leave room in the budget for what it shows",
        )
