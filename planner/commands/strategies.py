"""``strategies``: what established systems would do with a model, beside the best plans at the same peaks."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from planner.commands import _asked
from planner.commands._options import Parser, model_options, seconds, training_options, whole
from planner.commands._terminal import quiet, reporting, show, write_json


class _Strategies:
    name = "strategies"
    summary = "simulate what established systems do, beside the best plans"
    examples = ("strategies minigpt", "strategies gpt2 --only every-3,megatron-block-8 --device h100 --dtype bf16")

    def parents(self) -> Sequence[Parser]:
        return model_options(), training_options()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(runtime="graph")  # what is set beside each other is of whole graphs
        group = parser.add_argument_group("solving and results")
        group.add_argument("--only", metavar="NAMES", help="these strategies: every-3,megatron-block-8; default all")
        group.add_argument("--device", metavar="NAME", help="accelerator to plan for; by default what is here")
        group.add_argument("--cost-model", metavar="NAME", default="roofline", help="roofline or measured")
        group.add_argument("--profile", metavar="FILE", help="costs that 'profile' recorded")
        group.add_argument("--solver", metavar="NAME", default="auto")
        group.add_argument(
            "--time-limit", type=seconds, metavar="S", default=20.0, help="seconds for all plans (default 20)"
        )
        group.add_argument("--deterministic", action="store_true", help="count work instead of seconds")
        group.add_argument("--seed", type=whole, metavar="N", default=0, help="of random choices in a solver")
        group.add_argument("--json", metavar="FILE", help="write it as JSON; '-' writes it to stdout, alone")

    def run(self, args: argparse.Namespace) -> int:
        from planner import strategies

        _asked.check_solving(args)
        names = [name.strip() for name in args.only.split(",")] if args.only is not None else []
        for name in names:
            strategies.get(name)
        with quiet(args.debug), reporting(args.debug) as progress:
            import planner
            from planner.analysis.strategy_comparison import compare
            from planner.capture.memory import keep_freed_memory

            progress("building the model")
            if args.cost_model == "measured":
                keep_freed_memory()
            loaded = _asked.load(args, real=False)
            study = planner.study(
                loaded.model,
                loaded.example_args,
                example_kwargs=loaded.example_kwargs,
                loss_fn=loaded.loss_fn,
                device=args.device,
                cost_model=args.cost_model,
                profile=planner.load_profile(args.profile) if args.profile else None,
                name=loaded.name,
                progress=progress,
                **dataclasses.asdict(_asked.training(args)),
            )
            found = compare(
                study,
                names,
                solver=args.solver,
                time_limit_seconds=args.time_limit,
                deterministic=args.deterministic,
                seed=args.seed,
                progress=progress,
            )
        write_json(found.report(), args.json)
        if args.json != "-":
            from planner.report import render_established

            show(lambda console: render_established(found, console))
        return 0


COMMAND = _Strategies()
