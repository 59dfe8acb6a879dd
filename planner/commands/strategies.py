"""``strategies``: what established systems would do with a model, beside the best plans at the same peaks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from planner.commands import _asked
from planner.commands._options import Parser, model_options, solving_options, training_options
from planner.commands._terminal import quiet, reporting, show, write_json
from planner.common.options import Search


class _Strategies:
    name = "strategies"
    summary = "simulate what established systems do, beside the best plans"
    examples = ("strategies minigpt", "strategies gpt2 --only every-3,megatron-block-8 --device h100 --dtype bf16")

    def parents(self) -> Sequence[Parser]:
        return model_options(), training_options()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(runtime="graph")  # what is set beside each other is of whole graphs
        group = solving_options(parser, 20.0, "for all plans")
        group.add_argument("--only", metavar="NAMES", help="these strategies: every-3,megatron-block-8; default all")

    def run(self, args: argparse.Namespace) -> int:
        from planner import strategies

        _asked.check_solving(args)
        names = [name.strip() for name in args.only.split(",")] if args.only is not None else []
        for name in names:
            strategies.get(name)
        with quiet(args.debug), reporting(args.debug) as progress:
            from planner.analysis.strategy_comparison import compare
            from planner.capture.memory import keep_freed_memory

            progress("building the model")
            if args.cost_model == "measured":
                keep_freed_memory()
            loaded = _asked.load(args, real=False)
            study = _asked.study(args, loaded, args.runtime, progress)
            found = compare(study, names, progress=progress, **_asked.keywords(args, Search))
        write_json(found.report(), args.json)
        if args.json != "-":
            from planner.report import render_established

            show(lambda console: render_established(found, console))
        return 0


COMMAND = _Strategies()
