"""``pipeline``: a plan for every stage of a pipeline."""

from __future__ import annotations

import argparse
from functools import partial

from planner.commands import _asked
from planner.commands._options import SIZE, AboutModel, count, solving_options
from planner.commands._terminal import hand_out
from planner.common.options import Search, Target, Training
from planner.extras.pipelines.schedules import SCHEDULES, PipelineSchedule


class _Pipeline(AboutModel):
    name = "pipeline"
    summary = "plan every stage of a pipeline; nothing is run"
    examples = ("pipeline gpt2 --stages 4 --micro-batches 8 --budget 8GiB --device a100-40",)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("pipeline (the batch size is that of one micro-batch)")
        group.add_argument("--budget", **SIZE, required=True, help="what each device may hold: 8GiB, 8GB, bytes, 60%%")
        group.add_argument("--stages", type=count, metavar="N", required=True, help="devices in a row")
        group.add_argument("--micro-batches", type=count, metavar="M", required=True, help="of one training step")
        group.add_argument("--schedule", metavar="NAME", default="1f1b", help=f"{', '.join(SCHEDULES)} (default 1f1b)")
        group.add_argument(
            "--chunks", type=count, metavar="V", help="groups of layers on each device if interleaved (default 2)"
        )
        solving_options(parser, limits="for each device")

    def run(self, args: argparse.Namespace) -> int:
        chunks = args.chunks or (2 if args.schedule == "interleaved" else 1)
        asked = {"stages": args.stages, "micro_batches": args.micro_batches, "chunks": chunks}
        PipelineSchedule(name=args.schedule, **asked)  # refuses what does not go together
        args.runtime = "graph"
        _asked.check_solving(args)
        from planner.extras.pipelines import plan_pipeline
        from planner.extras.pipelines.report import render, render_infeasible
        from planner.plans.plan import NoPlanFitsError

        asked |= {"budget": args.budget, "schedule": args.schedule, **_asked.keywords(args, Target, Search, Training)}
        try:
            with _asked.working(args) as (progress, loaded):
                plan = _asked.ask(plan_pipeline, loaded, progress, **asked)
        except NoPlanFitsError as error:
            hand_out(error.report, args.json, partial(render_infeasible, error.report))
            raise
        hand_out(plan.report(), args.json, partial(render, plan))
        return 0


COMMAND = _Pipeline()
