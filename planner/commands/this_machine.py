"""``calibrate`` and ``profile``: how fast this machine is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from planner.commands import _asked
from planner.commands._options import Alone, Parser, add, model_options
from planner.commands._terminal import quiet, reporting, show
from planner.common.options import Search
from planner.errors import UsageError


class _Calibrate(Alone):
    name = "calibrate"
    summary = "measure this machine's speed"
    examples = ("calibrate --output this-machine.json",)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output", metavar="FILE.json", required=True, help="write a device file for --device")

    def run(self, args: argparse.Namespace) -> int:
        if not args.output.endswith(".json"):
            raise UsageError(f"--output {args.output}: a device file is found by its name, which ends in .json")
        _asked.check_writable(args.output)
        with quiet(args.debug), reporting(args.debug) as progress:
            from planner.measure.calibration import calibrate
            from planner.plans import device_file

            spec = calibrate(progress=progress)
        device_file.save(spec, args.output)
        from planner.report.measured import render_device

        show(partial(render_device, spec, args.output))
        return 0


class _Profile:
    name = "profile"
    summary = "measure each operation on this machine"
    examples = ("profile minigpt --batch-size 4 --output minigpt.profile",)

    def parents(self) -> Sequence[Parser]:
        return (model_options(),)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output", metavar="FILE", required=True, help="write the measured costs to a file")
        parser.set_defaults(cost_model="measured")
        limit = {"default": 60.0, "help": "seconds to measure (default 60)"}
        add(parser, Search, "time_limit_seconds", time_limit_seconds=limit)

    def run(self, args: argparse.Namespace) -> int:
        from planner.plans import profile_file
        from planner.report.measured import render_profile

        _asked.check_model(args)
        _asked.check_writable(args.output)
        with _asked.working(args) as (progress, loaded):
            from planner import api

            made = _asked.ask(api.profile, loaded, progress, time_limit_seconds=args.time_limit_seconds)
        profile_file.save(made, args.output)
        show(partial(render_profile, made, args.output))
        return 0


COMMAND = (_Calibrate(), _Profile())
