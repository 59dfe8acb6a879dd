"""What people call: plan, profile, auto_wrap and verify; and of a wrapped model its plan, and to be plain again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from cost_models.measured import MeasuredCosts, Profile
from planner import runtimes
from planner.analysis.compatibility import (
    check_can_run,
    check_solver,
    check_strategy,
    chunked_graph,
    graphs_runtime,
    offloading_runtime,
    whole_graph,
)
from planner.capture.device import entered, of_model
from planner.capture.inputs import Inputs, LossFunction, check_is_called, check_model
from planner.capture.joint_capture import is_fake
from planner.capture.meta import placed
from planner.capture.parallel import has_several_ranks, is_sharded, shards_of, whole
from planner.capture.planned_call import compiled_parts, install_planned_call, planned_call, remove_planned_call
from planner.capture.torch_internals import installed_call
from planner.common.limits import Progress
from planner.common.options import LEAST_BYTES, OFF, Budget, Chunk, Target, check_chunk
from planner.common.units import Size, is_share
from planner.diagnose.status import Status, metered
from planner.diagnose.verification import verify as _verify
from planner.errors import UsageError
from planner.findings.finding import collapsed
from planner.ir.static_memory import SHARDS
from planner.measure import loss
from planner.plans.pipeline_types import StagePlan
from planner.plans.plan import Plan, Verification
from planner.report.progress import tell
from planner.runtimes import Running
from planner.runtimes._backend import RUNTIMES, Backend
from planner.runtimes.auto import choose
from planner.session.capture_progress import working
from planner.session.eager_study import with_eager
from planner.session.step import Options, captured, cost, lower_step, offload_of, with_loss

ModelT = TypeVar("ModelT", bound=nn.Module)


def plan(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    budget: Size | None = None,
    activation_budget: Size | None = None,
    strategy: str | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    runtime: str = "auto",
    chunk: Chunk = OFF,
    solver: str = "auto",
    time_limit_seconds: float = 10.0,
    deterministic: bool = False,
    seed: int = 0,
    device: str | None = None,
    cost_model: str = "auto",
    profile: Profile | None = None,
    optimizer: str = "none",
    master_weights: bool = False,
    gradient_accumulation: bool = False,
    data_parallel: str = "none",
    ranks: int = 1,
    tensor_parallel: int = 1,
    reserve: Size = 0,
    arena: bool = False,
    cuda_graphs: bool = False,
    offload: bool = False,
    host_budget: Size | None = None,
    offload_at_least: Size = LEAST_BYTES,
    offload_lossy: bool = False,
    name: str = "",
    compare: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Plan one training step of a model under a memory budget. The model does not change.

    Parameters
    ----------
    model : torch.nn.Module
        Real, or built under ``planner.capture.fake_mode()`` to need no memory.
    example_inputs : tensor, tuple, dict or object
        What one step passes to the model: one tensor, a tuple of arguments, a dict of keywords, or one object that
        holds tensors.
    budget : int, float or str, optional
        What the device may hold at any moment, everything included. Bytes, ``"8GiB"``, ``"8GB"``, or ``"60%"``, which
        is a share of the peak of the model's own eager step.
    activation_budget : int, float or str, optional
        Instead of ``budget``: what the step may allocate on top of what is resident before it.
    strategy : str, optional
        What an established system does (``"every-2"``). Without a budget, the budget is the peak of this strategy.
    example_kwargs : mapping, optional
        Keyword arguments beside positional example inputs.
    loss_fn : callable, optional
        From the model's output to a scalar, if the model does not return its loss.
    runtime : str
        Name of the runtime of the plan. Each runtime can carry out other plans; ``"auto"`` picks.
    chunk : int or str
        In how many chunks to compute what makes the peak, or ``"off"``. ``"auto"`` tries several, if that makes a plan
        feasible or cheaper. Chunks change the last digits of loss and gradients, and need whole graphs.
    solver : str
        Name of a solver of whole graphs; ``"auto"`` picks, and is the only one for the runtime ``"modules"``.
    time_limit_seconds : float
        Roughly when the solver stops improving.
    deterministic : bool
        Count work instead of seconds, so that the same step gives the same plan every time.
    seed : int
        Of whatever draws random numbers in a solver.
    device : str, optional
        Accelerator to plan for; by default the one that the model is on.
    cost_model : str
        Name of a cost model. ``"roofline"`` is that of the device. ``"measured"`` runs each different operation here.
        ``"auto"`` measures for a moment if the model is real and its device is here. Otherwise it is the roofline.
    profile : Profile, optional
        Costs recorded before, by :func:`profile` or read from a file.
    optimizer : str
        One of ``planner.common.options.OPTIMIZERS`` (``"adamw"``, ``"adafactor"``, ``"adam8bit"``, ...): its state is
        resident, and its own step must fit too.
    master_weights : bool
        Whether parameters of 16 bits are updated through float32 copies.
    gradient_accumulation : bool
        Whether gradients of earlier backwards count as resident.
    data_parallel, ranks : str, int
        ``"ddp"`` or ``"fsdp2"`` over so many devices: what each holds, with buffers for communication.
    tensor_parallel : int
        How many devices share each layer. The plan is for one of them, and cannot be run.
    reserve : int, float or str
        What is to stay free of the budget: bytes, ``"1GiB"``, or ``"5%"`` of the device.
    arena : bool
        Whether the plan says what one arena takes in which all that the step allocates has a fixed place.
    cuda_graphs : bool
        Whether the step runs as CUDA graphs, which hold all its memory between steps: then the budget is for that, for
        copies of inputs, outputs and gradients, and for workspaces of the stream of the captures too.
    offload : bool
        Whether values may also wait in the host's memory between forward and backward.
    host_budget : int, float or str, optional
        What they may take of it: bytes, ``"64GiB"`` or ``"60%"``; by default half of what this machine has.
    offload_at_least : int, float or str
        Values below this size stay on the device.
    offload_lossy : bool
        Whether values of float32 wait there rounded to bfloat16, in half the room: gradients are then not bit-equal.
    name : str
        Name of the model in the report.
    compare : bool
        Whether to simulate the usual ways of checkpointing beside the plan, and to look for the smallest
        feasible peak.
    progress : callable, optional
        Told in short lines how it stands.

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
        If no plan fits, with the smallest budget for which there is one.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> planner.plan(model, torch.randn(256, 64), budget="80%").status
    'optimal'
    """
    options = Options.of(locals(), chunk=check_chunk(chunk))
    check_model(model)
    inputs = Inputs.of(example_inputs, example_kwargs)
    options = _settled(options)
    chosen = runtimes.get(options.runtime)
    begun = time.perf_counter()
    with working(model) as done, placed(model, inputs) as inputs, entered(of_model(model, inputs.args, inputs.kwargs)):
        options = _completed(model, options, loss_fn, inputs)
        looked = time.perf_counter() - begun
        made = chosen.plan(model, inputs, options)
        done("asked for", made)
    return replace(made, capture_seconds=made.capture_seconds + looked)


def _completed(model: nn.Module, options: Options, loss_fn: LossFunction | None, inputs: Inputs) -> Options:
    """Complete the options with what inputs of these sizes need outside of the captured graph."""
    return with_eager(model, with_loss(model, options, loss_fn, inputs), inputs)


def _settled(options: Options) -> Options:
    """Settle who is told how it stands, and the runtime; refuse what does not go together."""
    if options.search.progress is None:
        options = replace(options, search=replace(options.search, progress=tell))
    runtime, in_chunks = options.runtime, options.chunk != 1
    several_devices = options.training.tensor_parallel > 1
    if several_devices:
        runtime = whole_graph(runtime, "tensor parallelism is planned on the whole graph")
    if in_chunks:
        runtime = chunked_graph(runtime, several_devices=several_devices or has_several_ranks())
    runtime = graphs_runtime(offloading_runtime(runtime, options.offload), options.training, options.offload)
    plan = options.reused_plan
    check_solver(plan.runtime if plan is not None and runtime == "auto" else runtime, options.search.solver)
    check_strategy(options.strategy, runtime, offload=options.offload.offload, in_chunks=in_chunks)
    options.budget.check(or_none=options.strategy is not None)
    return replace(options, runtime=runtime)


def profile(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
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
    example_inputs, example_kwargs, loss_fn, name, progress
        See :func:`plan`.
    time_limit_seconds : float
        How long to measure; what is left then costs what the roofline says.

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
    asked = locals()
    check_model(model)
    inputs = Inputs.of(example_inputs, example_kwargs)
    options = Options.of(asked, target=Target(cost_model=MeasuredCosts.name))
    with entered(of_model(model, inputs.args, inputs.kwargs)):
        options = with_loss(model, options, loss_fn, inputs)
        step = lower_step(model, captured(model, inputs, options), options)
        costing = cost(model, step.lowered, step.spec, options, time_limit_seconds=time_limit_seconds)
    assert costing.profile is not None
    return costing.profile


def auto_wrap(
    model: ModelT,
    example_inputs: Any = None,
    *,
    budget: Size | None = None,
    activation_budget: Size | None = None,
    plan: Plan | None = None,
    replan: bool = False,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    runtime: str = "auto",
    chunk: Chunk = OFF,
    solver: str = "auto",
    time_limit_seconds: float = 10.0,
    deterministic: bool = False,
    seed: int = 0,
    cost_model: str = "auto",
    profile: Profile | None = None,
    optimizer: str = "none",
    master_weights: bool = False,
    gradient_accumulation: bool = False,
    data_parallel: str = "none",
    ranks: int = 1,
    reserve: Size = 0,
    arena: bool = False,
    cuda_graphs: bool = False,
    offload: bool = False,
    host_budget: Size | None = None,
    offload_at_least: Size = LEAST_BYTES,
    offload_lossy: bool = False,
    maximum_shapes: int = 64,
    progress: Progress | None = None,
) -> ModelT:
    """Make a model keep a memory budget while it trains: the same object, class, parameters and numbers.

    Parameters
    ----------
    model : torch.nn.Module
    example_inputs : tensor, tuple or dict, optional
        Plan at once for these inputs. Without them, the first training call is planned for its own inputs.
    budget, activation_budget : int, float or str, optional
        See :func:`plan`. With ``plan`` the budget is the plan's unless another is given.
    plan : Plan, optional
        A plan made before. If it belongs to another model or other shapes, the first call refuses it, or replaces it
        if ``replan``.
    replan : bool
        Whether a plan that does not match may be replaced.
    example_kwargs, loss_fn, runtime, chunk, solver, time_limit_seconds, deterministic, seed
        See :func:`plan`.
    cost_model, profile, optimizer, master_weights, gradient_accumulation, data_parallel, ranks, reserve, progress
        See :func:`plan`.
    arena : bool
        Whether all that a step allocates, loss included, lies at fixed places in one arena, from the third step on.
        On a CPU under Linux, with a C++ compiler; else a RuntimeUnsupportedError says what is missing.
    cuda_graphs : bool
        Whether forward and backward are captured into CUDA graphs, each launched by one call, from the second step of
        a kind on; see :func:`plan`. On a GPU, for one set of input sizes at a time, with the runtime ``"graph"``. What
        no graph can hold runs without them, with one warning that says why.
    offload, host_budget, offload_at_least, offload_lossy
        See :func:`plan`. With ``plan`` they are the plan's.
    maximum_shapes : int
        How many sets of input sizes may have graphs; the next one is refused with an error.

    Returns
    -------
    torch.nn.Module
        The same object. Calls without gradients run as before; other input sizes are captured when
        they come, and a plan at hand is kept if it fits them. A percentage is of the largest step so far.
        Wrapping again replaces the plan.

    Raises
    ------
    UsageError, CaptureError, InfeasibleBudgetError, PlanMismatchError
        At once if example inputs are given, else at the first call.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> x = torch.randn(256, 64)
    >>> planner.auto_wrap(model, x, budget="80%") is model
    True
    >>> model(x).sum().backward()
    """
    asked = locals()
    sharded = is_sharded(model)
    check_model(model, may_be_sharded=sharded and runtimes.get(runtime).runs_sharded)
    check_is_called(model)
    if is_fake(model):
        raise UsageError("a model built under a fake mode cannot run: plan it with planner.plan, wrap the real one")
    if running_on(model) is None and installed_call(model) is not None:
        raise UsageError(f"{type(model).__name__} is compiled by its compile(): wrap it without")
    first = runtimes.get(choose(model) if runtime == "auto" else runtime)
    if not first.runs_compiled_parts and (parts := compiled_parts(model)):
        warnings.warn(
            f"parts of {type(model).__name__} are compiled by their own compile() ({collapsed(parts)}): a planned step "
            "runs graphs of its own in their place, with eager's kernels. Leave compile() out, or have each block "
            "compiled as planned by runtime='inductor_blocks', or the whole step by runtime='inductor'",
            stacklevel=2,
        )
    if not maximum_shapes >= 1:
        raise UsageError(f"maximum_shapes must be at least 1, not {maximum_shapes}")
    if plan is not None:
        check_can_run(plan)
    if data_parallel == "none" and (shards := shards_of(model)) > 1:
        asked = {**asked, "data_parallel": "fsdp2", "ranks": shards}
    options = Options.of(
        {**asked, "compare": False}, chunk=check_chunk(chunk), reused_plan=plan, plan_collectively=True
    )
    if plan is not None and not options.budget.is_given:
        options = replace(options, budget=Budget(budget=plan.budget_bytes))
    if plan is not None and plan.offloading is not None:
        runtime = plan.runtime if runtime == "auto" else runtime
        options = replace(options, offload=offload_of(plan, offload_at_least), runtime=runtime)
    options = _settled(options)
    chosen = runtimes.get(options.runtime)
    replan = replan or plan is None  # only a plan that was given is held to its sizes
    if example_inputs is not None or example_kwargs:
        inputs = Inputs.of(example_inputs, example_kwargs)
        with (
            working(model) as done,
            whole(model),
            placed(model, inputs) as inputs,
            entered(of_model(model, inputs.args)),
        ):
            options = _completed(model, options, loss_fn, inputs)
            plan = chosen.plan(model, inputs, options, reuse=plan, must_match=not replan)
            done("before the first call", plan)
        options = options.after(plan)
    completes = loss_fn is not None or options.budget.is_share
    prepare = partial(_completed, model, options, loss_fn) if completes else None
    unwrap(model)
    install_planned_call(model, chosen.start(model, options, plan=plan, replan=replan, prepare=prepare))
    return model


def wrap_pipeline(
    schedule: Any,
    example_inputs: Any = None,
    *,
    budget: Size | None = None,
    activation_budget: Size | None = None,
    target: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    return_outputs: bool = True,
    solver: str = "auto",
    time_limit_seconds: float = 10.0,
    deterministic: bool = False,
    seed: int = 0,
    cost_model: str = "auto",
    profile: Profile | None = None,
    optimizer: str = "none",
    master_weights: bool = False,
    gradient_accumulation: bool = False,
    reserve: Size = 0,
    progress: Progress | None = None,
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
    example_inputs, example_kwargs, target
        What ``schedule.step`` is called with on this rank, the whole batch: inputs where the first stage is, the target
        where the last one is.
    budget, activation_budget : int, float or str
        What this rank may hold, or may allocate on top of what is resident; see :func:`plan`. ``"60%"`` is of what this
        rank holds without recompute.
    return_outputs : bool
        As ``schedule.step`` is called: whether the rank of the last stage keeps the outputs of all micro-batches, and
        puts them together.
    time_limit_seconds : float
        Roughly, for this rank.
    solver, deterministic, seed, cost_model, profile, optimizer, master_weights, reserve, progress
        See :func:`plan`.
    gradient_accumulation : bool
        Whether gradients of earlier steps are there when ``schedule.step`` begins.

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
    asked = locals()
    # What torch has for pipelines takes a while to import.
    from planner.capture.pipelining_internals import RankOfPipeline
    from planner.session.stage_planning import plan_rank

    options = _settled(Options.of({**asked, "compare": False}, runtime="graph"))
    rank = RankOfPipeline.of(schedule)
    has_inputs = example_inputs is not None or bool(example_kwargs)
    example = Inputs.of(example_inputs, example_kwargs) if has_inputs else Inputs((), {})
    for stage in rank.stages:
        unwrap(stage.submod)
    with entered(of_model(rank.stages[0].submod, example.args, example.kwargs)):
        made, planned = plan_rank(rank, example, target, options, return_outputs=return_outputs)
    later = []
    for one in planned:
        own = replace(one.options, budget=Budget(budget=one.plan.budget_bytes), reused_plan=one.plan)
        running = runtimes.get(own.runtime).start(one.module, own, plan=one.plan, replan=False)
        install_planned_call(one.module, running)
        later.append(getattr(running, "later_weights", None))
    rank.give_weights_by(later)
    return made


def verify(
    model: nn.Module,
    example_inputs: Any,
    plan: Plan,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    timed_steps: int = 5,
) -> Verification:
    """Run real steps with and without a plan, interleaved, and say what differs.

    Parameters
    ----------
    model : torch.nn.Module
        A real model; its parameters, buffers, gradients and the random state are put back afterwards.
    example_inputs : tensor, tuple, dict or object
        What the plan was made for.
    plan : Plan
    example_kwargs, loss_fn
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
        If the plan is of another model or of other shapes.
    """
    check_model(model)
    if is_fake(model):
        raise UsageError("a model built under a fake mode cannot run: build it for real to verify a plan")
    check_can_run(plan)
    if SHARDS in plan.fingerprint:
        raise UsageError(
            f"the plan is for parameters spread over {plan.fingerprint[SHARDS]} ranks, and verify runs one process: "
            "measure a step of the sharded model on one of them"
        )
    inputs = Inputs.of(example_inputs, example_kwargs)
    with entered(of_model(model, inputs.args, inputs.kwargs)):
        needed = loss.memory_of(model, inputs, loss_fn) if loss_fn is not None else None
        return _verify(model, inputs, plan, loss_fn=loss_fn, loss=needed, timed_steps=timed_steps)


def backend(
    *,
    budget: Size,
    runtime: str = "inductor",
    solver: str = "auto",
    time_limit_seconds: float = 10.0,
    deterministic: bool = False,
    seed: int = 0,
    cost_model: str = "auto",
    optimizer: str = "none",
    master_weights: bool = False,
    gradient_accumulation: bool = False,
    reserve: Size = 0,
    maximum_shapes: int = 64,
    progress: Progress | None = None,
) -> Backend:
    """Return a backend for ``torch.compile`` that keeps a memory budget while what it compiles trains.

    All graphs that one backend compiles share its budget, however Dynamo cuts the program. In the first step each
    runs eager kernels, under the plan with the lowest known peak. At the next step all graphs are known: each is
    planned for its share and compiled. What Python computes between graphs is not counted.

    Parameters
    ----------
    budget : int or str
        What the whole device may hold at any moment: bytes or ``"8GiB"``.
    runtime : str
        ``"inductor"``: Inductor writes the code and gets ``mode`` and ``options`` of ``torch.compile``. Code without
        gradients is compiled as if there were no plan. ``"graph"``: eager kernels, with eager's bits.
    solver, time_limit_seconds, deterministic, seed, cost_model, optimizer, master_weights, gradient_accumulation
        See :func:`plan`; the time limit is for each graph.
    reserve, progress
        See :func:`plan`.
    maximum_shapes : int
        How many sets of input sizes each graph may have code for.

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
    options = Options.of({**locals(), "compare": False})
    if runtime not in RUNTIMES:
        raise UsageError(f"a backend is of runtime {' or '.join(map(repr, RUNTIMES))}, not {runtime!r}")
    if is_share(budget):
        raise UsageError(f"budget={budget!r}: a backend does not know what the whole step takes; give bytes, or '8GiB'")
    check_solver(runtime, solver)
    if progress is None:
        options = replace(options, search=replace(options.search, progress=tell))
    return Backend(options)


def running_on(model: nn.Module) -> Running | None:
    """Return what runs in place of a model's call, if that is ours."""
    running = planned_call(model)
    return running if isinstance(running, Running) else None


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

    The first time starts to measure: steps are timed from then on, and the next one is recorded. Each later time says
    what was seen, and has one more step recorded, which takes longer. On CUDA that resets the allocator's peak counter.

    Parameters
    ----------
    model : torch.nn.Module
        One that :func:`planner.auto_wrap` has wrapped.

    Returns
    -------
    Status
        Peak in bytes and step time in seconds, measured beside promised; printing it gives a table.

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
