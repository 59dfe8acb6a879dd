"""``plan``: what to keep and what to recompute, of one device or of every stage of a pipeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from planner.commands import _asked, _planning
from planner.errors import UsageError
from planner.options import (
    Parser,
    budget_options,
    model_options,
    pipeline_of,
    pipeline_options,
    solving_options,
    training_options,
)
from planner.terminal import quiet, reporting, show, write_json


class _Plan:
    name = "plan"
    summary = "plan a model; nothing is run"

    def parents(self) -> Sequence[Parser]:
        return model_options(), training_options(), solving_options()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        budget_options(parser)
        parser.add_argument("--save", metavar="PLAN", help="write the plan to a file that auto_wrap can apply")
        parser.add_argument("--verify", action="store_true", help="run real steps with and without the plan")
        pipeline_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        _planning.check(args)
        _asked.check_writable(args.save)
        if args.verify and args.tensor_parallel > 1:
            raise UsageError("--tensor-parallel is planned for, not run: leave out --verify")
        if pipeline_of(args):
            return _run_pipeline(args)
        return _planning.report_plan(args, verify=args.verify, save=args.save)


def _run_pipeline(args: argparse.Namespace) -> int:
    from planner.pipeline_types import NoPipelineFitsError
    from planner.report import render_infeasible_pipeline, render_pipeline

    try:
        with quiet(args.debug), reporting(args.debug) as progress:
            import planner

            progress("building the model")
            loaded = _asked.load(args, real=False)
            plan = planner.plan_pipeline(
                loaded.model,
                loaded.example_args,
                **_asked.how(args, loaded, progress),
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
