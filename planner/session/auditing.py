"""From a model to an :class:`~planner.analysis.audit.Audit` of how it is checkpointed now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from cost_models.measured import Profile
from planner.analysis.audit import Audit, audit_study, read_current
from planner.analysis.compatibility import check_solver
from planner.capture.inputs import LossFunction, check_model, check_own_checkpointing
from planner.errors import UsageError
from planner.ir.problem import Progress
from planner.plans.plan import Plan
from planner.plans.planning import Size
from planner.session.studying import study


def audit(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    current: str | Path | Plan,
    budget: Size | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    runtime: str = "auto",
    solver: str = "auto",
    time_limit_seconds: float = 10.0,
    deterministic: bool = False,
    seed: int = 0,
    device: str | None = None,
    cost_model: str = "roofline",
    profile: Profile | None = None,
    name: str = "",
    progress: Progress | None = None,
    **training: Any,
) -> Audit:
    """Say what the present checkpointing of a model costs, and what a plan would do in its place.

    Parameters
    ----------
    model : torch.nn.Module
        Without checkpointing of its own: ``current`` is simulated on it.
    current : str, path or Plan
        ``"none"``, ``"every-layer"``, ``"every-2"`` (every second block, or another number), ``"sqrt"`` (segments of
        the forward, about as many as the square root of the places to cut), or a plan, or the file of one.
    budget : int, float or str, optional
        What the device may hold: then the best plan within it is looked for too.
    runtime : str
        ``"graph"``, or ``"modules"`` for choices of checkpointed modules of the eager step; ``"auto"`` is what a plan
        that is given is for, if it is one of these, else ``"graph"``.
    time_limit_seconds : float
        For each of the two searches.
    example_inputs, example_kwargs, loss_fn, solver, deterministic, seed, device, cost_model, profile, name, progress
        See :func:`planner.plan`.
    **training
        The fields of :class:`planner.common.training.Training`: ``optimizer``, ``master_weights``, ``reserve``, ...

    Returns
    -------
    Audit

    Raises
    ------
    UsageError
        If an argument is wrong, the model checkpoints itself, or a plan is of another model.
    CaptureError
        If the model cannot be captured as one graph.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> found = planner.audit(model, torch.randn(256, 64), current="none", budget="90%")
    >>> found.now.overhead, found.fits, found.within_budget.status
    (0.0, False, 'optimal')
    """
    known = read_current(current)  # refused before minutes of capture
    if runtime == "auto":
        runtime = "modules" if isinstance(known, Plan) and known.runtime == "modules" else "graph"
    check_solver(runtime, solver)
    check_model(model)
    try:
        check_own_checkpointing(model)
    except UsageError as error:
        raise UsageError(
            f"{error}; then name it here with current='every-layer', which is simulated on the model without it "
            "(planner.check looks at the model as it is, and names this checkpointing-already-on)"
        ) from error
    step = study(
        model,
        example_inputs,
        example_kwargs=example_kwargs,
        loss_fn=loss_fn,
        device=device,
        cost_model=cost_model,
        profile=profile,
        runtime=runtime,
        name=name,
        progress=progress,
        **training,
    )
    return audit_study(
        step,
        current,
        budget=budget,
        solver=solver,
        time_limit_seconds=time_limit_seconds,
        deterministic=deterministic,
        seed=seed,
        progress=progress,
    )
