"""``planner.check``: apply all rules to one model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from planner.capture.inputs import Inputs, LossFunction, check_module
from planner.capture.model_facts import module_facts, outside_bytes
from planner.common.limits import Progress
from planner.common.options import Search, Target, Training
from planner.diagnose.observe import observe
from planner.errors import CaptureError, ForwardError, RuntimeUnsupportedError
from planner.findings import model_rules, step_rules
from planner.findings.finding import Diagnosis
from planner.findings.rules import CapturedStep, examine
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.session.step import Options, captured, cost, lower_step, with_loss

RULES = (*model_rules.RULES, *step_rules.RULES)
"""All rules, in the order in which findings of the same severity are shown."""


def check(
    model: nn.Module,
    inputs: Any = None,
    *,
    loss_fn: LossFunction | None = None,
    training: Training | str = Training(),
    target: Target | str = Target(),
    name: str = "",
    progress: Progress | None = None,
) -> Diagnosis:
    """Say what is wrong with how a model is trained, and what limits a plan for it.

    The forward is run on tensors without data, and the step is captured; no step is trained, and the model is left
    as it was. For a model that cannot be captured a finding says so, and only rules that need no captured step apply.

    Parameters
    ----------
    model, inputs, loss_fn, training, name
        See :func:`planner.plan`.
    target : str or Target
        Its device is the one that the step is for.
    progress : callable, optional
        Called with short lines on the progress.

    Returns
    -------
    Diagnosis

    Raises
    ------
    UsageError
        If an argument is wrong.
    CaptureError
        If the forward itself fails, as for an argument that it does not take.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    >>> [finding.rule for finding in planner.check(model, torch.randn(4, 8), loss_fn=torch.sum).findings]
    ['batch-norm']
    """
    options = Options.of(locals(), search=Search(progress=progress))
    check_module(model)
    inputs = Inputs.of(inputs)
    options.search.tell("following the forward")
    seen = observe(model, inputs)
    step, not_captured = None, ""
    try:
        step = _step(model, inputs, options, loss_fn)
    except (CaptureError, RuntimeUnsupportedError) as error:
        kind = seen.unseen.partition(":")[0]
        if isinstance(error, ForwardError) and kind and f"{kind}:" in str(error):
            raise  # it fails without a capture too, and likewise
        not_captured = str(error)
    subject = replace(
        seen,
        modules=module_facts(model),
        not_captured=not_captured,
        outside_bytes=outside_bytes(step.problem.graph) if step else 0,
        counts_loss=loss_fn is not None,
        step=step,
    )
    return Diagnosis(model=name or type(model).__name__, findings=examine(subject, RULES), captured=step is not None)


def _step(model: nn.Module, inputs: Inputs, options: Options, loss_fn: LossFunction | None) -> CapturedStep:
    """Capture a step, with the schedule that recomputes nothing."""
    joint = captured(model, inputs, options)
    options = with_loss(model, options, loss_fn, inputs)
    lowered = lower_step(model, joint, options)
    graph, costs = lowered.lowered.graph, cost(model, lowered.lowered, lowered.spec, options).costs
    unbounded = Problem(graph=graph, costs=costs, budget_bytes=0)
    problem = replace(unbounded, budget_bytes=unbounded.baseline.peak_bytes)
    return CapturedStep(problem=problem, schedule=Schedule.keep_all(graph), evaluation=unbounded.baseline)
