"""``profile``: what each different operation of a step costs on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from planner.commands import _asked
from planner.commands._options import Parser, add, model_options
from planner.commands._terminal import quiet, reporting, show
from planner.common.options import Search


class _Profile:
    name = "profile"
    summary = "measure each operation on this machine"
    examples = ("profile minigpt --batch-size 4 --output minigpt.profile",)

    def parents(self) -> Sequence[Parser]:
        return (model_options(),)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output", metavar="FILE", required=True, help="write the measured costs to a file")
        limit = {"default": 60.0, "help": "seconds to measure (default 60)"}
        add(parser, Search, "time_limit_seconds", time_limit_seconds=limit)

    def run(self, args: argparse.Namespace) -> int:
        _asked.check_model(args)
        _asked.check_writable(args.output)
        with quiet(args.debug), reporting(args.debug) as progress:
            from planner import api
            from planner.capture.memory import keep_freed_memory
            from planner.plans.profile_file import save

            progress("building the model")
            keep_freed_memory()
            loaded = _asked.load(args, real=False)
            made = api.profile(
                loaded.model,
                loaded.example_args,
                time_limit_seconds=args.time_limit_seconds,
                **_asked.of_model(loaded, progress),
            )
        save(made, args.output)
        from planner.report import render_profile

        show(lambda console: render_profile(made, args.output, console))
        return 0


COMMAND = _Profile()
