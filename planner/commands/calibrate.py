"""``calibrate``: how fast this machine is, as a device file."""

from __future__ import annotations

import argparse
from functools import partial

from planner.commands import _asked
from planner.commands._options import Alone
from planner.commands._terminal import quiet, reporting, show
from planner.errors import UsageError


class _Calibrate(Alone):
    name = "calibrate"
    summary = "measure how fast this machine is"
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
        from planner.report import render_device

        show(partial(render_device, spec, args.output))
        return 0


COMMAND = _Calibrate()
