"""``split``: the fastest split of a model over many devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

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
        group.add_argument("--node-gpus", type=count, metavar="N", help="devices of a node (default 8)")
        group.add_argument(
            "--node-link", **SIZE, help="bytes a second to others of the node: 450GB (default: by device)"
        )
        group.add_argument("--network", **SIZE, help="bytes a second to other nodes, of each device: 50GB")
        group.add_argument("--no-overlap", action="store_true", help="communication hides behind nothing")
        group.add_argument("--engine", choices=ENGINES, metavar="NAME", help=f"only what it runs: {', '.join(ENGINES)}")
        results = parser.add_argument_group("results")
        results.add_argument("--top", type=count, metavar="N", help="how many answers (default 10)")
        json_option(results)

    def run(self, args: argparse.Namespace) -> int:
        from planner.plans import device_file

        _asked.check_model(args)
        if args.batch_size:
            raise UsageError("--batch-size is what is searched for: leave it out, and give --global-batch")
        device_file.find(args.device)
        for size in (args.node_link, args.network):
            if size is not None:
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
    from planner.extras.splits.best import PROBED_LAYERS, LayersDifferError, best_splits

    progress("capturing one sample")
    asked: dict[str, Any] = {
        **{name: getattr(args, name) for name in ("optimizer", "master_weights", "reserve")},
        "gpus": args.gpus,
        "global_batch": args.global_batch,
        "device": args.device,
        "engines": (args.engine,) if args.engine else ENGINES,
    }
    asked |= {name: getattr(args, name) for name in ("node_gpus", "top") if getattr(args, name) is not None}
    asked |= {"overlap": not args.no_overlap, "node_link": args.node_link, "network": args.network}
    layers = _layers(args)
    if layers is not None and layers > PROBED_LAYERS:
        try:
            few = _one_sample(_with(args, layers=PROBED_LAYERS))
            answer = _asked.ask(best_splits, few, progress, layers=layers, **asked)
        except LayersDifferError:
            progress("capturing all layers: they are not alike")
            answer = _asked.ask(best_splits, _one_sample(args), progress, **asked)
    else:
        answer = _asked.ask(best_splits, _one_sample(args), progress, **asked)
    return answer


def _one_sample(args: argparse.Namespace) -> ZooModel:
    """Build the whole model, with inputs of one sample."""
    from dataclasses import replace

    from planner.capture.inputs import Inputs

    is_own = ":" in (args.model or args.name)
    loaded = _asked.load(args if is_own else _with(args, batch_size=1), real=False)
    inputs = Inputs.of(loaded.example_args, loaded.example_kwargs).with_batch(1)
    return replace(loaded, example_args=inputs.args, example_kwargs=inputs.kwargs)


def _layers(args: argparse.Namespace) -> int | None:
    """Return how many layers a model has; None for one of the user's own if that is not said."""
    from planner import zoo

    name = args.model or args.name
    return args.layers if ":" in name else args.layers or zoo.layers_of(name)


def _with(args: argparse.Namespace, **other: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | other)


COMMAND = _Split()
