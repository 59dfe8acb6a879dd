"""From a model to a :class:`~planner.analysis.study.Study` of its step, and to the answers that are made of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from cost_models.measured import Profile
from planner.analysis.audit import Audit, audit_study, read_current
from planner.analysis.compatibility import check_solver, chunked_graph, offloading_runtime
from planner.analysis.study import Study
from planner.analysis.trade_off.curve import CurveSweep
from planner.analysis.trade_off.ranges import as_typed, check_budgets, parse_sizes
from planner.analysis.trade_off.sizes import SizeAxis, SizeSearch
from planner.analysis.trade_off.types import TradeOffCurve
from planner.capture.inputs import Inputs, LossFunction, check_model, check_own_checkpointing
from planner.capture.parallel import has_several_ranks
from planner.common.limits import Progress
from planner.common.options import LEAST_BYTES, OFF, Budget, Chunk, Offload, Search, Training, check_chunk, picked
from planner.common.units import Size
from planner.errors import UsageError
from planner.plans.plan import Plan
from planner.session.sizes import StudiesBySize
from planner.session.step import Options


def study(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    device: str | None = None,
    cost_model: str = "auto",
    profile: Profile | None = None,
    runtime: str = "graph",
    chunk: Chunk = OFF,
    deterministic: bool = False,
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
        In how many chunks to compute what makes the peak, or ``"off"``; percentages are then of the peak in chunks.
    deterministic : bool
        Whether plans made of it are to be the same every time: ``cost_model="auto"`` then measures nothing.
    **training
        The fields of :class:`planner.common.options.Training`: ``optimizer``, ``master_weights``, ``reserve``, ...

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
    options = Options.of(locals(), training=Training(**training), chunk=check_chunk(chunk))
    return _studies(model, options).at(Inputs.of(example_inputs, example_kwargs), loss_fn, beside_eager=True)


def _studies(model: nn.Module, options: Options) -> StudiesBySize:
    check_model(model)
    runtime, chunks = options.runtime, options.chunk
    if runtime not in ("graph", "modules"):
        raise UsageError(f"a step is studied for the runtime 'graph' or 'modules', not {runtime!r}")
    if not isinstance(chunks, int):
        raise UsageError("a step is studied in one number of chunks: give it, or use planner.plan with chunk='auto'")
    if chunks != 1:
        chunked_graph(runtime, several_devices=options.training.tensor_parallel > 1 or has_several_ranks())
    return StudiesBySize(model, options)


def what_if(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    budget: Size | None = None,
    points: int = 20,
    budgets: str | Iterable[Size] | None = None,
    batch_sizes: str | int | Iterable[int] | None = None,
    seq_lens: str | int | Iterable[int] | None = None,
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
    """Return the overhead of the best plan over the budget, from the smallest feasible one to none needed.

    Parameters
    ----------
    model : torch.nn.Module
    example_inputs : tensor, tuple or dict
    budget : int, float or str, optional
        A budget to ask about beside the points, together with 1 GiB more.
    points : int
        How many budgets, at equal distances.
    budgets : str or iterable of int or str, optional
        Where they lie, ``"4GiB..16GiB"``, or which they are, ``"4GiB,8GiB"`` or ``["4GiB", "8GiB"]``.
    batch_sizes, seq_lens : str, int or iterable of int, optional
        Sizes to ask about at ``budget``, ``"1..64"``, ``"1,2,4"`` or ``[1, 2, 4]``: the largest that fits, and how much
        each trains a second. The example inputs are repeated or cut to each: along the first dimension of every tensor
        that is as long there as the first, or along all others that are as long as the first tensor's second.
    runtime : str
        ``"graph"``, or ``"modules"`` for choices of checkpointed modules of the eager step, which have a solver of
        their own.
    solver, offload, host_budget, offload_at_least, offload_lossy, deterministic, seed
        See :func:`planner.plan`; with offload the curve is of plans that offload too.
    time_limit_seconds : float
        Roughly, for all points together; each size may take a fifth of it.
    progress : callable, optional
        Told in short lines how it stands.
    **options
        ``example_kwargs``, ``loss_fn``, ``device``, ``optimizer``, ...: see :func:`planner.study`.

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
    >>> curve = planner.what_if(model, torch.randn(256, 64), points=3)
    >>> curve.points[-1].overhead
    0.0
    """
    search, allowed = picked(Search, locals()), picked(Offload, locals())
    batches = None if batch_sizes is None else parse_sizes(as_typed(batch_sizes), what="batch sizes")
    lengths = None if seq_lens is None else parse_sizes(as_typed(seq_lens), what="sequence lengths")
    if (batches or lengths) and budget is None:
        raise UsageError("sizes are asked about at a budget: give budget, what is to fit")
    if points < 2:
        raise UsageError(f"a curve has at least 2 points, not {points}")
    Budget(budget=budget).check(or_none=True)
    if budgets is not None:
        check_budgets(budgets := as_typed(budgets))
    check_solver(runtime, solver)
    offloading_runtime(runtime, allowed)
    options = {"runtime": runtime, "deterministic": deterministic, "progress": progress, **options}
    studies, loss_fn = studies_by_size(model, **options), options.get("loss_fn")
    inputs = Inputs.of(example_inputs, options.get("example_kwargs"))
    asked = (("batch_size", batches, inputs.with_batch), ("seq_len", lengths, inputs.with_length))
    for _, sizes, resized in asked:
        studies.expect(resized(size) for size in (sizes.values[:2] if sizes else ()))
    step = studies.at(inputs, loss_fn, beside_eager=True)
    host = step.host_for(allowed)
    sweep = CurveSweep(step, search, points=points, budgets=budgets, asked=budget, host=host)
    sweep.run()
    curve = sweep.curve()
    if sweep.asked_bytes is None or not (batches or lengths):
        return curve

    def sized(resized: Callable[[int], Inputs], size: int) -> Study:
        return studies.at(resized(size), loss_fn)

    axes: dict[str, SizeAxis] = {}
    for option, sizes, resized in asked:
        if sizes is not None:
            how: dict[str, Any] = {"study_at": partial(sized, resized), "offload": allowed}
            found = SizeSearch.along(option, sizes, sweep.asked_bytes, search, samples=inputs.batch_size, **how)
            found.run()
            axes[option] = found.axis_so_far
    return replace(curve, batch_sizes=axes.get("batch_size"), seq_lens=axes.get("seq_len"))


def studies_by_size(model: nn.Module, **asked: Any) -> StudiesBySize:
    """Return the studies of a model's step at sizes of its inputs; the keywords are those of :func:`study`."""
    known = study.__kwdefaults__ or {}
    training = Training(**{name: value for name, value in asked.items() if name not in known})
    chunks = check_chunk(asked.get("chunk", OFF))
    return _studies(model, Options.of({**known, **asked}, training=training, chunk=chunks))


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
    cost_model: str = "auto",
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
        The fields of :class:`planner.common.options.Training`: ``optimizer``, ``master_weights``, ``reserve``, ...

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
    asked = locals()
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
    options = Options.of({**asked, "runtime": runtime}, budget=Budget(), training=Training(**training))
    step = _studies(model, options).at(Inputs.of(example_inputs, example_kwargs), loss_fn, beside_eager=True)
    return audit_study(step, current, options.search, budget)
