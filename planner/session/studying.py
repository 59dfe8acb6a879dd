"""From a model to a :class:`~planner.analysis.study.Study` of its step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cost_models.measured import Profile
from planner.analysis.compatibility import sliced_graph
from planner.analysis.study import Study
from planner.capture.inputs import (
    Inputs,
    LossFunction,
    check_device,
    check_model,
    check_own_checkpointing,
    check_plannable,
)
from planner.capture.joint_capture import capture
from planner.capture.parallel import has_several_ranks
from planner.common.chunks import AUTO, OFF, Chunk, check_chunk
from planner.common.training import Training
from planner.errors import UsageError
from planner.ir.problem import Progress
from planner.measure import loss
from planner.session.eager import study_eager
from planner.session.step import Options, attention_for, lower_as_run, study_lowered
from planner.session.step_planning import sliced


def study(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    device: str | None = None,
    cost_model: str = "roofline",
    profile: Profile | None = None,
    runtime: str = "graph",
    chunk: Chunk = OFF,
    name: str = "",
    progress: Progress | None = None,
    **training: Any,
) -> Study:
    """Capture and cost one training step as a whole, so that many plans can be asked of it.

    Parameters
    ----------
    model : torch.nn.Module
        Real, or built under ``planner.capture.fake_mode()`` to need no memory.
    example_inputs, example_kwargs, loss_fn, device, cost_model, profile, name, progress
        See :func:`planner.plan`.
    runtime : str
        What is to run the step: ``"graph"``, or ``"modules"`` for the eager step with checkpointed modules.
    chunk : int or str
        In how many slices to compute what makes the peak, or ``"off"``; percentages are then of the peak in slices.
    **training
        The fields of :class:`planner.common.training.Training`: ``optimizer``, ``master_weights``, ``reserve``, ...

    Returns
    -------
    Study
        Plans made of it are for that runtime.

    Raises
    ------
    UsageError
        If an argument is wrong.
    CaptureError
        If the model cannot be captured as one graph.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> step = planner.study(model, torch.randn(256, 64))
    >>> [step.plan(budget=budget).status for budget in ("100%", "80%")]
    ['optimal', 'optimal']
    """
    check_model(model)
    if runtime not in ("graph", "modules"):
        raise UsageError(f"a step is studied for the runtime 'graph' or 'modules', not {runtime!r}")
    slices = check_chunk(chunk)
    if slices == AUTO:
        raise UsageError("a step is studied in one number of slices: give it, or use planner.plan with chunk='auto'")
    if slices != 1:
        sliced_graph(runtime, several_devices=training.get("tensor_parallel", 1) > 1 or has_several_ranks())
    inputs = Inputs.of(example_inputs, example_kwargs)
    options = Options(
        device=device,
        cost_model=cost_model,
        profile=profile,
        training=Training(**training),
        runtime=runtime,
        name=name,
        loss=loss.memory_of(model, inputs, loss_fn, device) if loss_fn is not None else None,
        progress=progress,
    )
    if runtime == "modules":
        check_device(model, inputs)
        check_own_checkpointing(model)
        return study_eager(model, inputs, options)
    if progress is not None:
        progress("capturing forward and backward")
    check_plannable(model, inputs)
    joint = capture(model, inputs, attention=attention_for(model, options))
    step = lower_as_run(model, joint, options)
    if isinstance(slices, int) and slices > 1:
        step = sliced(model, step, slices, options)
    return study_lowered(model, step, options)
