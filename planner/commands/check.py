"""``check``: what is wrong with how a model is trained."""

from __future__ import annotations

import argparse
from functools import partial

from planner.commands import _asked
from planner.commands._options import AboutModel, add, json_option
from planner.commands._terminal import hand_out
from planner.common.options import Target, Training, picked
from planner.errors import CaptureError, PlannerError


class _Check(AboutModel):
    name = "check"
    summary = "find what is wrong with how a model is trained"
    examples = ("check minigpt", "check my_model.py:make --optimizer adamw --json findings.json")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add(parser, Target, "device")
        json_option(parser)

    def run(self, args: argparse.Namespace) -> int:
        from planner.plans import device_file
        from planner.report import render_diagnosis

        _asked.check_model(args)
        picked(Training, vars(args))
        if args.device:
            device_file.find(args.device)
        _asked.check_writable(args.json)
        with _asked.working(args) as (progress, loaded):
            from planner.diagnose.check import check

            diagnosis = _asked.ask(check, loaded, progress, **_asked.keywords(args, Target, Training))
        hand_out(diagnosis.report(), args.json, partial(render_diagnosis, diagnosis))
        if not diagnosis.captured:
            return CaptureError.exit_code
        return PlannerError.exit_code if diagnosis.problems else 0


COMMAND = _Check()
