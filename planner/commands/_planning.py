"""What ``plan`` and ``verify`` share: make or read a plan, run real steps where asked, report."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.commands import _asked
from planner.commands._terminal import quiet, reporting, show, write_json
from planner.common import timings
from planner.common.options import Budget, Offload, Search, Target, Training
from planner.errors import CaptureError, PlannerError, UsageError

if TYPE_CHECKING:
    from planner.ir.problem import Progress
    from planner.plans.plan import Plan


def check(args: argparse.Namespace) -> None:
    """Refuse at once what would fail only after minutes of work."""
    from planner.analysis.compatibility import check_strategy
    from planner.common.options import OFF
    from planner.common.units import parse_size

    _asked.check_solving(args)
    _asked.check_offload(args)
    if budget := args.budget or args.activation_budget:
        parse_size(budget, whole_bytes=2**60)
    plan_file = getattr(args, "plan", None)
    check_strategy(args.strategy, args.runtime, offload=args.offload, in_chunks=args.chunk not in (1, OFF))
    if args.strategy is not None:
        if plan_file:
            raise UsageError("--plan says what is done: leave --strategy out")
    elif not (budget or plan_file):
        saved = ", --plan PLAN" if hasattr(args, "plan") else ""
        raise UsageError(f"say what the plan is to be: --budget SIZE, --activation-budget SIZE, --strategy NAME{saved}")


def report_plan(
    args: argparse.Namespace,
    *,
    verify: bool,
    plan_file: str | None = None,
    write: Callable[[Plan], None] | None = None,
    show_tree: bool = False,
) -> int:
    """Make or read the plan, run real steps, write what else is asked for, and show all that."""
    from planner.plans.plan import NoPlanFitsError

    try:
        with quiet(args.debug), reporting(args.debug) as progress, timings.collected() as seconds:
            plan = _make(args, progress, verify=verify, plan_file=plan_file)
    except NoPlanFitsError as error:
        report = error.report
        write_json(report, args.json)
        if args.json != "-":
            from planner.report import render_infeasible

            show(lambda console: render_infeasible(report, console))
        raise
    if write:
        write(plan)
    report = plan.report(operations=args.operations)
    write_json({**report, "timings_seconds": seconds} if args.timings else report, args.json)
    if args.json != "-":
        from planner.report import render, render_timings

        show(lambda console: render(plan, console, show_operations=args.operations, show_tree=show_tree))
        if args.timings:
            show(lambda console: render_timings(seconds, console))
    _hold_to_measured(plan)
    return 0


def _make(args: argparse.Namespace, progress: Progress, *, verify: bool, plan_file: str | None) -> Plan:
    """Load the model, make or read the plan, and verify it where that is asked for."""
    from planner import api
    from planner.capture.memory import keep_freed_memory
    from planner.plans.plan import Plan

    saved = Plan.load(plan_file) if plan_file else None
    progress("building the model")
    if verify or args.cost_model == "measured":
        keep_freed_memory()  # this process is ours, and its times are to mean something
    loaded = _asked.load(args, real=verify)

    def planned() -> Plan:
        return api.plan(
            loaded.model,
            loaded.example_args,
            strategy=args.strategy,
            runtime=args.runtime,
            chunk=args.chunk,
            **_asked.of_model(loaded, progress),
            **_asked.keywords(args, Budget, Search, Offload, Target, Training),
        )

    try:
        plan = saved or planned()
    except CaptureError:
        if verify or args.runtime == "graph" or ":" not in (args.model or args.name):
            raise
        progress("building the model for real: what it runs may depend on data")
        loaded = _asked.load(args, real=True)
        plan = planned()
    if not verify:
        return plan
    progress("running real steps")
    with timings.stage("real steps"):
        verification = api.verify(
            loaded.model, loaded.example_args, plan, example_kwargs=loaded.example_kwargs, loss_fn=loaded.loss_fn
        )
    return dataclasses.replace(plan, verification=verification)


def _hold_to_measured(plan: Plan) -> None:
    """Fail if real steps broke what the plan promises."""
    measured = plan.verification
    if measured is None:
        return
    if not measured.agrees:
        first = measured.differences[0] if measured.differences else "see the report"
        same = f"the same numbers to within {measured.tolerance:g}" if measured.tolerance else "the same bits"
        lossy = "; leave out --offload-lossy" if measured.rounding_error is not None else ""
        raise PlannerError(f"the planned step does not give {same} as the step without recompute: {first}{lossy}")
    if measured.peak_bytes > plan.budget_bytes:
        raise PlannerError(
            f"the measured peak, {measured.peak_bytes} bytes, is above the budget of {plan.budget_bytes} bytes"
        )
