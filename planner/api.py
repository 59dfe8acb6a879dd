"""The public functions that plan, wrap, profile and verify a model; :mod:`planner.session.studying` has the others."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from cost_models.measured import MeasuredCosts, Profile
from planner import runtimes
from planner.analysis.compatibility import check_can_run, check_offload, check_solver, check_strategy, chunked_graph
from planner.capture import model_facts as facts
from planner.capture.inputs import Inputs, LossFunction, check_is_called, check_model, placed
from planner.capture.planned_call import install_planned_call, planned_call, remove_planned_call
from planner.capture.torch_internals import entered, installed_call
from planner.common.limits import Progress
from planner.common.options import AUTO, Budget, Offload, Runtime, Search, Target, Training
from planner.common.units import Size
from planner.diagnose.status import Status, metered
from planner.diagnose.verification import verify as _verify
from planner.errors import UsageError
from planner.findings.finding import collapsed
from planner.ir.policy import Policy
from planner.ir.static_memory import SHARDS, LossMemory
from planner.measure import loss
from planner.plans.plan import Plan, Verification
from planner.report.progress import tell
from planner.runtimes import PlannedModel, ReplannedModel
from planner.runtimes._backend import RUNTIMES, Backend
from planner.runtimes._observed import Observable, ObservedCalls, before_observing
from planner.runtimes.auto import choose
from planner.session.capture_progress import log_progress
from planner.session.eager_study import with_eager
from planner.session.rank_consensus import who_agrees
from planner.session.step import Options, captured, cost, lower_step, offload_of, with_loss

ModelT = TypeVar("ModelT", bound=nn.Module)


def plan(
    model: nn.Module,
    inputs: Any = None,
    *,
    budget: Budget | Plan | Size | None = None,
    loss_fn: LossFunction | None = None,
    policy: Policy | None = None,
    offload: Offload | bool | str = AUTO,
    training: Training | str = Training(),
    runtime: Runtime | str = "auto",
    search: Search | str = Search(),
    target: Target | str = Target(),
    name: str = "",
) -> Plan:
    """Plan one training step of a model under a memory budget. The model does not change.

    Parameters
    ----------
    model : torch.nn.Module
        Real, or built under ``planner.capture.fake_mode()`` to need no memory.
    inputs : tensor, tuple, dict, Inputs or object
        What one step passes to the model: one tensor, a tuple of arguments, a dict of keywords, ``planner.Inputs`` for
        both, or one object that holds tensors.
    budget : int, float, str or Budget
        What the device may hold at any moment, everything included: bytes, ``"8GiB"``, ``"8GB"``, or ``"60%"``, which
        is a share of the peak of the model's own eager step. ``planner.Budget(activations=...)`` is for what the step
        may allocate on top of what is resident; ``planner.Budget(strategy="every-2")`` for what an established system
        does.
    loss_fn : callable, optional
        From the model's output to a scalar, if the model does not return its loss.
    policy : callable, optional
        Decides single operations of the forward beside the budget: a function of a ``planner.PolicyOperation`` (name,
        module, signature, bytes, FLOPs) that answers ``"save"``, ``"recompute"``, ``"offload"`` or None, which leaves
        the decision to the solver. If it offloads, nothing else is offloaded.
    offload : bool, str or Offload
        Whether values may also wait in the host's memory between forward and backward. ``"auto"``: on a GPU with a
        known link to it, where that saves more than half a point of the step, or no plan fits without.
    training : str or Training
        The optimizer's name (``"adamw"``), or all that a training loop holds in memory.
    runtime : str or Runtime
        Name of the runtime of the plan. Each runtime can carry out different plans; ``"auto"`` picks.
    search : str or Search
        Name of a solver, or its limits as well.
    target : str or Target, optional
        Name of the device to plan for, or the cost model as well. By default the model's device.
    name : str
        Name of the model in the report.

    Returns
    -------
    Plan

    Raises
    ------
    UsageError
        If an argument is wrong.
    CaptureError
        If the model cannot be captured as one graph.
    InfeasibleBudgetError
        If no plan fits; it names the smallest budget for which one is known.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> planner.plan(model, torch.randn(256, 64), budget="80%").status
    'optimal'
    """
    options = Options.of(locals())
    check_model(model)
    example = Inputs.of(inputs)
    options = _settled(options)
    chosen = runtimes.get(options.runtime.name)
    begun = time.perf_counter()
    with (
        log_progress(type(model).__name__) as done,
        placed(model, example) as example,
        entered(facts.of_model(model, example.args, example.kwargs)),
    ):
        options = _completed(model, options, loss_fn, example)
        looked = time.perf_counter() - begun
        made = chosen.plan(model, example, options)
        done("asked for", made)
    return replace(made, capture_seconds=made.capture_seconds + looked)


def _completed(model: nn.Module, options: Options, loss_fn: LossFunction | None, inputs: Inputs) -> Options:
    """Complete the options with what inputs of these sizes need outside of the captured graph."""
    return with_eager(model, with_loss(model, options, loss_fn, inputs), inputs)


def _settled(options: Options) -> Options:
    """Settle who is told how it stands, and the runtime; refuse what does not go together."""
    if options.search.progress is None:
        options = replace(options, search=replace(options.search, progress=tell))
    runtime, in_chunks = options.runtime.name, options.runtime.chunk != 1
    if in_chunks:
        runtime = chunked_graph(runtime, several_devices=facts.has_several_ranks())
    check_offload(runtime, options.offload)
    carrier = replace(options.runtime, name=runtime)
    plan = options.reused_plan
    check_solver(plan.runtime if plan is not None and carrier.name == "auto" else carrier.name, options.search.solver)
    check_strategy(options.budget.strategy, carrier.name, offload=options.offload.enabled is True, in_chunks=in_chunks)
    options.budget.check(or_none=options.budget.strategy is not None)
    return replace(options, runtime=carrier)


def profile(
    model: nn.Module,
    inputs: Any = None,
    *,
    loss_fn: LossFunction | None = None,
    time_limit_seconds: float = 60.0,
    name: str = "",
    progress: Progress | None = None,
) -> Profile:
    """Measure what each different operation of a step costs on the device that the model is on.

    Parameters
    ----------
    model : torch.nn.Module
        Real, or built under ``planner.capture.fake_mode()`` to need no memory; one operation at a time is run.
    inputs, loss_fn, name
        See :func:`plan`.
    time_limit_seconds : float
        How long to measure; what is left then costs what the roofline says.
    progress : callable, optional
        Called with short lines on the progress.

    Returns
    -------
    Profile
        For :func:`plan`, or for a file by ``planner.save_profile``.

    Raises
    ------
    UsageError
        If an argument is wrong.
    CaptureError
        If the model cannot be captured as one graph.
    """
    check_model(model)
    example = Inputs.of(inputs)
    search = Search(time_limit_seconds=time_limit_seconds, progress=progress)
    options = Options(search=search, target=Target(cost_model=MeasuredCosts.name), name=name)
    with entered(facts.of_model(model, example.args, example.kwargs)):
        options = with_loss(model, options, loss_fn, example)
        step = lower_step(model, captured(model, example, options), options)
        costing = cost(model, step.lowered, step.spec, options, time_limit_seconds=time_limit_seconds)
    assert costing.profile is not None
    return costing.profile


def auto_wrap(
    model: ModelT,
    inputs: Any = None,
    *,
    budget: Budget | Plan | Size | None = None,
    loss_fn: LossFunction | None = None,
    policy: Policy | None = None,
    offload: Offload | bool | str = AUTO,
    training: Training | str = Training(),
    runtime: Runtime | str = "auto",
    search: Search | str = Search(),
    target: Target | str = Target(),
) -> ModelT:
    """Make a model keep a memory budget while it trains: the same object, class, parameters and numbers.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : tensor, tuple, dict, Inputs or object, optional
        Plan at once for these inputs. Without them, the first training call is planned for its own inputs.
    budget : int, float, str, Budget or Plan
        See :func:`plan`. An existing plan is applied; if it belongs to another model or other shapes, the first call
        refuses it, or replaces it if ``planner.Budget(plan=..., replan=True)`` says so.
    loss_fn, policy, training, search, target
        See :func:`plan`. ``training``: the number of ranks of a sharded model is read from the model.
    offload : bool, str or Offload
        See :func:`plan`. A given plan offloads what it names.
    runtime : str or Runtime
        See :func:`plan`.

    Returns
    -------
    torch.nn.Module
        The same object. Calls without gradients run as before; other input sizes are captured when
        they occur, and an existing plan is kept if it fits them. A percentage is of the largest step so far.
        Wrapping again replaces the plan.

    Raises
    ------
    UsageError, CaptureError, InfeasibleBudgetError, PlanMismatchError
        At once if inputs are given, else at the first call.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> x = torch.randn(256, 64)
    >>> planner.auto_wrap(model, x, budget="80%") is model
    True
    >>> model(x).sum().backward()
    """
    options = replace(Options.of(locals()), plan_collectively=True)
    _check_can_wrap(model, options.runtime)
    plan, replan = options.budget.plan, options.budget.replan
    options = _as_trained(model, options if plan is None else _as_planned(options, plan))
    name = choose(model) if options.runtime.name == "auto" else options.runtime.name
    plans_blocks = name != "modules" and runtimes.get(name).runs_sharded
    around = Observable(
        lambda: model,
        target=options.target.device,
        is_alone=not (facts.has_several_ranks() or facts.is_sharded(model)),
        plan_together=facts.has_several_ranks() and (plans_blocks or bool(who_agrees(model, options))),
        has_loss=loss_fn is not None,
    )
    may_drop = options.training.outputs == AUTO and plan is None and around.is_observed
    options = before_observing(_settled(replace(options, search=replace(options.search, compare=False))), around)
    chosen = runtimes.get(options.runtime.name)
    replan = replan or plan is None  # only a plan that was given is held to its sizes
    completes = loss_fn is not None or options.budget.is_share

    def start(options: Options, plan: Plan | None) -> ReplannedModel:
        prepare = (lambda options, inputs: _completed(model, options, loss_fn, inputs)) if completes else None
        return chosen.start(model, options, plan=plan, replan=replan, prepare=prepare)

    calls = ObservedCalls(around, options, start, plan, may_drop)
    if inputs is not None:
        example = Inputs.of(inputs)
        with (
            log_progress(type(model).__name__) as done,
            facts.whole(model),
            placed(model, example) as example,
            entered(facts.of_model(model, example.args)),
        ):
            plan = calls.plan_for(example)
            done("before the first call", plan)
        if facts.of_model(model).type == "meta":  # what was captured is of tensors that stood in for the model's
            calls = ObservedCalls(around, options.after(plan), start, plan, may_drop)
    unwrap(model)
    install_planned_call(model, calls)
    return model


def _check_can_wrap(model: nn.Module, runtime: Runtime) -> None:
    """Refuse models that cannot run planned; warn of parts whose own compiled code would not run."""
    sharded = facts.is_sharded(model)
    check_model(model, may_be_sharded=sharded and runtimes.get(runtime.name).runs_sharded)
    check_is_called(model)
    if facts.is_fake(model):
        raise UsageError("a model built under a fake mode cannot run: plan it with planner.plan, wrap the real one")
    if running_on(model) is None and installed_call(model) is not None:
        raise UsageError(f"{type(model).__name__} is compiled by its compile(): leave compile() out")
    first = runtimes.get(choose(model) if runtime.name == "auto" else runtime.name)
    if not first.runs_compiled_parts and (parts := facts.compiled_parts(model)):
        warnings.warn(
            f"parts of {type(model).__name__} are compiled by their own compile() ({collapsed(parts)}): a planned step "
            "runs graphs of its own in their place, with eager's kernels. Leave compile() out, or have each block "
            "compiled as planned by runtime='inductor_blocks', or the whole step by runtime='inductor'",
            stacklevel=3,
        )


def _as_trained(model: nn.Module, options: Options) -> Options:
    """Read off a sharded model over how many ranks it is spread."""
    if options.training.data_parallel == "none" and (shards := facts.shards_of(model)) > 1:
        return replace(options, training=replace(options.training, data_parallel="fsdp2", ranks=shards))
    return options


def _as_planned(options: Options, plan: Plan) -> Options:
    """Return the options for a plan that was made before: its budget, unless there is another, and its offload."""
    check_can_run(plan)
    options = replace(options, reused_plan=plan, loss=LossMemory.of(plan.fingerprint))
    if not options.budget.is_given:
        options = replace(options, budget=Budget(plan.budget_bytes))
    if plan.offloading is None:
        return options
    name = plan.runtime if options.runtime.name == "auto" else options.runtime.name
    offload = offload_of(plan, options.offload.at_least)
    return replace(options, offload=offload, runtime=replace(options.runtime, name=name))


def verify(
    model: nn.Module, inputs: Any, plan: Plan, *, loss_fn: LossFunction | None = None, timed_steps: int = 5
) -> Verification:
    """Run real steps with and without a plan, interleaved, and say what differs.

    Parameters
    ----------
    model : torch.nn.Module
        A real model; its parameters, buffers, gradients and the random state are put back afterwards.
    inputs : tensor, tuple, dict, Inputs or object
        What the plan was made for.
    plan : Plan
    loss_fn
        See :func:`plan`.
    timed_steps : int
        Pairs of steps that are timed; the overhead is the median of their ratios.

    Returns
    -------
    Verification
        Measured peaks, of the whole device; the measured overhead; whether loss, gradients and buffers agree to the
        last bit, and what does not.

    Raises
    ------
    UsageError
        If an argument is wrong, or the plan cannot be run here.
    PlanMismatchError
        If the plan belongs to another model or to other shapes.
    """
    check_model(model)
    if timed_steps < 1:
        raise UsageError(f"timed_steps={timed_steps}: at least one step is timed")
    if facts.is_fake(model):
        raise UsageError("a model built under a fake mode cannot run: build it for real to verify a plan")
    check_can_run(plan)
    if SHARDS in plan.fingerprint:
        raise UsageError(
            f"the plan is for parameters spread over {plan.fingerprint[SHARDS]} ranks, and verify runs one process: "
            "measure a step of the sharded model on one of them"
        )
    example = Inputs.of(inputs)
    with entered(facts.of_model(model, example.args, example.kwargs)):
        needed = loss.memory_of(model, example, loss_fn) if loss_fn is not None else LossMemory.of(plan.fingerprint)
        return _verify(model, example, plan, loss_fn=loss_fn, loss=needed, timed_steps=timed_steps)


def backend(
    *,
    budget: Size,
    offload: Offload | bool = False,
    training: Training | str = Training(),
    runtime: Runtime | str = "inductor",
    search: Search | str = Search(),
    target: Target | str = Target(),
) -> Backend:
    """Return a backend for ``torch.compile`` that keeps a memory budget while what it compiles trains.

    All graphs that one backend compiles share its budget, however Dynamo cuts the program. In the first step each
    runs eager kernels, under the plan with the lowest known peak. At the next step all graphs are known: each is
    planned for its share and compiled. What Python computes between graphs is not counted.

    Parameters
    ----------
    budget : int or str
        What the whole device may hold at any moment: bytes or ``"8GiB"``.
    offload : bool or Offload
        See :func:`plan`; a host budget is what each graph may take of the host's memory.
    runtime : str or Runtime
        ``"inductor"``: Inductor writes the code and gets ``mode`` and ``options`` of ``torch.compile``. Code without
        gradients is compiled as if there were no plan. ``"graph"``: eager kernels, with eager's bits.
    training, search, target
        See :func:`plan`; the time limit is for each graph.

    Returns
    -------
    Backend
        For ``torch.compile(..., backend=...)``. Printing it says what each graph may hold; ``plans`` has them all.

    Raises
    ------
    UsageError
        If an argument is wrong.
    UsageError, CaptureError, InfeasibleBudgetError, RuntimeUnsupportedError
        When the compiled program is called: if ``mode`` or ``options`` exclude a plan, if the program cannot be
        planned, or if no plan keeps the budget.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> compiled = torch.compile(model, backend=planner.backend(budget="1GiB", runtime="graph"))
    >>> compiled(torch.randn(256, 64)).sum().backward()
    """
    options = Options.of(locals())
    if options.runtime.name not in RUNTIMES:
        raise UsageError(f"a backend is of runtime {' or '.join(map(repr, RUNTIMES))}, not {options.runtime.name!r}")
    if options.budget.is_share or options.budget.size is None:
        raise UsageError(f"budget={budget!r}: a backend does not know what the whole step takes; give bytes, or '8GiB'")
    check_solver(options.runtime.name, options.search.solver)
    check_offload(options.runtime.name, options.offload)
    search = replace(options.search, compare=False, progress=options.search.progress or tell)
    return Backend(replace(options, search=search))


def running_on(model: nn.Module) -> PlannedModel | None:
    """Return what runs instead of a model's call, if that is ours."""
    running = planned_call(model)
    return running if isinstance(running, PlannedModel) else None


def plan_of(model: nn.Module) -> Plan:
    """Return the plan in force: the one of the input sizes that ran last.

    Parameters
    ----------
    model : torch.nn.Module
        One that :func:`planner.auto_wrap` has wrapped.

    Returns
    -------
    Plan

    Raises
    ------
    UsageError
        If the model is not wrapped, or has not been planned yet.
    """
    running = running_on(model)
    if running is None:
        raise UsageError(f"{type(model).__name__} is not wrapped: call planner.auto_wrap(model, budget=...) first")
    if running.plan is None:
        raise UsageError(f"{type(model).__name__} is not planned yet: that happens at its first training call")
    return running.plan


def status(model: nn.Module) -> Status:
    """Say how the last training steps compare with what the plan in force promises.

    The first time starts to measure: steps are timed from then on, and the next one is measured. Each later time says
    what was seen, and has one more step measured, which takes longer.

    Parameters
    ----------
    model : torch.nn.Module
        One that :func:`planner.auto_wrap` has wrapped.

    Returns
    -------
    Status
        Peak in bytes and step time in seconds, as measured and as promised; printing it shows a table.

    Raises
    ------
    UsageError
        If the model is not wrapped, or has not been planned yet.

    Warns
    -----
    UserWarning
        If memory is off by more than 1%, or time by more than 25% where it was predicted from measured operations.
    """
    plan_of(model)
    running = running_on(model)
    assert running is not None
    meter = metered(model, running)
    if meter is not running:
        install_planned_call(model, meter)
    found = meter.status()
    for line in found.warnings:
        warnings.warn(line, stacklevel=2)
    return found


def unwrap(model: ModelT) -> ModelT:
    """Undo :func:`planner.auto_wrap`; a model that is not wrapped is left as it is.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    torch.nn.Module
        The same object.
    """
    running = running_on(model)
    if running is not None:
        running.stop()
    remove_planned_call(model)
    return model
