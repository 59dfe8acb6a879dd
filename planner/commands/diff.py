"""``diff``: what one plan does otherwise than another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from planner.commands import _asked
from planner.commands._options import Parser
from planner.commands._terminal import show, write_json


class _Diff:
    name = "diff"
    summary = "say what one plan does otherwise than another"
    examples = ("diff before.plan after.plan",)

    def parents(self) -> Sequence[Parser]:
        return ()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("a", metavar="PLAN_A", help="a plan that 'plan --save' wrote")
        parser.add_argument("b", metavar="PLAN_B", help="another, of the same model")
        parser.add_argument("--json", metavar="FILE", help="write it as JSON; '-' writes it to stdout, alone")

    def run(self, args: argparse.Namespace) -> int:
        from planner.analysis.diff import diff
        from planner.plans.plan import Plan

        _asked.check_writable(args.json)
        difference = diff(Plan.load(args.a), Plan.load(args.b))
        write_json(difference.report(), args.json)
        if args.json != "-":
            from planner.report import render_difference

            show(lambda console: render_difference(difference, console))
        return 0


COMMAND = _Diff()
