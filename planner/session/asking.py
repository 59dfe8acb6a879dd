"""What-if for a model: its step is captured once, and every budget is asked of that."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner import solvers
from planner.analysis.compatibility import check_solver, offloading_runtime
from planner.analysis.trade_off.curve import CurveSweep
from planner.analysis.trade_off.ranges import check_budgets
from planner.analysis.trade_off.types import TradeOffCurve
from planner.common.limits import SolveLimits
from planner.common.units import parse_size
from planner.errors import UsageError
from planner.ir.host import LEAST_BYTES
from planner.ir.problem import Progress
from planner.plans.planning import Size
from planner.session.studying import study


def what_if(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    budget: Size | None = None,
    points: int = 20,
    budgets: str | None = None,
    runtime: str = "graph",
    solver: str = "auto",
    offload: bool = False,
    host_budget: Size | None = None,
    offload_at_least: Size = LEAST_BYTES,
    offload_lossy: bool = False,
    time_limit_seconds: float = 25.0,
    deterministic: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> TradeOffCurve:
    """Give the overhead of the best plan over the budget, from the smallest feasible one to none needed.

    Parameters
    ----------
    model : torch.nn.Module
    example_inputs : tensor, tuple or dict
    budget : int, float or str, optional
        A budget to ask about beside the points, together with 1 GiB more.
    points : int
        How many budgets, at equal distances.
    budgets : str, optional
        Where they lie, ``"4GiB..16GiB"``, or which they are, ``"4GiB,8GiB"``.
    runtime : str
        ``"graph"``, or ``"modules"`` for choices of checkpointed modules of the eager step, which have a solver of
        their own.
    solver, offload, host_budget, offload_at_least, offload_lossy, deterministic, seed
        See :func:`planner.plan`; with offload the curve is of plans that offload too.
    time_limit_seconds : float
        Roughly, for all points together.
    progress : callable, optional
        Told in short lines how it stands.
    **options
        ``example_kwargs``, ``loss_fn``, ``device``, ``optimizer``, ...: see :func:`planner.study`.

    Returns
    -------
    TradeOffCurve
        With its knee, and what 1 GiB more buys.

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
    >>> curve = planner.what_if(model, torch.randn(256, 64), points=3)
    >>> curve.points[-1].overhead
    0.0
    """
    if points < 2:
        raise UsageError(f"a curve has at least 2 points, not {points}")
    if budget is not None:
        parse_size(budget, whole_bytes=2**60)
    if budgets is not None:
        check_budgets(budgets)
    solvers.get(solver)
    check_solver(runtime, solver)
    offloading_runtime(runtime, offload=offload, lossy=offload_lossy)
    effort = SolveLimits(time_limit_seconds=time_limit_seconds, deterministic=deterministic, seed=seed)
    step = study(model, example_inputs, runtime=runtime, progress=progress, **options)
    host = step.host(host_budget, offload_at_least, lossy=offload_lossy) if offload else None
    tracing = CurveSweep(step, points=points, budgets=budgets, asked=budget, solver=solver, effort=effort, host=host)
    tracing.run(progress=progress)
    return tracing.curve()
