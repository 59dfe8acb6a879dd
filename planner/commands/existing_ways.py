"""``audit`` and ``check``: how a model is trained today."""

from __future__ import annotations

import argparse
from functools import partial

from planner.commands import _asked
from planner.commands._options import SIZE, AboutModel, add, json_option, solving_options
from planner.commands._terminal import hand_out
from planner.common.options import Runtime, Search, Target, Training, picked
from planner.errors import CaptureError, PlannerError


class _Audit(AboutModel):
    name = "audit"
    summary = "say what the present checkpointing costs, and what would cost less"
    examples = (
        "audit gpt2 --current every-layer",
        "audit my_model.py:make --current every-2 --budget 16GiB --optimizer adamw",
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("audit")
        group.add_argument(
            "--current",
            metavar="WAY",
            required=True,
            help="the present set-up: none, every-layer, every-2, sqrt, or another strategy",
        )
        group.add_argument("--budget", **SIZE, help="also find the best plan within this budget: 8GiB, 60%%")
        planning, _ = solving_options(parser, limits="for each search")
        add(planning, Runtime, "runtime", runtime={"choices": ("auto", "graph", "modules")})

    def run(self, args: argparse.Namespace) -> int:
        from planner.analysis.audit import check_current
        from planner.report.comparisons import render_audit

        _asked.check_solving(args)
        check_current(args.current)
        with _asked.working(args) as (progress, loaded):
            from planner.session.studying import audit

            asked = _asked.keywords(args, Target, Search, Training)
            told = {"current": args.current, "budget": args.budget, "runtime": args.runtime}
            found = _asked.ask(audit, loaded, progress, **told, **asked)
        hand_out(found.report(), args.json, partial(render_audit, found))
        if found.no_plan_fits is not None:
            raise found.no_plan_fits
        return 0


class _Check(AboutModel):
    name = "check"
    summary = "find what is wrong with how a model is trained"
    examples = ("check minigpt", "check my_model.py:make --optimizer adamw --json findings.json")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add(parser, Target, "device")
        json_option(parser)

    def run(self, args: argparse.Namespace) -> int:
        from planner.report.findings import render_diagnosis

        _asked.check_model(args)
        picked(Training, vars(args))
        _asked.check_writable(args.json)
        with _asked.working(args) as (progress, loaded):
            from planner.diagnose.check import check

            diagnosis = _asked.ask(check, loaded, progress, **_asked.keywords(args, Target, Training))
        hand_out(diagnosis.report(), args.json, partial(render_diagnosis, diagnosis))
        if not diagnosis.captured:
            return CaptureError.exit_code
        return PlannerError.exit_code if diagnosis.problems else 0


COMMAND = (_Audit(), _Check())
