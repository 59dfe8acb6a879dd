"""``plan``: what to keep and what to recompute, of one device."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from planner.commands import _asked, _planning
from planner.commands._options import AboutModel, add, budget_options, planning_options
from planner.common.options import Runtime

if TYPE_CHECKING:
    from planner.plans.plan import Plan


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
        add(parser, Runtime, "cuda_graphs")
        results = planning_options(parser)
        results.add_argument("--save", metavar="PLAN", help="write the plan to a file that auto_wrap can apply")
        results.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
        results.add_argument(
            "--memory-viz", metavar="FILE.pickle", help="write the predicted allocations for pytorch.org/memory_viz"
        )
        results.add_argument("--verify", action="store_true", help="run real steps with and without the plan")

    def run(self, args: argparse.Namespace) -> int:
        _planning.check(args)
        _asked.check_writable(args.save, args.html, args.memory_viz)
        if not _planning.names_a_budget(args):
            return _planning.report_budgets(args)
        return _planning.report_plan(args, write=partial(_write, args))


def _write(args: argparse.Namespace, plan: Plan) -> None:
    from planner.common.atomic import write_text
    from planner.plans import memory_viz
    from planner.report.page import to_html

    if args.save:
        plan.save(args.save)
    if args.memory_viz:
        memory_viz.save(plan, args.memory_viz)
    if args.html:
        write_text(args.html, to_html(plan))


COMMAND = _Plan()
