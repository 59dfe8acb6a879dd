"""What the commands share: the model that is named, what a plan is told, and refusing early what would fail late."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner import zoo
from planner.commands._options import DTYPES
from planner.commands._terminal import quiet, reporting
from planner.common.limits import Progress
from planner.common.options import AUTO, GROUPS, Offload, Training, picked
from planner.common.program import program
from planner.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from planner.capture.inputs import Inputs

Answer = TypeVar("Answer")


def check_model(args: argparse.Namespace) -> None:
    """Refuse a model that is not named, or not known."""
    if (args.name is None) == (args.model is None):
        raise UsageError(f"name one model: a name that '{program()} models' lists, hf:ORG/NAME, or file.py:factory")
    if not zoo.is_own(args.model or args.name):
        with quiet(args.debug):  # what transformers says of a configuration
            zoo.describe(args.model or args.name)


def check_writable(*paths: str | None) -> None:
    """Refuse files that cannot be written; ``"-"`` is standard output."""
    from planner.common import atomic

    for path in paths:
        if path not in (None, "-"):
            atomic.check_writable(path)


def check_target(args: argparse.Namespace) -> None:
    """Refuse cost models that are not known."""
    import cost_models

    try:
        cost_models.get(args.cost_model)
    except cost_models.UnknownNameError as error:
        raise UsageError(str(error)) from error


def check_solving(args: argparse.Namespace) -> None:
    """Check names and output files before minutes of work."""
    from planner import runtimes
    from planner.analysis.compatibility import check_solver

    check_model(args)
    check_writable(args.json)
    runtimes.check(args.runtime)
    check_solver(args.runtime, args.solver)
    picked(Training, vars(args))
    check_target(args)


def check_offload(args: argparse.Namespace) -> None:
    """Refuse offload options without offload, and devices whose link to the host is unknown where it is asked for."""
    from planner.ir.host import host_of
    from planner.plans import device_file

    if args.host_budget and not args.offload:
        raise UsageError("--host-budget is for what is offloaded: leave out --no-offload")
    if args.offload is True and args.device:
        host_of(device_file.find(args.device), args.host_budget, at_least=args.offload_at_least, link=args.link)


def keywords(args: argparse.Namespace, *groups: type[Any]) -> dict[str, Any]:
    """Return the groups of options that the command has, as keywords of the public functions."""
    import planner

    asked = vars(args) | ({"profile": planner.load_profile(args.profile)} if getattr(args, "profile", None) else {})
    return {keyword: picked(kind, asked) for keyword, kind in GROUPS.items() if kind in groups}


def ask(
    function: Callable[..., Answer], loaded: zoo.ZooModel, progress: Progress | None = None, **asked: Any
) -> Answer:
    """Call a public function with a model, its inputs and its loss."""
    if "search" in asked:
        asked["search"] = replace(asked["search"], progress=progress)
    else:
        asked["progress"] = progress
    return function(loaded.model, inputs_of(loaded), loss_fn=loaded.loss_fn, name=loaded.name, **asked)


_CALL_WIDTH = 60
"""What a terminal has beside the label of a line."""


def call(args: argparse.Namespace, *, has_loss: bool) -> str:
    """Write the call of ``auto_wrap`` that makes the plan which was asked for, model and loss by their usual names."""
    if saved := getattr(args, "plan", None):
        return f"planner.auto_wrap(model, budget=planner.Plan.load({saved!r}))"
    written = (_argument(keyword, picked(kind, vars(args))) for keyword, kind in GROUPS.items())
    arguments = ["model", *(["loss_fn=loss_fn"] if has_loss else []), *filter(None, written)]
    between = ", " if len(", ".join(arguments)) < _CALL_WIDTH else ",\n    "
    return f"planner.auto_wrap({between.join(arguments)})"


def _argument(keyword: str, given: Any) -> str:
    """Write a group of options by what is not as by default, ``""`` if all is."""
    options = {option.name: getattr(given, option.name) for option in fields(given) if option.metadata}
    changed = {name: repr(value) for name, value in options.items() if value != getattr(type(given)(), name)}
    if isinstance(given, Offload):  # the one whose default is not its word's
        changed = {"enabled": repr(given.enabled)} if given in (Offload(True), Offload(False)) else changed
        changed = {} if given == Offload(AUTO) else changed
    if "profile" in changed:  # a file, as it was typed
        changed["profile"] = f"planner.load_profile({changed['profile']})"
    if tuple(changed) == type(given).__match_args__:
        return f"{keyword}={next(iter(changed.values()))}"
    named = ", ".join(f"{name}={value}" for name, value in changed.items())
    return named and f"{keyword}=planner.{type(given).__name__}({named})"


def inputs_of(loaded: zoo.ZooModel) -> Inputs:
    """Return the inputs of one step."""
    from planner.capture.inputs import Inputs

    return Inputs.of(loaded.example_args, loaded.example_kwargs)


def ask_or_build(
    function: Callable[..., Answer], args: argparse.Namespace, loaded: zoo.ZooModel, progress: Progress, **asked: Any
) -> Answer:
    """Ask about a model without memory; a user's model that cannot be captured so is built for real."""
    try:
        return ask(function, loaded, progress, **asked)
    except CaptureError:
        if not zoo.is_own(args.model or args.name):
            raise
    progress("building the model for real: what it runs may depend on data")
    return ask(function, load(args, real=True), progress, **asked)


@contextmanager
def working(args: argparse.Namespace, *, real: bool = False) -> Iterator[tuple[Progress, zoo.ZooModel]]:
    """Build the model that is named; torch is silent, and progress is shown, until the work is done."""
    with quiet(args.debug), reporting(args.debug) as progress:
        progress("building the model")
        if real or getattr(args, "cost_model", None) == "measured":
            from planner.capture.memory import keep_freed_memory

            keep_freed_memory()  # this process is ours, and its times are to mean something
        yield progress, load(args, real=real)


def load(args: argparse.Namespace, *, real: bool) -> zoo.ZooModel:
    """Build the model that is named: for real, or without memory."""
    from planner.capture import fake_mode
    from planner.measure import devices

    mode = None if real else fake_mode()
    sizes = {size: getattr(args, size) for size in ("batch_size", "seq_len", "image_size", "layers")}
    dtype = DTYPES[args.dtype] if args.dtype else None
    specification = args.model or args.name
    if not zoo.is_own(specification):
        return zoo.build(
            specification, **sizes, dtype=dtype, device=devices.place(getattr(args, "device", None)), fake_mode=mode
        )
    if dtype is not None:
        raise UsageError("--dtype is for models of the zoo: a factory of your own chooses its type itself")
    given = {size: value for size, value in sizes.items() if value is not None}
    return zoo.load_user_model(specification, sizes=given, fake_mode=mode)
