"""``verify``: real steps with and without a plan, held against what it predicts."""

from __future__ import annotations

import argparse

from planner.commands import _planning
from planner.commands._options import AboutModel, budget_options, planning_options
from planner.errors import UsageError


class _Verify(AboutModel):
    name = "verify"
    summary = "plan, and run real steps"
    examples = ("verify minigpt --plan minigpt.plan", "verify my_model.py:make --budget 70% --cost-model measured")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        budget_options(parser).add_argument("--plan", metavar="PLAN", help="a saved plan, in place of a budget")
        planning_options(parser)
        parser.set_defaults(verify=True, tree=False)

    def run(self, args: argparse.Namespace) -> int:
        _planning.check(args)
        if args.tensor_parallel > 1:
            raise UsageError("--tensor-parallel is planned for, not run: use 'plan'")
        return _planning.report_plan(args)


COMMAND = _Verify()
