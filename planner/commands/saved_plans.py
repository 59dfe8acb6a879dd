"""``explain`` and ``export``: saved plans, and what other frameworks call what they do."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from planner.commands import _asked
from planner.commands._options import AboutModel, Alone, add, json_option
from planner.commands._terminal import hand_out, write_json
from planner.common.options import Search, Target, Training
from planner.errors import UsageError

_LARGEST = 10


class _Explain(Alone):
    name = "explain"
    summary = "say why a plan keeps or recomputes each value"
    examples = ("explain gpt2.plan", "explain gpt2.plan transformer.h.0.mlp")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("plan", metavar="PLAN", help="a plan that 'plan --save' wrote")
        parser.add_argument(
            "module",
            metavar="MODULE",
            nargs="?",
            help=f"path of a module, with all inside it: transformer.h.0; without it, the {_LARGEST} largest values",
        )
        parser.add_argument("--all", action="store_true", help="every value of the model")
        json_option(parser)

    def run(self, args: argparse.Namespace) -> int:
        from planner.analysis.explain import explain
        from planner.plans.plan import Plan
        from planner.report.explain import render as render_explanation

        if args.all and args.module:
            raise UsageError("--all shows every module: leave it out, or leave out the module")
        _asked.check_writable(args.json)
        explanation = explain(Plan.load(args.plan), args.module)
        largest = None if args.all or args.module else _LARGEST
        hand_out(explanation.report(), args.json, partial(render_explanation, explanation, largest=largest))
        return 0


class _Export(AboutModel):
    name = "export"
    summary = "export a plan to another framework"
    examples = (
        "export gpt2 gpt2.plan --to huggingface --output checkpointing.py",
        "export my_model.py:make my.plan --to fsdp --json -",
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("plan", metavar="PLAN", help="a saved plan, made for this model and its sizes")
        parser.add_argument("--to", metavar="NAME", required=True, help="accelerate, fsdp or huggingface")
        parser.add_argument("--output", metavar="FILE", help="write the text to a file, and the verdict to stdout")
        add(parser, Target)
        json_option(parser)

    def run(self, args: argparse.Namespace) -> int:
        import planner
        from planner import exporters
        from planner.exporters._export import Label
        from planner.plans.plan import Plan

        exporters.get(args.to)
        if args.output == "-":
            raise UsageError("--output -: the text goes to standard output without --output")
        _asked.check_writable(args.output, args.json)
        plan = Plan.load(args.plan)
        study = None
        if not exporters.carries_exactly(plan, args.to) or args.name or args.model:
            if args.name is None and args.model is None:
                args.name = plan.model  # of the zoo, unless the check below refuses it
            _asked.check_model(args)
            _asked.check_target(args)
            asked = _asked.keywords(args, Search, Target, Training)
            with _asked.working(args) as (progress, loaded):
                study = _asked.ask_or_build(planner.study, args, loaded, progress, runtime="modules", **asked)
        made = exporters.export(plan, to=args.to, study=study)
        write_json(made.report(), args.json)
        if made.label is Label.UNSUPPORTED:
            raise UsageError(made.verdict)
        if args.output:
            made.save(args.output)
        elif args.json != "-":
            sys.stdout.write(made.text)
        print(made.verdict, file=sys.stdout if args.output and args.json != "-" else sys.stderr)
        return 0


COMMAND = (_Explain(), _Export())
