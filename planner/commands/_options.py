"""Options of the commands, derived from the dataclasses of :mod:`planner.common.options`."""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar

from planner.common.options import AUTO, OFF, Budget, Chunk, Offload, Runtime, Search, Target, Training, flat_name
from planner.common.units import parse_size
from planner.errors import UsageError

DTYPES = {
    "fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "float16", "float16": "float16", "fp64": "float64", "float64": "float64",
}  # fmt: skip
"""Names of element types as people write them."""


Read = TypeVar("Read")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, whose usage names what is no option, and whose help leaves out rare ones."""

    shows_all = False

    def shorten_usage(self) -> None:
        """Leave the options to the list of them."""
        named = (action.metavar for action in self._actions if not action.option_strings)
        self.usage = " ".join([self.prog, "[OPTIONS]", *map(str, named)])

    def typed(self, args: argparse.Namespace) -> Iterator[str]:
        """Write what another command was given as this one takes it, without what each command has for itself."""
        for action in self._actions:
            given = getattr(args, action.dest, None)
            is_usual = given in (None, action.default) or given not in (action.choices or (given,))
            if not is_usual and action.dest not in ("time_limit_seconds", "json", "html"):
                yield from (*action.option_strings[given is False :][:1], *([] if action.nargs == 0 else [str(given)]))

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        is_unit = re.fullmatch("unrecognized arguments: ([KMGT]i?)?B", message, re.IGNORECASE)
        hint = ": write a size as one word, like 8GiB" if is_unit else ""
        raise UsageError(f"{message}{hint} (see {self.prog} --help)")

    def format_help(self) -> str:
        """Return the help, without rare options unless all are asked for."""
        hidden = {action: action.help for action in self._actions if action in _RARE and not self.shows_all}
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in hidden.items():
                action.help = text


class HelpAll(argparse.Action):
    """Shows the help with rare options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.shows_all = True
        parser.print_help()
        parser.exit()


_RARE: set[argparse.Action] = set()


def rare(action: argparse.Action) -> None:
    """Show an option in ``--help-all`` only."""
    _RARE.add(action)


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
    """Turn errors of a reader into the parser's, with the option's name."""

    def checked(text: str) -> Read:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


@reading
def size(text: str) -> str:
    """Refuse text that is neither a size in bytes nor a percentage."""
    parse_size(text, whole_bytes=2**60)
    return text


@reading
def device(text: str) -> str:
    """Read the name of a device that is known; ``cuda:0`` is the card that is here."""
    from planner.plans import device_file

    if text.startswith("cuda"):
        import torch

        from planner.measure.devices import card

        number = card(text)
        torch.cuda.set_device(number)
        text = torch.cuda.get_device_name(number)
    device_file.find(text)
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


_READ: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true", "default": False},
    "bool | str": {"action": argparse.BooleanOptionalAction, "default": AUTO},
    "int": {"type": whole, "metavar": "N"},
    "float": {"type": seconds, "metavar": "S"},
    "Size": SIZE,
    "Size | None": SIZE,
    "link": {"type": lambda text: f"{size(text.removesuffix('/s'))}/s", "metavar": "RATE"},
    "Chunk": {"type": _chunk},
    "device": {"type": device},
}
"""What the parser is told of an option, by the type that its field declares, or by its name."""


def _first_sentences(group: type[Any]) -> dict[str, str]:
    """Return the first sentence on each field from a group's docstring."""
    described = re.findall(r"^(\w+) : .*\n((?:    .*(?:\n|$))+)", inspect.getdoc(group) or "", re.MULTILINE)
    texts = {name: " ".join(text.split()).partition(". ")[0].rstrip(".") for name, text in described}
    return {name: (text[0].lower() + text[1:]).replace("%", "%%") for name, text in texts.items()}


def add(parser: argparse._ActionsContainer, group: type[Any], *only: str, **told: dict[str, Any]) -> None:
    """Add the options of a group of :mod:`planner.common.options`, or only some: each sets the field of its name.

    ``told`` is by name what the parser is told of an option in this place alone.
    """
    helps = _first_sentences(group)
    for field in fields(group):
        name, shown = flat_name(field), field.metadata
        if not shown or (only and name not in only):
            continue
        read = _READ.get(name, _READ.get(str(field.type), {}))
        how = {"dest": name, "default": field.default, "help": helps[field.name], **read}
        how |= {key: shown[key] for key in ("metavar", "choices") if key in shown} | told.get(name, {})
        action = parser.add_argument(shown.get("flag", f"--{name.replace('_', '-')}"), **how)
        if shown.get("rare") and not only:
            rare(action)


class AboutModel:
    """A command that is about a step of a model."""

    def parents(self) -> Sequence[Parser]:
        """Return the options on the model, and on what surrounds the step; names are checked where they are known."""
        training = Parser(add_help=False)
        add(training.add_argument_group("training"), Training)
        return model_options(), training


class Alone:
    """A command that needs no model."""

    def parents(self) -> Sequence[Parser]:
        """Return nothing."""
        return ()


def json_option(parser: argparse._ActionsContainer) -> None:
    """Add where the report goes as JSON."""
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; '-': to stdout, alone")


def model_options() -> Parser:
    """Return the options that name a model and its sizes."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("model")
    group.add_argument("name", metavar="MODEL", nargs="?", help="a name that 'models' lists, or what --model takes")
    group.add_argument("--model", metavar="SPEC", help="file.py:factory, or hf:ORG/NAME, hf:FOLDER")
    for size in ("batch-size", "seq-len", "image-size", "layers"):
        action = group.add_argument(f"--{size}", type=count, metavar="N", help=f"{size} to build the model with")
        if size in ("image-size", "layers"):
            rare(action)
    group.add_argument("--dtype", choices=DTYPES, metavar="TYPE", help="fp32, bf16 or fp16")
    return parser


def solving_options(
    parser: argparse.ArgumentParser, default_seconds: float = 10.0, limits: str = "for the solver"
) -> tuple[argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """Add the options on results, device, costs and search; returns the groups of planning and of results."""
    planning, results = parser.add_argument_group("planning"), parser.add_argument_group("results")
    json_option(results)
    limit = {"default": default_seconds, "help": f"seconds {limits} (default {default_seconds:g})"}
    add(planning, Target)
    add(planning, Search, time_limit_seconds=limit)
    return planning, results


def planning_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of commands that make one plan of a step. Returns the group of the results."""
    planning, results = solving_options(parser)
    add(planning, Runtime)
    add(planning, Offload)
    rare(planning.add_argument("--no-cache", action="store_true", help="search again, and do not store the result"))
    rare(results.add_argument("--full", action="store_true", help="print the whole report, not one screen of it"))
    return results


def budget_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the budgets, of which one at most is given, and a strategy. Returns what may have one more in their place."""
    group = parser.add_argument_group("budget")
    one = group.add_mutually_exclusive_group()
    add(one, Budget, "budget", "activation_budget")
    add(group, Budget, "strategy")
    return one
