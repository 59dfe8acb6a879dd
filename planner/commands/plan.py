"""``plan``: what to keep and what to recompute, of one device or of every stage of a pipeline."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.commands import _asked, _planning
from planner.commands._options import AboutModel, add, budget_options, pipeline_of, pipeline_options, planning_options
from planner.commands._terminal import hand_out
from planner.common.options import Search, Target, Training
from planner.errors import UsageError

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
        add(parser, Training, "arena", "cuda_graphs")
        results = planning_options(parser)
        results.add_argument("--save", metavar="PLAN", help="write the plan to a file that auto_wrap can apply")
        results.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
        results.add_argument("--tree", action="store_true", help="add the tree of all modules")
        results.add_argument(
            "--memory-viz", metavar="FILE.pickle", help="write the predicted allocations for pytorch.org/memory_viz"
        )
        results.add_argument("--verify", action="store_true", help="run real steps with and without the plan")
        pipeline_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        _planning.check(args)
        _asked.check_writable(args.save, args.html, args.memory_viz)
        if args.verify and args.tensor_parallel > 1:
            raise UsageError("--tensor-parallel is planned for, not run: leave out --verify")
        if pipeline := pipeline_of(args):
            if args.arena or args.cuda_graphs:
                asked = "--arena lays out" if args.arena else "--cuda-graphs captures"
                raise UsageError(f"{asked} the step of one device: leave it out, or plan without stages")
            return _run_pipeline(args, pipeline)
        if not _planning.names_a_budget(args):
            return _planning.report_budgets(args)
        return _planning.report_plan(args, write=partial(_write, args))


def _write(args: argparse.Namespace, plan: Plan) -> None:
    from planner.common.atomic import write_text
    from planner.plans import memory_viz

    if args.save:
        plan.save(args.save)
    if args.memory_viz:
        memory_viz.save(plan, args.memory_viz)
    if args.html:
        write_text(args.html, plan.to_html())


def _run_pipeline(args: argparse.Namespace, pipeline: dict[str, Any]) -> int:
    from planner.plans.pipeline_types import NoPipelineFitsError
    from planner.report import render_infeasible_pipeline, render_pipeline

    try:
        with _asked.working(args) as (progress, loaded):
            import planner

            asked = _asked.keywords(args, Target, Search, Training)
            del asked["arena"], asked["cuda_graphs"]
            plan = _asked.ask(planner.plan_pipeline, loaded, progress, budget=args.budget, **pipeline, **asked)
    except NoPipelineFitsError as error:
        hand_out(error.report, args.json, partial(render_infeasible_pipeline, error.report))
        raise
    hand_out(plan.report(), args.json, partial(render_pipeline, plan))
    return 0


COMMAND = _Plan()
