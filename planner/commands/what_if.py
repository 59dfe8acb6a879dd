"""``what-if``: what other budgets, sizes, devices and solvers would give."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.commands import _asked
from planner.commands._options import Parser, add, count, model_options, solving_options, training_options
from planner.commands._terminal import Bar, Interrupts, counting, quiet, show, write_json
from planner.common.options import Offload, Search, Training, picked
from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.analysis.study import Study
    from planner.analysis.trade_off.accelerators import DeviceSearch
    from planner.analysis.trade_off.answers import Answers
    from planner.analysis.trade_off.curve import CurveSweep
    from planner.analysis.trade_off.methods import MethodSweep
    from planner.analysis.trade_off.sizes import SizeSearch
    from planner.ir.schedule import Schedule

_INTERRUPTED = 130
_DEFAULT_SECONDS = 25.0

_ROW_SHARE = 0.2
"""What each size and each device may take of the time limit for the curve."""


class _WhatIf:
    name = "what-if"
    summary = "overhead over budget, and other batch sizes, devices and solvers"
    examples = (
        "what-if gpt2 --budget 12GiB --plot curve.png",
        "what-if gpt2 --budget 20GiB --batch-sizes 1..64",
        "what-if gpt2 --dtype bf16 --optimizer adamw --devices rtx-4090,a100-40,h100",
        "what-if gpt2 --points 8 --solvers sqrt,chain-dp,every-layer,pytorch --json -",
        "what-if gpt2 --device h100 --dtype bf16 --offload --host-budget 64GiB",
    )

    def parents(self) -> tuple[Parser, ...]:
        return model_options(), training_options()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        curve = parser.add_argument_group("curve")
        curve.add_argument("--budget", metavar="SIZE", help="mark this budget and say what 1 GiB more buys: 8GiB, 60%%")
        curve.add_argument("--points", type=_points, metavar="N", default=20, help="budgets on the curve (default 20)")
        curve.add_argument(
            "--budgets",
            metavar="RANGE",
            help="4GiB..16GiB or 4GiB,8GiB,16GiB; by default from the smallest feasible to the peak without recompute",
        )
        axes = parser.add_argument_group("further axes (sizes are asked at --budget)")
        axes.add_argument("--batch-sizes", metavar="RANGE", help="1..64 or 1,2,4: the largest that fits, samples/s")
        axes.add_argument("--seq-lens", metavar="RANGE", help="128..4096 or 512,1024: the longest that fits, tokens/s")
        axes.add_argument("--devices", metavar="NAMES", help="h100,a100-40: fits or not in the memory of each")
        axes.add_argument("--solvers", metavar="NAMES", help="solvers, strategies, pytorch: on the same axes")
        group = solving_options(parser, _DEFAULT_SECONDS, "for each curve; a size or a device has a fifth of that")
        add(group, Offload)
        group.add_argument("--runtime", choices=("graph", "modules"), default="graph", help="what is to run the plans")
        group.add_argument("--csv", metavar="FILE", help="write the points of the curve as CSV")
        group.add_argument("--html", metavar="FILE", help="write all as one HTML page that needs no network")
        group.add_argument("--plot", metavar="FILE", help="draw the curve: FILE.png or FILE.svg (needs matplotlib)")

    def run(self, args: argparse.Namespace) -> int:
        _check(args)
        with quiet(args.debug), counting(args.debug) as bar:
            asking = _Asking(args, bar)
            interrupted = asking.run()
        answers = asking.answers(interrupted=interrupted)
        _hand_out(answers, args)
        if interrupted:
            print("interrupted: what was done by then is kept", file=sys.stderr)
            return _INTERRUPTED
        return 0


def _points(text: str) -> int:
    number = count(text)
    if number < 2:
        raise argparse.ArgumentTypeError("a curve has at least 2 points")
    return number


def _check(args: argparse.Namespace) -> None:
    """Refuse at once what would fail only after minutes of work."""
    from planner import solvers, zoo
    from planner.analysis.compatibility import check_solver, offloading_runtime
    from planner.analysis.trade_off import methods, ranges
    from planner.common.units import parse_size
    from planner.report import curve_chart

    _asked.check_model(args)
    picked(Training, vars(args))
    _asked.check_offload(args)
    able = solvers.get(args.solver).offloads
    if args.offload and not able:
        raise UsageError(f"solver {args.solver!r} does not offload: leave out --offload, or name it with --solvers")
    _asked.check_target(args, *_names(args, "devices"))
    check_solver(args.runtime, args.solver)
    offloading_runtime(args.runtime, picked(Offload, vars(args)))
    methods.check(_names(args, "solvers"), args.runtime)
    if args.budget:
        parse_size(args.budget, whole_bytes=2**60)
    if args.budgets is not None:
        ranges.check_budgets(args.budgets)
    sizes = [size for size in ("batch_size", "seq_len") if _sizes(args, size) is not None]
    if sizes and not args.budget:
        raise UsageError(f"--{sizes[0].replace('_', '-')}s needs --budget SIZE: what is to fit")
    zoo.check_sizes(args.model or args.name, sizes)
    _asked.check_writable(args.json, args.csv, args.html)
    if args.plot:
        curve_chart.check_picture(args.plot)


def _names(args: argparse.Namespace, option: str) -> list[str]:
    """Read a list of names."""
    given = getattr(args, option)
    if given is None:
        return []
    names = [name.strip() for name in given.split(",")]
    if not all(names):
        raise UsageError(f"--{option} {given!r} has an empty name: write names with commas between them")
    return names


def _sizes(args: argparse.Namespace, size: str) -> Any:
    """Read a range of sizes; None if none is given."""
    from planner.analysis.trade_off.ranges import parse_sizes

    given = getattr(args, f"{size}s")
    what = {"batch_size": "batch sizes", "seq_len": "sequence lengths"}[size]
    return None if given is None else parse_sizes(given, what=what)


class _Asking:
    """All that is asked about a model, one after the other."""

    def __init__(self, args: argparse.Namespace, bar: Bar) -> None:
        self.args = args
        self.bar = bar
        self.effort = picked(Search, vars(args))
        self.row_effort = replace(self.effort, time_limit_seconds=_ROW_SHARE * self.effort.time_limit_seconds)
        self.samples = 1
        self.tracing: CurveSweep | None = None
        self.sizes: dict[str, SizeSearch] = {}
        self.devices: DeviceSearch | None = None
        self.methods: MethodSweep | None = None

    def run(self) -> bool:
        """Ask, and say whether that was interrupted; before anything is done that is an error."""
        from planner.analysis.trade_off.curve import CurveSweep

        args = self.args
        study = self.study()
        self.bar("looking for the smallest peak")
        self.tracing = CurveSweep(
            study,
            points=args.points,
            budgets=args.budgets,
            asked=args.budget,
            solver=args.solver,
            effort=self.effort,
            host=study.host_for(picked(Offload, vars(args))),
        )

        def count(done: int, total: int) -> None:
            interrupts.check()
            self.bar.count(done, total)

        with Interrupts() as interrupts:
            try:
                self.tracing.run(progress=self.bar, count=count)
                for start in self.further():
                    start()
                    interrupts.check()
            except KeyboardInterrupt:
                return True
            except Exception:
                if not interrupts.arrived:
                    raise
                return True
        return False

    def further(self) -> Iterator[Callable[[], None]]:
        """Return the searches along the other axes."""
        from planner.analysis.trade_off.accelerators import DeviceSearch
        from planner.analysis.trade_off.methods import RECOMPUTE_ALONE, MethodSweep
        from planner.analysis.trade_off.sizes import SizeSearch

        args, tracing = self.args, self.tracing
        assert tracing is not None
        for size, name, unit in (("batch_size", "batch size", "samples"), ("seq_len", "sequence length", "tokens")):
            sizes = _sizes(args, size)
            if sizes is None:
                continue
            assert tracing.asked_bytes is not None, "sizes are asked with a budget"
            by_sample = unit == "samples"
            self.sizes[size] = search = SizeSearch(
                sizes,
                partial(self.study_at, size),
                budget_bytes=tracing.asked_bytes,
                name=name,
                unit=unit,
                units_of_one=1 if by_sample else self.samples,
                step=1 if by_sample else sizes.coarse_step,
                solver=args.solver,
                effort=self.row_effort,
                **_asked.keywords(args, Offload),
            )
            yield partial(search.run, progress=self.bar)
        if devices := _names(args, "devices"):
            self.devices = DeviceSearch(
                devices,
                partial(self.study_at, "device"),
                solver=args.solver,
                effort=self.row_effort,
                **_asked.keywords(args, Offload),
            )
            yield partial(self.devices.run, progress=self.bar)
        if names := [*([RECOMPUTE_ALONE] if args.offload else []), *_names(args, "solvers")]:
            self.methods = MethodSweep(names, tracing, effort=self.effort, pytorch=self.partitioned)
            yield partial(self.methods.run, progress=self.bar, count=self.bar.count)

    def study_at(self, option: str, value: Any) -> Study:
        """Capture the step with another value of an option."""
        return self.study(**{option: value})

    def study(self, **changes: Any) -> Study:
        """Capture the step, at other sizes or for another device where these are given."""
        from planner.capture.inputs import Inputs

        args = argparse.Namespace(**{**vars(self.args), **changes})
        loaded = _asked.load(args, real=False)
        if not changes:
            self.bar("capturing forward and backward")
            first = Inputs.of(loaded.example_args, loaded.example_kwargs).tensors()[0]
            self.samples = first.shape[0] if first.dim() else 1
        return _asked.study(args, loaded, args.runtime)

    def partitioned(self) -> Iterator[Schedule]:
        """Let PyTorch's partitioner decide on the same step."""
        from planner.session import min_cut

        args = self.args
        loaded = _asked.load(args, real=False)
        return min_cut.schedules(
            loaded.model,
            loaded.example_args,
            example_kwargs=loaded.example_kwargs,
            device=args.device,
            **_asked.keywords(args, Training),
        )

    def answers(self, *, interrupted: bool) -> Answers:
        """Return what is done."""
        from planner.analysis.trade_off.answers import Answers

        assert self.tracing is not None
        axes = {size: search.axis_so_far for size, search in self.sizes.items()}
        return Answers(
            curve=self.tracing.curve(),
            batch_sizes=axes.get("batch_size"),
            seq_lens=axes.get("seq_len"),
            devices=self.devices.rows if self.devices else (),
            methods=self.methods.methods if self.methods else (),
            interrupted=interrupted,
        )


def _hand_out(answers: Answers, args: argparse.Namespace) -> None:
    """Write the files and show the report."""
    from planner.analysis.trade_off.answers import csv_text
    from planner.common.atomic import write_text
    from planner.report import curve_chart, render_what_if

    write_json(answers.report(), args.json)
    if args.csv:
        write_text(args.csv, csv_text(answers.curve))
    if args.html:
        from planner.report.page.what_if import what_if_page

        write_text(args.html, what_if_page(answers))
    if args.plot:
        curve_chart.write_picture(args.plot, answers.curve, answers.methods)
    if args.json != "-":
        show(lambda console: render_what_if(answers, console))


COMMAND = _WhatIf()
