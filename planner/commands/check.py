"""``check``: what is wrong with how a model is trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from planner.commands import _asked
from planner.commands._options import Parser, add, model_options, training_options
from planner.commands._terminal import quiet, reporting, show, write_json
from planner.common.options import Target, Training, picked
from planner.errors import CaptureError, PlannerError


class _Check:
    name = "check"
    summary = "find what is wrong with how a model is trained"
    examples = (
        "check minigpt",
        "check my_model.py:make --optimizer adamw --json findings.json",
    )

    def parents(self) -> Sequence[Parser]:
        return model_options(), training_options()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add(parser, Target, "device")
        parser.add_argument(
            "--json", metavar="FILE", help="write the findings as JSON; '-' writes them to stdout, alone"
        )

    def run(self, args: argparse.Namespace) -> int:
        from planner.plans import device_file

        _asked.check_model(args)
        picked(Training, vars(args))
        if args.device:
            device_file.find(args.device)
        _asked.check_writable(args.json)
        with quiet(args.debug), reporting(args.debug) as progress:
            from planner.diagnose.check import check

            progress("building the model")
            loaded = _asked.load(args, real=False)
            diagnosis = check(
                loaded.model,
                loaded.example_args,
                **_asked.of_model(loaded, progress),
                **_asked.keywords(args, Target, Training),
            )
        write_json(diagnosis.report(), args.json)
        if args.json != "-":
            from planner.report import render_diagnosis

            show(lambda console: render_diagnosis(diagnosis, console))
        if not diagnosis.captured:
            return CaptureError.exit_code
        return PlannerError.exit_code if diagnosis.problems else 0


COMMAND = _Check()
