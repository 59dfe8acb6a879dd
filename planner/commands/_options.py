"""What can be typed after the commands, and how it is checked before anything is done."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar

from planner.common.options import AUTO, OFF, PARALLEL, Chunk, Offload, Search, Target, Training
from planner.common.units import parse_size
from planner.errors import UsageError
from planner.plans.pipeline_schedules import PipelineSchedule

DTYPES = {
    "fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "float16", "float16": "float16", "fp64": "float64", "float64": "float64",
}  # fmt: skip
"""Names of element types as people write them."""


Read = TypeVar("Read")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose usage names what is no option."""

    def shorten_usage(self) -> None:
        """Leave the options to the list of them."""
        named = (action.metavar for action in self._actions if not action.option_strings)
        self.usage = " ".join([self.prog, "[OPTIONS]", *map(str, named)])

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def whole(text: str, least: int = 0, what: str = "a whole number") -> int:
    """Read a whole number."""
    if not (text.isascii() and text.isdigit() and least <= int(text[:19]) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


count = partial(whole, least=1, what="a whole number above zero")


def seconds(text: str) -> float:
    """Read a number of seconds above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return number


def reading(read: Callable[[str], Read]) -> Callable[[str], Read]:
    """Let the parser say, with the name of the option, why something cannot be read."""

    def checked(text: str) -> Read:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


@reading
def size(text: str) -> str:
    """Refuse what is no size, in bytes or as a percentage."""
    parse_size(text, whole_bytes=2**60)
    return text


def names(text: str) -> list[str]:
    """Read names with commas between them."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name: write names with commas between them")
    return found


SIZE: dict[str, Any] = {"metavar": "SIZE", "type": size}
NAMES: dict[str, Any] = {"metavar": "NAMES", "type": names, "default": ()}
"""What the parser is told of options that are sizes, and lists of names."""


def _chunk(text: str) -> Chunk:
    try:
        return text if text in (AUTO, OFF) else count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, off or a number of chunks") from None


_TOLD: dict[str, dict[str, Any]] = {
    "optimizer": {"metavar": "NAME", "help": "adamw, momentum, adafactor, adam8bit, ...: count its memory"},
    "master_weights": {"help": "16-bit parameters have float32 copies"},
    "gradient_accumulation": {"flag": "--accumulate", "help": "gradients of earlier backwards are resident"},
    "data_parallel": {"choices": PARALLEL},
    "ranks": {"type": count, "metavar": "N", "help": "devices that train together"},
    "tensor_parallel": {"type": count, "metavar": "N", "help": "devices that share each layer; planned, not run"},
    "reserve": {"metavar": "SIZE", "help": "what is to stay free: 1GiB, 5%% of the device"},
    "cuda_graphs": {"help": "forward and backward run as CUDA graphs, which hold their memory between steps"},
    "arena": {"help": "give all that the step allocates fixed places in one arena, and say what that takes"},
    "device": {
        "metavar": "NAME",
        "help": "accelerator to plan for: a name (h100), or a file that 'calibrate' wrote; by default what is here",
    },
    "cost_model": {
        "metavar": "NAME",
        "help": "roofline (from the device's data sheet), measured (runs each different operation here), or "
        "auto (the default: measures for a moment if model and device are here)",
    },
    "profile": {"metavar": "FILE", "help": "costs that 'profile' recorded, here or on another machine"},
    "offload": {"help": "let values wait in the host's memory too"},
    "host_budget": {
        "metavar": "SIZE",
        "help": "what they may take of it: 64GiB, 60%% (default 50%% of this machine's)",
    },
    "offload_at_least": {"metavar": "SIZE", "help": "smaller values stay (default 1MiB)"},
    "offload_lossy": {"help": "as bfloat16 in place of float32: gradients are not bit-equal"},
    "solver": {"metavar": "NAME"},
    "time_limit_seconds": {"flag": "--time-limit", "type": seconds, "metavar": "S"},
    "deterministic": {"help": "count work instead of seconds: the same plan every time"},
    "seed": {"type": whole, "metavar": "N", "help": "of random choices in a solver (default 0)"},
}
"""What the parser is told of an option, by the field that it sets; kind and default are the field's."""


def add(parser: argparse._ActionsContainer, group: type[Any], *only: str, **told: dict[str, Any]) -> None:
    """Add the options of a group of :mod:`planner.common.options`, or only some: each sets the field of its name.

    ``told`` is by name what the parser is told of an option in this place alone.
    """
    for field in fields(group):
        if field.name in _TOLD and (not only or field.name in only):
            how = {"dest": field.name, "default": field.default, **_TOLD[field.name], **told.get(field.name, {})}
            if field.default is False:
                how["action"] = "store_true"
            parser.add_argument(how.pop("flag", f"--{field.name.replace('_', '-')}"), **how)


class AboutModel:
    """A command that is about a step of a model."""

    def parents(self) -> Sequence[Parser]:
        """Return the options on the model, and on what surrounds the step; names are checked where they are known."""
        training = Parser(add_help=False)
        around = (
            field.name for field in fields(Training) if field.name not in ("arena", "cuda_graphs")
        )  # which are how the step itself lies, and runs
        add(training.add_argument_group("what else is on the device"), Training, *around)
        return model_options(), training


class Alone:
    """A command that needs no model."""

    def parents(self) -> Sequence[Parser]:
        """Return nothing."""
        return ()


def json_option(parser: argparse._ActionsContainer) -> None:
    """Add where the report goes as JSON."""
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; '-' writes it to stdout, alone")


def model_options() -> Parser:
    """Return the options that name a model and its sizes."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("model")
    group.add_argument("name", metavar="MODEL", nargs="?", help="a name that 'models' lists, or what --model takes")
    group.add_argument(
        "--model", metavar="SPEC", help="path/to/file.py:factory or package.module:factory, giving (model, inputs)"
    )
    for option in ("--batch-size", "--seq-len", "--image-size", "--layers"):
        group.add_argument(option, type=count, metavar="N")
    group.add_argument("--dtype", choices=DTYPES, metavar="TYPE", help="fp32, bf16 or fp16")
    return parser


def solving_options(
    parser: argparse.ArgumentParser, default_seconds: float = 10.0, limits: str = "for the solver"
) -> argparse._ArgumentGroup:
    """Add the options on results, device, costs and search; say what the time limit is for. Returns the results."""
    results = parser.add_argument_group("results")
    json_option(results)
    add(parser.add_argument_group("device and costs"), Target)
    limit = {"default": default_seconds, "help": f"seconds {limits} (default {default_seconds:g})"}
    search = parser.add_argument_group("search (advanced)")
    add(search, Search, time_limit_seconds=limit)
    return results


def planning_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of commands that make one plan of a step. Returns the group of the results."""
    results = solving_options(parser)
    results.add_argument("--full", action="store_true", help="print the whole report, not one screen of it")
    results.add_argument("--operations", action="store_true", help="add FLOPs, bytes and seconds of every operation")
    results.add_argument("--timings", action="store_true", help="add how long each stage of planning took")
    how = parser.add_argument_group("how the plan is carried out (advanced)")
    how.add_argument("--runtime", metavar="NAME", default="auto", help="what runs the plan: auto, graph, modules, ...")
    how.add_argument(
        "--strategy",
        metavar="NAME",
        help="do what an established system does ('strategies' lists them), at the peak that it has or within a budget",
    )
    how.add_argument(
        "--chunk",
        metavar="auto|off|N",
        type=_chunk,
        default=OFF,
        help="compute what makes the peak in N chunks; auto tries several (default off)",
    )
    how.add_argument("--no-cache", action="store_true", help="search anew, and keep nothing of it")
    add(parser.add_argument_group("offload to the host's memory (advanced)"), Offload)
    return results


def budget_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the budgets, of which one at most is given, and what may stand in place of one."""
    group = parser.add_argument_group("budget").add_mutually_exclusive_group()
    group.add_argument("--budget", **SIZE, help="all the device may hold: 8GiB, 8GB, bytes, or 60%% of eager's peak")
    group.add_argument("--activation-budget", **SIZE, help="what the step may add to what is resident")
    return group


def pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Add what cuts the model into the stages of a pipeline."""
    group = parser.add_argument_group("pipeline (advanced; the batch size is that of one micro-batch)")
    group.add_argument("--pipeline-stages", type=count, metavar="N", help="plan each of N devices in a row")
    group.add_argument("--micro-batches", type=count, metavar="M", help="of one training step")
    group.add_argument("--schedule", metavar="NAME", help="1f1b (default), gpipe or interleaved")
    group.add_argument(
        "--chunks", type=count, metavar="V", help="groups of layers on each device if interleaved (default 2)"
    )


def pipeline_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options on a pipeline, refused where they do not go together; none if there is no pipeline."""
    if args.pipeline_stages is None:
        if given := [name for name in ("micro_batches", "schedule", "chunks") if getattr(args, name, None) is not None]:
            raise UsageError(f"--{given[0].replace('_', '-')} is for a pipeline: give --pipeline-stages N too")
        return {}
    if args.micro_batches is None:
        raise UsageError("--pipeline-stages needs --micro-batches M: how many one training step has")
    refused = {"--activation-budget": args.activation_budget, "--save": args.save, "--verify": args.verify,
               "--operations": args.operations, "--html": args.html, "--tree": args.tree,
               "--memory-viz": args.memory_viz, "--timings": args.timings,
               "--runtime": args.runtime != "auto", "--offload": args.offload, "--strategy": args.strategy,
               "--chunk": args.chunk != OFF}  # fmt: skip
    if given := [option for option, value in refused.items() if value]:
        raise UsageError(f"{given[0]} does not go with --pipeline-stages: stages are planned for --budget, not run")
    schedule = args.schedule or "1f1b"
    chunks = args.chunks or (2 if schedule == "interleaved" else 1)
    asked = {"stages": args.pipeline_stages, "micro_batches": args.micro_batches, "chunks": chunks}
    PipelineSchedule(name=schedule, **asked)  # refuses what does not go together
    return {**asked, "schedule": schedule}
