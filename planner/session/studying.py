"""Questions about a step: studies, what-if curves and audits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from planner.analysis.audit import Audit, audit_study, check_current
from planner.analysis.compatibility import check_offload, check_solver, chunked_graph
from planner.analysis.study import Study
from planner.analysis.trade_off.curve import CurveSweep
from planner.analysis.trade_off.ranges import as_typed, parse_sizes, points_and_range
from planner.analysis.trade_off.types import TradeOffCurve
from planner.capture.inputs import Inputs, LossFunction, check_model, check_own_checkpointing, check_plannable
from planner.capture.model_facts import has_several_ranks
from planner.common.options import AUTO, Budget, Offload, Runtime, Search, Target, Training
from planner.common.units import Size
from planner.errors import UsageError
from planner.session.eager_study import study_eager, with_eager
from planner.session.step import Options, captured, lower_as_run, study_lowered, with_loss
from planner.session.step_planning import chunked

_SIZES = {"batch_size": "batch sizes", "seq_len": "sequence lengths"}


def study(
    model: nn.Module,
    inputs: Any = None,
    *,
    loss_fn: LossFunction | None = None,
    training: Training | str = Training(),
    runtime: Runtime | str = "graph",
    search: Search | str = Search(),
    target: Target | str = Target(),
    name: str = "",
) -> Study:
    """Capture and cost one training step, so that many plans can be made of it.

    Parameters
    ----------
    model : torch.nn.Module
        Real, or built under ``planner.capture.fake_mode()`` to need no memory.
    inputs, loss_fn, training, target, name
        See :func:`planner.plan`.
    runtime : str or Runtime
        The runtime of the plans: ``"graph"``, or ``"modules"`` for the eager step with checkpointed modules. In chunks,
        percentages are of the peak in chunks.
    search : str or Search
        ``progress`` is called with each stage; with ``deterministic`` the cost model ``"auto"`` measures nothing.

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
    options = options_of_study(Options.of(locals()))
    return study_step(model, Inputs.of(inputs), options, loss_fn, beside_eager=True)


def options_of_study(options: Options, default: str = "graph") -> Options:
    """Return options for studies, which budgets are asked of; UsageError for what cannot be studied.

    A runtime that can be studied is named, also if ``Runtime(chunk=4)`` names none.
    """
    name, chunks = default if options.runtime.name == "auto" else options.runtime.name, options.runtime.chunk
    if name not in ("graph", "modules"):
        raise UsageError(f"a study is of the runtime 'graph' or 'modules', not {name!r}")
    if not isinstance(chunks, int):
        raise UsageError("a study is of one number of chunks: give it, or use planner.plan with Runtime(chunk='auto')")
    if chunks != 1:
        chunked_graph(name, several_devices=has_several_ranks())
    # What percentages are of is known to a study whatever reports are to compare.
    search = replace(options.search, compare=True)
    return replace(options, runtime=replace(options.runtime, name=name), budget=Budget(), search=search)


def study_step(
    model: nn.Module, inputs: Inputs, options: Options, loss_fn: LossFunction | None = None, beside_eager: bool = False
) -> Study:
    """Return the study of a step by :func:`options_of_study`; eager's own is recorded only with ``beside_eager``."""
    check_model(model)
    options = with_loss(model, options, loss_fn, inputs)
    if options.runtime.name == "modules":
        return study_eager(model, inputs, options)
    check_plannable(model, inputs)
    if beside_eager:
        options = with_eager(model, options, inputs)
    step = lower_as_run(model, captured(model, inputs, options), options)
    if isinstance(options.runtime.chunk, int) and options.runtime.chunk != 1:
        step = chunked(model, step, options.runtime.chunk, options)
    return study_lowered(model, step, options)


def what_if(
    model: nn.Module,
    inputs: Any = None,
    *,
    budget: Budget | Size | None = None,
    budgets: int | str | Iterable[Size] = 20,
    sizes: Mapping[str, str | int | Iterable[int]] | None = None,
    loss_fn: LossFunction | None = None,
    offload: Offload | bool | str = AUTO,
    training: Training | str = Training(),
    runtime: Runtime | str = "graph",
    search: Search | str = Search(time_limit_seconds=25.0),
    target: Target | str = Target(),
) -> TradeOffCurve:
    """Return the best overhead over the budget, from the smallest feasible budget to the peak without recompute.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : tensor, tuple, dict, Inputs or object
        See :func:`planner.plan`.
    budget : int, float or str, optional
        A budget to ask about beside the curve, together with 1 GiB more.
    budgets : int, str or iterable of int or str
        How many budgets, at equal distances; where they lie, ``"4GiB..16GiB"``, or with their number,
        ``"4GiB..16GiB:8"``; or which they are, ``"4GiB,8GiB"`` or ``["4GiB", "8GiB"]``.
    sizes : mapping, optional
        Sizes to ask about at ``budget``, by ``"batch_size"`` or ``"seq_len"``: ``"1..64"``, ``"1,2,4"`` or
        ``[1, 2, 4]``. The largest that fits is found, and the throughput of each. The inputs are repeated or
        cut to each: along the first dimension of every tensor that is as long there as the first, or along all others
        that are as long as the first tensor's second.
    loss_fn, offload, training, target
        See :func:`planner.plan`; with offload the curve is of plans that offload too.
    runtime : str or Runtime
        ``"graph"``, or ``"modules"`` for choices of checkpointed modules of the eager step, which have a solver of
        their own.
    search : str or Search
        See :func:`planner.plan`. The time limit is for all points together; each size may take a fifth of it.

    Returns
    -------
    TradeOffCurve
        With its knee, what 1 GiB more buys, and an axis for the sizes that were asked about.

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
    >>> curve = planner.what_if(model, torch.randn(256, 64), budgets=3)
    >>> curve.points[-1].overhead
    0.0
    """
    asked_for = Options.of(locals())
    search, budget = asked_for.search, asked_for.budget.size
    if unknown := set(sizes or {}) - set(_SIZES):
        raise UsageError(f"sizes are named {' or '.join(map(repr, _SIZES))}, not {min(unknown)!r}")
    asked = {name: parse_sizes(as_typed(wanted), what=_SIZES[name]) for name, wanted in (sizes or {}).items()}
    if asked and budget is None:
        raise UsageError("sizes need a budget that they are to fit: give budget")
    points, typed = points_and_range(budgets)
    asked_for.budget.check(or_none=True)
    options, example = options_of_study(asked_for), Inputs.of(inputs)
    check_solver(options.runtime.name, search.solver)
    check_offload(options.runtime.name, options.offload)
    resized = {"batch_size": example.with_batch, "seq_len": example.with_length}
    step = study_step(model, example, options, loss_fn, beside_eager=True)
    host = step.host_for(options.offload, search)
    sweep = CurveSweep(step, search, points=points, budgets=typed, asked=budget, host=host)
    sweep.run()

    def sized(name: str, size: int) -> Study:
        return study_step(model, resized[name](size), options, loss_fn)

    samples = example.batch_size if asked else 1
    return sweep.with_sizes(asked, sized, samples=samples, offload=options.offload)


def audit(
    model: nn.Module,
    inputs: Any = None,
    *,
    current: str,
    budget: Budget | Size | None = None,
    loss_fn: LossFunction | None = None,
    training: Training | str = Training(),
    runtime: Runtime | str = "auto",
    search: Search | str = Search(),
    target: Target | str = Target(),
    name: str = "",
) -> Audit:
    """Compare a model's present checkpointing with the best plan at the same peak.

    Parameters
    ----------
    model : torch.nn.Module
        Without checkpointing of its own: ``current`` is simulated on it.
    current : str
        ``"none"``, ``"every-layer"``, ``"every-2"`` (every second block, or another number), ``"sqrt"`` (segments of
        the forward, about as many as the square root of the places to cut), or another strategy.
    budget : int, float or str, optional
        A budget of the whole device; the best plan within it is searched for too.
    runtime : str or Runtime
        ``"graph"``, or ``"modules"`` for choices of checkpointed modules of the eager step; ``"auto"`` is
        ``"graph"``.
    search : str or Search
        See :func:`planner.plan`; the time limit is for each of the two searches.
    inputs, loss_fn, training, target, name
        See :func:`planner.plan`.

    Returns
    -------
    Audit

    Raises
    ------
    UsageError
        If an argument is wrong, or the model checkpoints itself.
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
    asked_for = Options.of(locals())
    check_current(current)  # refused before minutes of capture
    options = options_of_study(asked_for, "graph")
    check_solver(options.runtime.name, options.search.solver)
    check_model(model)
    try:
        check_own_checkpointing(model)
    except UsageError as error:
        raise UsageError(
            f"{error}; then name it here with current='every-layer', which is simulated on the model without it "
            "(planner.check looks at the model as it is, and names this checkpointing-already-on)"
        ) from error
    step = study_step(model, Inputs.of(inputs), options, loss_fn, beside_eager=True)
    return audit_study(step, current, asked_for.search, asked_for.budget.size)
