"""``explain``: why a plan keeps or recomputes each value of a module."""

from __future__ import annotations

import argparse
from functools import partial

from planner.commands import _asked
from planner.commands._options import Alone, json_option
from planner.commands._terminal import hand_out
from planner.errors import UsageError

_LARGEST = 10


class _Explain(Alone):
    name = "explain"
    summary = "say why a plan keeps or recomputes each value"
    examples = ("explain gpt2.plan", "explain gpt2.plan transformer.h.0.mlp")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("plan", metavar="PLAN", help="a plan that 'plan --save' wrote")
        parser.add_argument(
            "module",
            metavar="MODULE",
            nargs="?",
            help=f"path of a module, with all inside it: transformer.h.0; without it, the {_LARGEST} largest values",
        )
        parser.add_argument("--all", action="store_true", help="every value of the model")
        json_option(parser)

    def run(self, args: argparse.Namespace) -> int:
        from planner.analysis.explain import explain
        from planner.plans.plan import Plan
        from planner.report import render_explanation

        if args.all and args.module:
            raise UsageError("--all shows every module: leave it out, or leave out the module")
        _asked.check_writable(args.json)
        explanation = explain(Plan.load(args.plan), args.module)
        largest = None if args.all or args.module else _LARGEST
        hand_out(explanation.report(), args.json, partial(render_explanation, explanation, largest=largest))
        return 0


COMMAND = _Explain()
