"""``what-if``: what other budgets, sizes, devices and solvers would give."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.analysis.trade_off.ranges import parse_sizes
from planner.commands import _asked
from planner.commands._options import NAMES, SIZE, AboutModel, add, device, names, reading, solving_options, whole
from planner.commands._terminal import hand_out, quiet, reporting
from planner.common.options import Offload, Runtime, Search, Target, Training, picked
from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.analysis.study import Study
    from planner.analysis.trade_off.answers import Answers
    from planner.report.progress import Shown
    from planner.zoo import ZooModel

_DEFAULT_SECONDS = 25.0

_SIZES = ("batch_size", "seq_len")


class _WhatIf(AboutModel):
    name = "what-if"
    summary = "overhead over budget, and other batch sizes, devices and solvers"
    examples = (
        "what-if gpt2 --budget 12GiB --html curve.html",
        "what-if gpt2 --budget 20GiB --batch-sizes 1..64",
        "what-if gpt2 --dtype bf16 --optimizer adamw --devices rtx-4090,a100-40,h100",
        "what-if gpt2 --points 8 --solvers sqrt,chain-dp,every-layer --json -",
        "what-if gpt2 --device h100 --dtype bf16 --offload --host-budget 64GiB",
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        curve = parser.add_argument_group("curve")
        curve.add_argument("--budget", **SIZE, help="mark this budget and say what 1 GiB more buys: 8GiB, 60%%")
        curve.add_argument(
            "--points",
            type=partial(whole, least=2, what="a number of points: a curve has at least 2 points"),
            metavar="N",
            default=20,
            help="budgets on the curve (default 20)",
        )
        curve.add_argument(
            "--budgets",
            metavar="RANGE",
            help="4GiB..16GiB or 4GiB,8GiB,16GiB; by default from the smallest feasible to the peak without recompute",
        )
        axes = parser.add_argument_group("further axes (sizes need --budget)")
        for option, what, each in (
            ("--batch-sizes", "batch sizes", "1..64 or 1,2,4: the largest that fits, samples/s"),
            ("--seq-lens", "sequence lengths", "128..4096 or 512,1024: the longest that fits, tokens/s"),
        ):
            axes.add_argument(option, metavar="RANGE", type=reading(partial(parse_sizes, what=what)), help=each)
        devices = NAMES | {"type": lambda text: [device(name) for name in names(text)]}
        axes.add_argument("--devices", **devices, help="h100,a100-40: whether a plan fits each")
        axes.add_argument("--solvers", **NAMES, help="solvers, and strategies, on the same axes")
        planning, group = solving_options(parser, _DEFAULT_SECONDS, "for each curve; a fifth for a size or a device")
        add(planning, Runtime, "runtime", runtime={"choices": ("graph", "modules"), "default": "graph"})
        add(planning, Offload)
        group.add_argument("--html", metavar="FILE", help="write all as one HTML page that needs no network")

    def run(self, args: argparse.Namespace) -> int:
        _check(args)
        with quiet(args.debug), reporting(args.debug) as progress:
            answers = (asking := _Asking(args, progress)).answers()
        _hand_out(answers, args, asking.has_loss)
        return 0


def _check(args: argparse.Namespace) -> None:
    """Check the options before minutes of work."""
    from planner import solvers, zoo
    from planner.analysis.compatibility import check_offload
    from planner.analysis.trade_off import answers as methods
    from planner.analysis.trade_off import ranges

    _asked.check_solving(args)
    _asked.check_offload(args)
    if args.offload is True and not solvers.get(args.solver).offloads:
        raise UsageError(f"solver {args.solver!r} does not offload: leave out --offload, or name it with --solvers")
    check_offload(args.runtime, picked(Offload, vars(args)))
    methods.check(args.solvers, args.runtime)
    if args.budgets is not None:
        ranges.check_budgets(args.budgets)
    sizes = [name for name in _SIZES if getattr(args, f"{name}s") is not None]
    if sizes and not args.budget:
        raise UsageError(f"--{sizes[0].replace('_', '-')}s needs --budget SIZE, which they are to fit")
    zoo.check_sizes(args.model or args.name, {name: max(getattr(args, f"{name}s").values) for name in sizes})
    _asked.check_writable(args.html)


class _Asking:
    """Answers the questions about a model one after the other."""

    def __init__(self, args: argparse.Namespace, shown: Shown) -> None:
        self.args = args
        self.shown = shown
        self.search = replace(picked(Search, vars(args)), progress=shown)
        self.offload = picked(Offload, vars(args))
        self.sizes = {name: sizes for name in _SIZES if (sizes := getattr(args, f"{name}s")) is not None}
        self.samples, self.has_loss = 1, False

    def answers(self) -> Answers:
        """Ask."""
        from planner.analysis.trade_off.answers import Answers, methods_beside
        from planner.analysis.trade_off.axes import for_one_row, on_devices
        from planner.analysis.trade_off.curve import RECOMPUTE_ALONE, CurveSweep

        args, study = self.args, self.study()
        self.shown("looking for the lowest peak")
        host = study.host_for(self.offload, self.search)
        sweep = CurveSweep(study, self.search, points=args.points, budgets=args.budgets, asked=args.budget, host=host)
        sweep.run(self.shown.count)
        solvers = [*([RECOMPUTE_ALONE] if sweep.alone is not None else []), *args.solvers]
        return Answers(
            curve=sweep.with_sizes(self.sizes, self.sized, samples=self.samples, offload=self.offload),
            devices=on_devices(args.devices, self.study_on, for_one_row(self.search), self.offload),
            methods=methods_beside(sweep, solvers, self.shown.count),
            plans=tuple(sweep.plans()) if args.html else (),
        )

    def study_on(self, device: str) -> Study:
        """Capture the step for another device."""
        import planner

        args = _with(self.args, device=device)
        asked = _asked.keywords(args, Search, Target, Training)
        return _asked.ask(planner.study, _asked.load(args, real=False), runtime=args.runtime, **asked)

    def study(self) -> Study:
        """Capture the step that the curve is of."""
        loaded = _asked.load(self.args, real=False)
        self.shown("capturing forward and backward")
        first = _asked.inputs_of(loaded).tensors()[0]
        self.has_loss = loaded.loss_fn is not None
        self.samples = first.shape[0] if first.dim() else 1
        return self.studied(loaded, beside_eager=True)

    def sized(self, option: str, size: int) -> Study:
        """Capture the step at another size."""
        return self.studied(_asked.load(_with(self.args, **{option: size}), real=False))

    def studied(self, loaded: ZooModel, *, beside_eager: bool = False) -> Study:
        """Study the step of a model that was built."""
        from planner.session.step import Options
        from planner.session.studying import options_of_study, study_step

        asked = _asked.keywords(self.args, Target, Training)
        options = Options.of(asked | {"runtime": self.args.runtime, "search": self.search, "name": loaded.name})
        inputs = _asked.inputs_of(loaded)
        return study_step(loaded.model, inputs, options_of_study(options), loaded.loss_fn, beside_eager=beside_eager)


def _with(args: argparse.Namespace, **other: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | other)


def _hand_out(answers: Answers, args: argparse.Namespace, has_loss: bool) -> None:
    from planner.common.atomic import write_text
    from planner.report.what_if import render as render_what_if

    if args.html:
        from planner.report.page.what_if import what_if_page

        one = _with(args, time_limit_seconds=Search().time_limit_seconds)  # the curve's is for all its plans
        page = what_if_page(answers, lambda budget: _asked.call(_with(one, budget=budget), has_loss=has_loss))
        write_text(args.html, page)
    hand_out(answers.report(), args.json, partial(render_what_if, answers))


COMMAND = _WhatIf()
