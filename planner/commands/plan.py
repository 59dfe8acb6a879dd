"""``plan``: what to keep and what to recompute, of one device or of every stage of a pipeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.commands import _asked, _planning
from planner.commands._options import (
    Parser,
    budget_options,
    model_options,
    pipeline_of,
    pipeline_options,
    planning_options,
    training_options,
)
from planner.commands._terminal import quiet, reporting, show, write_json
from planner.common.options import Search, Target, Training
from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.plans.plan import Plan


class _Plan:
    name = "plan"
    summary = "plan a model; nothing is run"
    examples = (
        "plan gpt2 --budget 60%",
        "plan my_model.py:make --budget 8GiB --optimizer adamw --save my.plan --verify",
        "plan minigpt --strategy every-2 --verify",
    )

    def parents(self) -> Sequence[Parser]:
        return model_options(), training_options()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        budget_options(parser)
        planning_options(parser)
        parser.add_argument("--save", metavar="PLAN", help="write the plan to a file that auto_wrap can apply")
        parser.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
        parser.add_argument("--tree", action="store_true", help="add the tree of all modules to the report")
        parser.add_argument(
            "--memory-viz", metavar="FILE.pickle", help="write the predicted allocations for pytorch.org/memory_viz"
        )
        parser.add_argument("--verify", action="store_true", help="run real steps with and without the plan")
        pipeline_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        _planning.check(args)
        _asked.check_writable(args.save, args.html, args.memory_viz)
        if args.verify and args.tensor_parallel > 1:
            raise UsageError("--tensor-parallel is planned for, not run: leave out --verify")
        if pipeline_of(args):
            return _run_pipeline(args)
        return _planning.report_plan(
            args, verify=args.verify, write=lambda plan: _write(plan, args), show_tree=args.tree
        )


def _write(plan: Plan, args: argparse.Namespace) -> None:
    """Write the files that are asked for."""
    from planner.common.atomic import write_text
    from planner.plans import memory_viz

    if args.save:
        plan.save(args.save)
    if args.memory_viz:
        memory_viz.save(plan, args.memory_viz)
    if args.html:
        write_text(args.html, plan.to_html())


def _run_pipeline(args: argparse.Namespace) -> int:
    from planner.plans.pipeline_types import NoPipelineFitsError
    from planner.report import render_infeasible_pipeline, render_pipeline

    try:
        with quiet(args.debug), reporting(args.debug) as progress:
            import planner

            progress("building the model")
            loaded = _asked.load(args, real=False)
            plan = planner.plan_pipeline(
                loaded.model,
                loaded.example_args,
                **_asked.of_model(loaded, progress),
                **_asked.keywords(args, Target, Search, Training),
                budget=args.budget,
                **pipeline_of(args),
            )
    except NoPipelineFitsError as error:
        report = error.report
        write_json(report, args.json)
        if args.json != "-":
            show(lambda console: render_infeasible_pipeline(report, console))
        raise
    write_json(plan.report(), args.json)
    if args.json != "-":
        show(lambda console: render_pipeline(plan, console))
    return 0


COMMAND = _Plan()
