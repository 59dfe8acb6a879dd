"""``plan`` and ``verify``: plan a model, run real steps where that is asked for, report."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from functools import partial
from typing import TYPE_CHECKING

from planner.commands import _asked
from planner.commands._options import AboutModel, Parser, budget_options, planning_options
from planner.commands._terminal import hand_out
from planner.common.limits import Progress
from planner.common.options import OFF, Budget, Offload, Runtime, Search, Target, Training
from planner.common.program import program
from planner.errors import PlannerError, UsageError

if TYPE_CHECKING:
    from planner.plans.plan import Plan
    from planner.report.comparisons import ToCopy
    from planner.zoo import ZooModel


class _Plan(AboutModel):
    name = "plan"
    summary = "plan a model; nothing is run"
    examples = (
        "plan gpt2 --budget 60%",
        "plan my_model.py:make --budget 8GiB --optimizer adamw --save my.plan --verify",
        "plan minigpt --strategy every-2 --verify",
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        budget_options(parser)
        results = planning_options(parser)
        results.add_argument("--save", metavar="PLAN", help="write the plan, for auto_wrap and verify")
        results.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
        results.add_argument("--verify", action="store_true", help="run real steps with and without the plan")

    def run(self, args: argparse.Namespace) -> int:
        _check(args)
        _asked.check_writable(args.save, args.html)
        return _report_plan(args)


class _Verify(AboutModel):
    name = "verify"
    summary = "plan, and run real steps"
    examples = ("verify minigpt --plan minigpt.plan", "verify my_model.py:make --budget 70% --cost-model measured")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        budget_options(parser).add_argument("--plan", metavar="PLAN", help="a saved plan, instead of a budget")
        planning_options(parser)
        parser.set_defaults(verify=True)

    def run(self, args: argparse.Namespace) -> int:
        _check(args)
        return _report_plan(args)


def _write(args: argparse.Namespace, plan: Plan, to_copy: ToCopy) -> None:
    from planner.common.atomic import write_text
    from planner.report.page import to_html

    if getattr(args, "save", None):
        plan.save(args.save)
    if getattr(args, "html", None):
        write_text(args.html, to_html(plan, to_copy))


def _what_if(args: argparse.Namespace) -> str:
    """Write what shows the curve of the same step."""
    from planner.commands.what_if import COMMAND as WHAT_IF

    parser = Parser(parents=WHAT_IF.parents(), add_help=False)
    WHAT_IF.add_options(parser)
    return shlex.join([WHAT_IF.name, *parser.typed(args)])


def _check(args: argparse.Namespace) -> None:
    """Check the options before minutes of work."""
    from planner.analysis.compatibility import check_strategy

    _asked.check_solving(args)
    _asked.check_offload(args)
    plan_file = getattr(args, "plan", None)
    check_strategy(args.strategy, args.runtime, offload=args.offload is True, in_chunks=args.chunk not in (1, OFF))
    if args.strategy is not None:
        if plan_file:
            raise UsageError("--plan and --strategy exclude each other: leave one out")
    elif not (args.budget or args.activation_budget or plan_file):
        named = ", --plan FILE" if hasattr(args, "plan") else ""
        raise UsageError(
            f"say what to plan for: --budget SIZE, --activation-budget SIZE, --strategy NAME{named}; "
            f"'{program()} {_what_if(args)}' shows what each budget costs"
        )


def _report_plan(args: argparse.Namespace) -> int:
    """Make or read the plan, run real steps, write what else is asked for, and show all that."""
    from planner.plans.plan import NoPlanFitsError, Plan
    from planner.report import render, render_infeasible
    from planner.report.comparisons import ToCopy

    saved = Plan.load(args.plan) if getattr(args, "plan", None) else None
    try:
        with _asked.working(args, real=args.verify) as (progress, loaded):
            plan = _make(args, progress, loaded, saved)
            to_copy = ToCopy(_asked.call(args, has_loss=loaded.loss_fn is not None), _what_if(args))
    except NoPlanFitsError as error:
        hand_out(error.report, args.json, partial(render_infeasible, error.report))
        raise
    _write(args, plan, to_copy)
    hand_out(plan.report(), args.json, partial(render, plan, full=args.full, to_copy=to_copy))
    _hold_to_measured(plan)
    return 0


def _make(args: argparse.Namespace, progress: Progress, loaded: ZooModel, saved: Plan | None) -> Plan:
    """Make the plan unless one was loaded, and verify it if asked for."""
    from planner import api

    asked = _asked.keywords(args, Budget, Search, Offload, Runtime, Target, Training)
    if saved is not None:
        plan = saved
    elif args.verify or args.runtime == "graph":
        plan = _asked.ask(api.plan, loaded, progress, **asked)
    else:
        plan = _asked.ask_or_build(api.plan, args, loaded, progress, **asked)
    if not args.verify:
        return plan
    progress("running real steps")
    verification = api.verify(loaded.model, _asked.inputs_of(loaded), plan, loss_fn=loaded.loss_fn)
    return dataclasses.replace(plan, verification=verification)


def _hold_to_measured(plan: Plan) -> None:
    """Fail if real steps exceed the plan's peak or differ in bits."""
    measured = plan.verification
    if measured is None:
        return
    if not measured.agrees:
        first = measured.differences[0] if measured.differences else "see the report"
        same = f"the same numbers to within {measured.tolerance:g}" if measured.tolerance else "the same bits"
        raise PlannerError(f"the planned step does not give {same} as the step without recompute: {first}")
    if measured.peak_bytes > plan.budget_bytes:
        raise PlannerError(
            f"the measured peak, {measured.peak_bytes} bytes, is above the budget of {plan.budget_bytes} bytes"
        )


COMMAND = (_Plan(), _Verify())
