"""``audit``: what the present checkpointing of a model costs, and what a plan would do in its place."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from planner.commands import _asked
from planner.commands._options import Parser, model_options, solving_options, training_options
from planner.commands._terminal import quiet, reporting, show, write_json
from planner.common.options import Search, Target, Training


class _Audit:
    name = "audit"
    summary = "say what the present checkpointing costs, and what would do"
    examples = (
        "audit gpt2 --current every-layer",
        "audit my_model.py:make --current every-2 --budget 16GiB --optimizer adamw",
    )

    def parents(self) -> Sequence[Parser]:
        return model_options(), training_options()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("audit")
        group.add_argument(
            "--current",
            metavar="WAY",
            required=True,
            help="what is done now: none, every-layer, every-2, sqrt, another strategy, or the file of a plan",
        )
        group.add_argument("--budget", metavar="SIZE", help="also the best within what the device may hold: 8GiB, 60%%")
        group = solving_options(parser, limits="for each search")
        group.add_argument(
            "--runtime",
            choices=("auto", "graph", "modules"),
            default="auto",
            help="choices of modules in place of whole graphs; auto is a plan's own",
        )

    def run(self, args: argparse.Namespace) -> int:
        from planner.analysis.audit import read_current
        from planner.common.units import parse_size

        _asked.check_solving(args)
        read_current(args.current)
        if args.budget:
            parse_size(args.budget, whole_bytes=2**60)
        with quiet(args.debug), reporting(args.debug) as progress:
            from planner.capture.memory import keep_freed_memory
            from planner.session.studying import audit

            progress("building the model")
            if args.cost_model == "measured":
                keep_freed_memory()
            loaded = _asked.load(args, real=False)
            found = audit(
                loaded.model,
                loaded.example_args,
                current=args.current,
                budget=args.budget,
                runtime=args.runtime,
                **_asked.of_model(loaded, progress),
                **_asked.keywords(args, Target, Search, Training),
            )
        write_json(found.report(), args.json)
        if args.json != "-":
            from planner.report import render_audit

            show(lambda console: render_audit(found, console))
        if found.no_plan_fits is not None:
            raise found.no_plan_fits
        return 0


COMMAND = _Audit()
