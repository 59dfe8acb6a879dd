"""``split``: the fastest split of a model over many devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from planner.commands import _asked
from planner.commands._options import SIZE, Parser, add, count, json_option, model_options
from planner.commands._terminal import hand_out, quiet, reporting, write_json
from planner.common.options import ENGINES, Target, Training
from planner.common.units import parse_size
from planner.errors import UsageError
from planner.extras.pipelines import schedules as _  # noqa: F401 (there is no such command without pipelines)

if TYPE_CHECKING:
    from planner.common.limits import Progress
    from planner.extras.splits.types import Answer
    from planner.zoo import ZooModel


class _Split:
    name = "split"
    summary = "find the fastest split of a model over many devices; nothing is run"
    examples = (
        "split llama-7b --gpus 8 --device h100 --global-batch 256 --optimizer adamw --master-weights",
        "split --model train.py:make --layers 80 --gpus 64 --device a100-80 --global-batch 512",
    )

    def parents(self) -> Sequence[Parser]:
        training = Parser(add_help=False)
        group = training.add_argument_group("what else is on each device")
        add(group, Training, "optimizer", "master_weights", "reserve")
        return model_options(), training

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("devices")
        group.add_argument("--gpus", type=count, metavar="N", required=True, help="devices that train together")
        add(group, Target, "device", device={"required": True, "help": "which accelerator all of them are: h100"})
        group.add_argument("--global-batch", type=count, metavar="N", required=True, help="samples of one step of all")
        group.add_argument("--node-gpus", type=count, metavar="N", default=8, help="devices of a node (default 8)")
        group.add_argument(
            "--node-link", **SIZE, help="bytes a second to others of the node: 450GB (default: by device)"
        )
        group.add_argument("--network", **SIZE, help="bytes a second to other nodes, of each device: 50GB")
        group.add_argument(
            "--no-overlap", dest="overlap", action="store_false", help="communication hides behind nothing"
        )
        group.add_argument("--engine", choices=ENGINES, metavar="NAME", help=f"only what it runs: {', '.join(ENGINES)}")
        results = parser.add_argument_group("results")
        results.add_argument("--top", type=count, metavar="N", default=10, help="how many answers (default 10)")
        json_option(results)

    def run(self, args: argparse.Namespace) -> int:
        from planner.plans import device_file

        _asked.check_model(args)
        if args.batch_size:
            raise UsageError("--batch-size is what is searched for: leave it out, and give --global-batch")
        device_file.find(args.device)
        for size in filter(None, (args.node_link, args.network)):
            parse_size(size)
        _asked.check_writable(args.json)
        from planner.extras.splits.report import render
        from planner.extras.splits.types import NoSplitFitsError

        try:
            with quiet(args.debug), reporting(args.debug) as progress:
                answer = _answer(args, progress)
        except NoSplitFitsError as error:
            write_json(error.report, args.json)
            raise
        hand_out(answer.report(), args.json, partial(render, answer))
        return 0


def _answer(args: argparse.Namespace, progress: Progress) -> Answer:
    """Capture one sample, of few layers where that is enough, and search."""
    from planner import zoo
    from planner.extras.splits.best import PROBED_LAYERS, best_splits
    from planner.extras.splits.table import LayersDifferError

    progress("capturing one sample")
    same = ("gpus", "global_batch", "device", "node_gpus", "node_link", "network", "overlap", "top")
    asked = {name: getattr(args, name) for name in same} | _asked.keywords(args, Training)
    asked["engines"] = (args.engine,) if args.engine else ENGINES
    is_own = ":" in (args.model or args.name)
    # Of the user's own model it is known only if it is said.
    layers = args.layers if is_own or args.layers else zoo.layers_of(args.model or args.name)
    if layers is not None and layers > PROBED_LAYERS:
        few = argparse.Namespace(**vars(args) | {"layers": PROBED_LAYERS})
        try:
            return _asked.ask(best_splits, _one_sample(few, is_own), progress, layers=layers, **asked)
        except LayersDifferError:
            progress("capturing all layers: they are not alike")
    return _asked.ask(best_splits, _one_sample(args, is_own), progress, **asked)


def _one_sample(args: argparse.Namespace, is_own: bool) -> ZooModel:
    """Build a model, with inputs of one sample."""
    from dataclasses import replace

    loaded = _asked.load(argparse.Namespace(**vars(args) | {"batch_size": None if is_own else 1}), real=False)
    inputs = _asked.inputs_of(loaded).with_batch(1)
    return replace(loaded, example_args=inputs.args, example_kwargs=inputs.kwargs)


COMMAND = _Split()
