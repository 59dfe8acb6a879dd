"""What the commands share: the model that is named, what a plan is told, and refusing early what would fail late."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from planner.commands._options import DTYPES
from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.common.training import Training
    from planner.ir.problem import Progress
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


def check_solving(args: argparse.Namespace) -> None:
    """Refuse at once what would fail only after minutes of work: names of all kinds, and where results go."""
    import cost_models
    from planner import runtimes, solvers
    from planner.plans import device_file

    check_model(args)
    check_writable(args.json)
    solvers.get(args.solver)
    runtimes.check(args.runtime)
    training(args)
    if args.device:
        device_file.find(args.device)
    try:
        cost_models.get(args.cost_model)
    except cost_models.UnknownNameError as error:
        raise UsageError(str(error)) from error


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


def offload(args: argparse.Namespace) -> dict[str, Any]:
    """Give what a plan is told of the host's memory."""
    return {
        "offload": args.offload,
        "host_budget": args.host_budget,
        "offload_at_least": args.offload_at_least,
        "offload_lossy": args.offload_lossy,
    }


def training(args: argparse.Namespace) -> Training:
    """Give what surrounds the step."""
    from planner.common.training import Training

    return Training(
        optimizer=args.optimizer,
        master_weights=args.master_weights,
        gradient_accumulation=args.accumulate,
        data_parallel=args.data_parallel,
        ranks=args.ranks,
        tensor_parallel=args.tensor_parallel,
        reserve=args.reserve or 0,
    )


def how(args: argparse.Namespace, loaded: ZooModel, progress: Progress) -> dict[str, Any]:
    """Give what a plan of any kind is told of the model, its training and the search."""
    import planner

    return {
        "example_kwargs": loaded.example_kwargs,
        "loss_fn": loaded.loss_fn,
        "solver": args.solver,
        "time_limit_seconds": args.time_limit,
        "deterministic": args.deterministic,
        "seed": args.seed,
        "device": args.device,
        **dataclasses.asdict(training(args)),
        "cost_model": args.cost_model,
        "profile": planner.load_profile(args.profile) if args.profile else None,
        "name": loaded.name,
        "progress": progress,
    }


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
