"""``strategies``: what established systems would do with a model, beside the best plans at the same peaks."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from planner.commands import _asked
from planner.commands._options import NAMES, AboutModel, solving_options
from planner.commands._terminal import hand_out
from planner.common.options import Search, Target, Training, picked


class _Strategies(AboutModel):
    name = "strategies"
    summary = "simulate what established systems do, beside the best plans"
    examples = ("strategies minigpt", "strategies gpt2 --only every-3,megatron-block-8 --device h100 --dtype bf16")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(runtime="graph")  # what is set beside each other is of whole graphs
        group = solving_options(parser, 20.0, "for all plans")
        group.add_argument("--only", **NAMES, help="these strategies: every-3,megatron-block-8; default all")

    def run(self, args: argparse.Namespace) -> int:
        import planner
        from planner import strategies
        from planner.analysis.strategy_comparison import compare
        from planner.report import render_established

        _asked.check_solving(args)
        for name in args.only:
            strategies.get(name)
        with _asked.working(args) as (progress, loaded):
            study = _asked.ask(planner.study, loaded, progress, **_asked.keywords(args, Target, Training))
            found = compare(study, replace(picked(Search, vars(args)), progress=progress), args.only)
        hand_out(found.report(), args.json, partial(render_established, found))
        return 0


COMMAND = _Strategies()
