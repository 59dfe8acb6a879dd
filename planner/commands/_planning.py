"""What ``plan`` and ``verify`` share: make or read a plan, run real steps where asked, report."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from planner.commands import _asked
from planner.commands._terminal import hand_out, show
from planner.common import timings
from planner.common.limits import Progress
from planner.common.options import OFF, Budget, Offload, Search, Target, Training, picked
from planner.errors import PlannerError, UsageError

if TYPE_CHECKING:
    from planner.plans.plan import Plan
    from planner.zoo import ZooModel


def check(args: argparse.Namespace) -> None:
    """Refuse at once what would fail only after minutes of work."""
    from planner.analysis.compatibility import check_strategy

    _asked.check_solving(args)
    _asked.check_offload(args)
    plan_file = getattr(args, "plan", None)
    check_strategy(args.strategy, args.runtime, offload=args.offload, in_chunks=args.chunk not in (1, OFF))
    if args.strategy is not None:
        if plan_file:
            raise UsageError("--plan says what is done: leave --strategy out")
    elif not (names_a_budget(args) or plan_file) and args.verify:
        raise UsageError(
            "say what the plan is to be: --budget SIZE, --activation-budget SIZE, --strategy NAME, --plan FILE"
        )


def names_a_budget(args: argparse.Namespace) -> bool:
    """Whether it is said what the plan is to keep."""
    return bool(args.budget or args.activation_budget or args.strategy)


def report_budgets(args: argparse.Namespace) -> int:
    """Show budgets to choose from, where none was named; that is no plan, so it ends as wrong usage does."""
    import planner
    from planner.analysis.trade_off.suggest import suggest
    from planner.report import render_suggestions

    with _asked.working(args) as (progress, loaded):
        asked = _asked.keywords(args, Target, Training) | {"deterministic": args.deterministic}
        if args.runtime == "modules":
            asked["runtime"] = args.runtime
        study = _asked.ask_or_build(planner.study, args, loaded, progress, **asked)
        progress("solving for several budgets")
        found = suggest(study, picked(Search, vars(args)))
    hand_out(found.report(), args.json, partial(render_suggestions, found, args.typed))
    raise UsageError("no plan was made: name one of these budgets, or another, with --budget SIZE")


def report_plan(args: argparse.Namespace, write: Callable[[Plan], None] | None = None) -> int:
    """Make or read the plan, run real steps, write what else is asked for, and show all that."""
    from planner.plans.plan import NoPlanFitsError, Plan
    from planner.report import render, render_infeasible, render_timings

    saved = Plan.load(args.plan) if getattr(args, "plan", None) else None
    try:
        with timings.collected() as seconds, _asked.working(args, real=args.verify) as (progress, loaded):
            plan = _make(args, progress, loaded, saved)
    except NoPlanFitsError as error:
        hand_out(error.report, args.json, partial(render_infeasible, error.report))
        raise
    if write:
        write(plan)
    report = plan.report(operations=args.operations)
    draw = partial(render, plan, full=args.full, show_operations=args.operations, show_tree=args.tree)
    hand_out({**report, "timings_seconds": seconds} if args.timings else report, args.json, draw)
    if args.timings and args.json != "-":
        show(partial(render_timings, seconds))
    _hold_to_measured(plan)
    return 0


def _make(args: argparse.Namespace, progress: Progress, loaded: ZooModel, saved: Plan | None) -> Plan:
    """Make the plan, unless there is one, and verify it where that is asked for."""
    from planner import api

    asked = _asked.keywords(args, Budget, Search, Offload, Target, Training)
    asked |= {"strategy": args.strategy, "runtime": args.runtime, "chunk": args.chunk}
    if saved is not None:
        plan = saved
    elif args.verify or args.runtime == "graph":
        plan = _asked.ask(api.plan, loaded, progress, **asked)
    else:
        plan = _asked.ask_or_build(api.plan, args, loaded, progress, **asked)
    if not args.verify:
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
