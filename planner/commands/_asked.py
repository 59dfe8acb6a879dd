"""What the commands share: the model that is named, what a plan is told, and refusing early what would fail late."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from planner.commands._options import DTYPES
from planner.common.options import Target, Training, picked
from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.analysis.study import Study
    from planner.common.limits import Progress
    from planner.zoo import ZooModel


def check_model(args: argparse.Namespace) -> None:
    """Refuse a model that is not named, or not known."""
    from planner import zoo

    if (args.name is None) == (args.model is None):
        raise UsageError("name one model: a name that 'checkpoint-planner models' lists, or --model file.py:factory")
    if ":" not in (args.model or args.name):
        zoo.describe(args.model or args.name)


def check_writable(*paths: str | None) -> None:
    """Refuse files that could not be written in the end; ``"-"`` is standard output."""
    from planner.common import atomic

    for path in paths:
        if path not in (None, "-"):
            atomic.check_writable(path)


def check_target(args: argparse.Namespace, *devices: str) -> None:
    """Refuse devices and cost models that are not known."""
    import cost_models
    from planner.plans import device_file

    for device in (args.device, *devices):
        if device is not None:
            device_file.find(device)
    try:
        cost_models.get(args.cost_model)
    except cost_models.UnknownNameError as error:
        raise UsageError(str(error)) from error


def check_solving(args: argparse.Namespace) -> None:
    """Refuse at once what would fail only after minutes of work: names of all kinds, and where results go."""
    from planner import runtimes
    from planner.analysis.compatibility import check_solver

    check_model(args)
    check_writable(args.json)
    runtimes.check(args.runtime)
    check_solver(args.runtime, args.solver)
    picked(Training, vars(args))
    check_target(args)


def check_offload(args: argparse.Namespace) -> None:
    """Refuse options on offload without it, and a device of which nothing is known of the link to the host."""
    from planner.ir.host import host_of
    from planner.plans import device_file

    given = {"--host-budget": args.host_budget, "--offload-lossy": args.offload_lossy}
    for option, value in given.items():
        if value and not args.offload:
            raise UsageError(f"{option} is for what is offloaded: give --offload too")
    if args.offload and args.device:
        host_of(device_file.find(args.device), args.host_budget, at_least=args.offload_at_least)


def keywords(args: argparse.Namespace, *groups: type[Any]) -> dict[str, Any]:
    """Return those of these groups of options that the command has, as keywords of the public functions."""
    import planner

    asked = vars(args)
    given = {field.name: asked[field.name] for group in groups for field in fields(group) if field.name in asked}
    if given.get("profile"):
        given["profile"] = planner.load_profile(args.profile)
    return given


def of_model(loaded: ZooModel, progress: Progress | None = None) -> dict[str, Any]:
    """Return what a public function is told of the model beside its positional inputs, and whom to report to."""
    return {
        "example_kwargs": loaded.example_kwargs,
        "loss_fn": loaded.loss_fn,
        "name": loaded.name,
        "progress": progress,
    }


def study(args: argparse.Namespace, loaded: ZooModel, runtime: str, progress: Progress | None = None) -> Study:
    """Capture and cost a step of a model."""
    import planner

    asked = {**of_model(loaded, progress), **keywords(args, Target, Training)}
    return planner.study(loaded.model, loaded.example_args, runtime=runtime, **asked)


def load(args: argparse.Namespace, *, real: bool) -> ZooModel:
    """Build the model that is named: for real, or without memory."""
    from planner import zoo
    from planner.capture import fake_mode
    from planner.measure import devices

    mode = None if real else fake_mode()
    sizes = {size: getattr(args, size) for size in ("batch_size", "seq_len", "image_size", "layers")}
    dtype = DTYPES[args.dtype] if args.dtype else None
    specification = args.model or args.name
    if ":" not in specification:
        return zoo.build(
            specification, **sizes, dtype=dtype, device=devices.place(getattr(args, "device", None)), fake_mode=mode
        )
    if dtype is not None:
        raise UsageError("--dtype is for models of the zoo: a factory of your own chooses its type itself")
    given = {size: value for size, value in sizes.items() if value is not None}
    return zoo.load_user_model(specification, sizes=given, fake_mode=mode)
