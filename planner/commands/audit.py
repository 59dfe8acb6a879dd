"""``audit``: what the present checkpointing of a model costs, and what a plan would do in its place."""

from __future__ import annotations

import argparse
from functools import partial

from planner.commands import _asked
from planner.commands._options import SIZE, AboutModel, solving_options
from planner.commands._terminal import hand_out
from planner.common.options import Search, Target, Training


class _Audit(AboutModel):
    name = "audit"
    summary = "say what the present checkpointing costs, and what would do"
    examples = (
        "audit gpt2 --current every-layer",
        "audit my_model.py:make --current every-2 --budget 16GiB --optimizer adamw",
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("audit")
        group.add_argument(
            "--current",
            metavar="WAY",
            required=True,
            help="what is done now: none, every-layer, every-2, sqrt, another strategy, or the file of a plan",
        )
        group.add_argument("--budget", **SIZE, help="also the best within what the device may hold: 8GiB, 60%%")
        group = solving_options(parser, limits="for each search")
        group.add_argument(
            "--runtime",
            choices=("auto", "graph", "modules"),
            default="auto",
            help="choices of modules in place of whole graphs; auto is a plan's own",
        )

    def run(self, args: argparse.Namespace) -> int:
        from planner.analysis.audit import read_current
        from planner.report import render_audit

        _asked.check_solving(args)
        read_current(args.current)
        with _asked.working(args) as (progress, loaded):
            from planner.session.studying import audit

            asked = _asked.keywords(args, Target, Search, Training)
            told = {"current": args.current, "budget": args.budget, "runtime": args.runtime}
            found = _asked.ask(audit, loaded, progress, **told, **asked)
        hand_out(found.report(), args.json, partial(render_audit, found))
        if found.no_plan_fits is not None:
            raise found.no_plan_fits
        return 0


COMMAND = _Audit()
