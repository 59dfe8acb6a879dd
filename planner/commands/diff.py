"""``diff``: what one plan does otherwise than another."""

from __future__ import annotations

import argparse
from functools import partial

from planner.commands import _asked
from planner.commands._options import Alone, json_option
from planner.commands._terminal import hand_out


class _Diff(Alone):
    name = "diff"
    summary = "say what one plan does otherwise than another"
    examples = ("diff before.plan after.plan",)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("a", metavar="PLAN_A", help="a plan that 'plan --save' wrote")
        parser.add_argument("b", metavar="PLAN_B", help="another, of the same model")
        json_option(parser)

    def run(self, args: argparse.Namespace) -> int:
        from planner.analysis.diff import diff
        from planner.plans.plan import Plan
        from planner.report import render_difference

        _asked.check_writable(args.json)
        difference = diff(Plan.load(args.a), Plan.load(args.b))
        hand_out(difference.report(), args.json, partial(render_difference, difference))
        return 0


COMMAND = _Diff()
