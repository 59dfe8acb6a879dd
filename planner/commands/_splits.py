"""``what-if --gpus``: which combination of splits over many devices trains fastest."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.commands import _asked
from planner.commands._options import SIZE, count
from planner.commands._terminal import hand_out, quiet, reporting, write_json
from planner.common.options import ENGINES, Training, picked
from planner.common.units import parse_size
from planner.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from planner.analysis.splits.types import Answer
    from planner.capture.inputs import Inputs
    from planner.common.limits import Progress
    from planner.zoo import ZooModel

_FOR_SPLITS = ("global_batch", "node_gpus", "node_link", "network", "no_overlap", "engine", "top", "confirm")

_FOR_ONE_DEVICE = (
    "budget", "budgets", "batch_sizes", "seq_lens", "devices", "solvers", "offload", "csv", "html", "plot", "profile",
    "batch_size", "gradient_accumulation",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is asked about many devices."""
    group = parser.add_argument_group("many devices: the fastest combination of splits, in place of the curve")
    group.add_argument("--gpus", type=count, metavar="N", help="devices that train together, of the kind --device")
    group.add_argument("--global-batch", type=count, metavar="N", help="samples of one step, of all devices together")
    group.add_argument("--node-gpus", type=count, metavar="N", help="devices of a node (default 8)")
    group.add_argument("--node-link", **SIZE, help="bytes a second to others of the node: 450GB (default: by device)")
    group.add_argument("--network", **SIZE, help="bytes a second to other nodes, of each device: 50GB")
    group.add_argument("--no-overlap", action="store_true", help="nothing that replicas send hides behind arithmetic")
    group.add_argument("--engine", choices=ENGINES, metavar="NAME", help=f"only what it runs: {', '.join(ENGINES)}")
    group.add_argument("--top", type=count, metavar="N", help="how many answers (default 10)")
    group.add_argument("--confirm", type=count, metavar="N", help="have N of them planned exactly, where that can be")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the question is about many devices; UsageError for options that belong to such a question alone."""
    if args.gpus is not None:
        return True
    if given := [name for name in _FOR_SPLITS if getattr(args, name) not in (None, False)]:
        raise UsageError(f"{_option(given[0])} is for a split over many devices: give --gpus N too")
    return False


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check(args: argparse.Namespace) -> None:
    """Refuse at once what does not go together."""
    _asked.check_model(args)
    if given := [name for name in _FOR_ONE_DEVICE if getattr(args, name)]:
        raise UsageError(f"{_option(given[0])} does not go with --gpus, which asks for the best split and no curve")
    training = picked(Training, vars(args))
    if training.data_parallel != "none" or training.tensor_parallel > 1:
        raise UsageError("--gpus finds out how a model is split: leave out --data-parallel, --ranks, --tensor-parallel")
    for name in ("global_batch", "device"):
        if getattr(args, name) is None:
            raise UsageError(f"--gpus needs {_option(name)}: {_NEEDED[name]}")
    if args.cost_model not in ("auto", "roofline"):
        raise UsageError("--gpus estimates by the roofline alone: leave out --cost-model")
    _asked.check_target(args)
    for name in ("node_link", "network"):
        if getattr(args, name) is not None:
            parse_size(getattr(args, name))
    _asked.check_writable(args.json)


_NEEDED = {"global_batch": "how many samples one step has", "device": "which accelerator all of them are"}


def run(args: argparse.Namespace) -> int:
    """Search, and hand out the answer."""
    from planner.analysis.splits.types import NoSplitFitsError
    from planner.report import render_splits

    check(args)
    try:
        with quiet(args.debug), reporting(args.debug) as progress:
            answer = _answer(args, progress)
    except NoSplitFitsError as error:
        write_json(error.report, args.json)
        raise
    hand_out(answer.report(), args.json, partial(render_splits, answer))
    return 0


def _answer(args: argparse.Namespace, progress: Progress) -> Answer:
    from planner.session.splitting import PROBED_LAYERS, LayersDifferError, best_splits, confirmed

    progress("capturing one sample")
    asked: dict[str, Any] = {
        **_asked.keywords(args, Training),
        "gpus": args.gpus,
        "global_batch": args.global_batch,
        "device": args.device,
        "engines": (args.engine,) if args.engine else ENGINES,
    }
    for name in ("data_parallel", "ranks", "tensor_parallel", "gradient_accumulation"):
        asked.pop(name)
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
    if not args.confirm:
        return answer

    def at(samples: int) -> tuple[nn.Module, Inputs]:
        from planner.capture.inputs import Inputs

        loaded = _one_sample(args)
        return loaded.model, Inputs.of(loaded.example_args, loaded.example_kwargs).with_batch(samples)

    loss_fn = _one_sample(args).loss_fn
    return confirmed(answer, at, loss_fn, picked(Training, vars(args)), args.confirm, progress)


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
