"""The command line: plan a model for a memory budget, prove it by real steps, find what is wrong.

Exit codes: 0 fits or sound, 1 failed or problems found, 2 wrong usage, 3 no plan fits, 4 the model cannot be captured.
Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

# Nothing slow is imported up here: --help must answer at once.
from planner.errors import CaptureError, PlannerError, UsageError
from planner.options import (
    DTYPES,
    Parser,
    budget_options,
    check_options,
    model_options,
    pipeline_of,
    pipeline_options,
    profile_options,
    solving_options,
    training_options,
)
from planner.terminal import quiet, reporting, show, write_json

if TYPE_CHECKING:
    from planner.planning import Plan
    from planner.problem import Progress
    from planner.training import Training
    from planner.zoo import ZooModel

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        Exit code.
    """
    debug = False
    try:
        args = _parser().parse_args(arguments)
        debug = args.debug
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has seen enough; Python must not complain at exit that it could not write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _complain("interrupted", debug)
        return _INTERRUPTED
    except PlannerError as error:
        _complain(str(error), debug)
        return error.exit_code
    except Exception as error:
        _complain(f"{type(error).__name__}: {error}; this should not happen: run with --debug and report it", debug)
        return PlannerError.exit_code


def _complain(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print("error:", " ".join(message.split()), file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(prog="checkpoint-planner", description=(__doc__ or "").split("\n\n")[0])
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    model = model_options()
    solving = solving_options()
    planning = [common, model, training_options(), solving]
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", parents=planning, help="plan a model; nothing is run")
    budget_options(plan)
    plan.add_argument("--save", metavar="PLAN", help="write the plan to a file that auto_wrap can apply")
    plan.add_argument("--verify", action="store_true", help="run real steps with and without the plan")
    pipeline_options(plan)
    plan.set_defaults(run=_run_plan, plan=None)

    verify = commands.add_parser("verify", parents=planning, help="plan, and run real steps")
    budget_options(verify).add_argument("--plan", metavar="PLAN", help="a saved plan, in place of a budget")
    verify.set_defaults(run=_run_plan, save=None, verify=True, pipeline_stages=None)

    check = commands.add_parser(
        "check", parents=[common, model, training_options()], help="find what is wrong with how a model is trained"
    )
    check_options(check)
    check.set_defaults(run=_run_check)

    profile = commands.add_parser("profile", parents=[common, model], help="measure each operation on this machine")
    profile.add_argument("--output", metavar="FILE", required=True, help="write the measured costs to a file")
    profile_options(profile)
    profile.set_defaults(run=_run_profile)

    calibrate = commands.add_parser("calibrate", parents=[common], help="measure how fast this machine is")
    calibrate.add_argument("--output", metavar="FILE.json", required=True, help="write a device file for --device")
    calibrate.set_defaults(run=_run_calibrate)

    models = commands.add_parser("models", parents=[common], help="list the models that can be named")
    models.set_defaults(run=_run_models)
    return parser


# What is done.


def _run_plan(args: argparse.Namespace) -> int:
    _check(args)
    if args.pipeline_stages is not None:
        return _run_pipeline(args)
    from planner.planning import NoPlanFitsError

    try:
        with quiet(args.debug), reporting(args.debug) as progress:
            plan = _make(args, progress)
    except NoPlanFitsError as error:
        report = error.report
        write_json(report, args.json)
        if args.json != "-":
            from planner.report import render_infeasible

            show(lambda console: render_infeasible(report, console))
        raise
    if args.save:
        plan.save(args.save)
    write_json(plan.report(operations=args.operations), args.json)
    if args.json != "-":
        from planner.report import render

        show(lambda console: render(plan, console, show_operations=args.operations))
    _hold_to_measured(plan)
    return 0


def _run_check(args: argparse.Namespace) -> int:
    from planner import device_file
    from planner.atomic import check_writable

    _check_name(args)
    training = _training(args)
    if args.device:
        device_file.find(args.device)
    if args.json not in (None, "-"):
        check_writable(args.json)
    with quiet(args.debug), reporting(args.debug) as progress:
        from planner.diagnose.check import check

        progress("building the model")
        loaded = _load(args, real=False)
        diagnosis = check(
            loaded.model,
            loaded.example_args,
            example_kwargs=loaded.example_kwargs,
            loss_fn=loaded.loss_fn,
            device=args.device,
            **dataclasses.asdict(training),
            name=loaded.name,
            progress=progress,
        )
    write_json(diagnosis.report(), args.json)
    if args.json != "-":
        from planner.report import render_diagnosis

        show(lambda console: render_diagnosis(diagnosis, console))
    if not diagnosis.captured:
        return CaptureError.exit_code
    return PlannerError.exit_code if diagnosis.problems else 0


def _run_pipeline(args: argparse.Namespace) -> int:
    from planner.pipeline_types import NoPipelineFitsError
    from planner.report import render_infeasible_pipeline, render_pipeline

    try:
        with quiet(args.debug), reporting(args.debug) as progress:
            import planner

            progress("building the model")
            loaded = _load(args, real=False)
            plan = planner.plan_pipeline(
                loaded.model,
                loaded.example_args,
                **_how(args, loaded, progress),
                budget=args.budget,
                **pipeline_of(args),
            )
    except NoPipelineFitsError as error:
        report = error.report
        write_json(report, args.json)
        if args.json != "-":
            show(lambda console: render_infeasible_pipeline(report, console))
        raise
    write_json(plan.report(), args.json)
    if args.json != "-":
        show(lambda console: render_pipeline(plan, console))
    return 0


def _run_profile(args: argparse.Namespace) -> int:
    from planner import zoo
    from planner.atomic import check_writable

    _check_name(args)
    check_writable(args.output)
    with quiet(args.debug), reporting(args.debug) as progress:
        from planner import api
        from planner.memory import keep_freed_memory
        from planner.profile_file import save

        progress("building the model")
        keep_freed_memory()
        loaded: zoo.ZooModel = _load(args, real=False)
        made = api.profile(
            loaded.model,
            loaded.example_args,
            example_kwargs=loaded.example_kwargs,
            loss_fn=loaded.loss_fn,
            time_limit_seconds=args.time_limit,
            name=loaded.name,
            progress=progress,
        )
    save(made, args.output)
    from planner.report import render_profile

    show(lambda console: render_profile(made, args.output, console))
    return 0


def _run_calibrate(args: argparse.Namespace) -> int:
    from planner.atomic import check_writable

    if not args.output.endswith(".json"):
        raise UsageError(f"--output {args.output}: a device file is found by its name, which ends in .json")
    check_writable(args.output)
    with quiet(args.debug), reporting(args.debug) as progress:
        from planner import device_file
        from planner.calibration import calibrate

        spec = calibrate(progress=progress)
    device_file.save(spec, args.output)
    from planner.report import render_device

    show(lambda console: render_device(spec, args.output, console))
    return 0


def _run_models(args: argparse.Namespace) -> int:
    from planner import zoo

    width = max(map(len, zoo.names()))
    for name in zoo.names():
        print(f"{name:{width}}  {zoo.describe(name)}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse at once what would fail only after minutes of work."""
    import cost_models
    from planner import device_file, runtimes, solvers
    from planner.atomic import check_writable
    from planner.units import parse_size

    _check_name(args)
    if budget := args.budget or args.activation_budget:
        parse_size(budget, whole_bytes=2**60)
    for path in (args.save, args.json if args.json != "-" else None):
        if path is not None:
            check_writable(path)
    solvers.get(args.solver)
    runtimes.check(args.runtime)
    if _training(args).tensor_parallel > 1 and args.verify:
        raise UsageError("--tensor-parallel is planned for, not run: leave out --verify, and use 'plan'")
    pipeline_of(args)
    if args.device:
        device_file.find(args.device)
    try:
        cost_models.get(args.cost_model)
    except cost_models.UnknownNameError as error:
        raise UsageError(str(error)) from error


def _training(args: argparse.Namespace) -> Training:
    from planner.training import Training

    return Training(
        optimizer=args.optimizer,
        master_weights=args.master_weights,
        gradient_accumulation=args.accumulate,
        data_parallel=args.data_parallel,
        ranks=args.ranks,
        tensor_parallel=args.tensor_parallel,
        reserve=args.reserve or 0,
    )


def _how(args: argparse.Namespace, loaded: ZooModel, progress: Progress) -> dict[str, Any]:
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
        **dataclasses.asdict(_training(args)),
        "cost_model": args.cost_model,
        "profile": planner.load_profile(args.profile) if args.profile else None,
        "name": loaded.name,
        "progress": progress,
    }


def _check_name(args: argparse.Namespace) -> None:
    from planner import zoo

    if (args.name is None) == (args.model is None):
        raise UsageError("name one model: a name that 'checkpoint-planner models' lists, or --model file.py:factory")
    if ":" not in (args.model or args.name):
        zoo.describe(args.model or args.name)


def _load(args: argparse.Namespace, *, real: bool) -> ZooModel:
    """Build the model that is named: for real, or without memory."""
    from planner import devices, zoo
    from planner.capture import fake_mode

    mode = None if real else fake_mode()
    sizes = {size: getattr(args, size) for size in ("batch_size", "seq_len", "image_size", "layers")}
    dtype = DTYPES[args.dtype] if args.dtype else None
    specification = args.model or args.name
    if ":" not in specification:
        return zoo.build(
            specification, **sizes, dtype=dtype, device=devices.place(getattr(args, "device", None)), fake_mode=mode
        )
    if given := [name for name, value in {**sizes, "dtype": dtype}.items() if value is not None]:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} is for models of the zoo: a factory of your own chooses its sizes itself")
    return zoo.load_user_model(specification, fake_mode=mode)


def _make(args: argparse.Namespace, progress: Progress) -> Plan:
    """Load the model, make or read the plan, and verify it where that is asked for."""
    from planner import api
    from planner.memory import keep_freed_memory
    from planner.planning import Plan

    saved = Plan.load(args.plan) if args.plan else None
    progress("building the model")
    if args.verify or args.cost_model == "measured":
        keep_freed_memory()  # this process is ours, and its times are to mean something
    loaded = _load(args, real=args.verify)

    def planned() -> Plan:
        return api.plan(
            loaded.model,
            loaded.example_args,
            budget=args.budget,
            activation_budget=args.activation_budget,
            runtime=args.runtime,
            **_how(args, loaded, progress),
        )

    try:
        plan = saved or planned()
    except CaptureError:
        if args.verify or args.runtime == "graph" or ":" not in (args.model or args.name):
            raise
        progress("building the model for real: what it runs may depend on data")
        loaded = _load(args, real=True)
        plan = planned()
    if not args.verify:
        return plan
    progress("running real steps")
    verification = api.verify(
        loaded.model, loaded.example_args, plan, example_kwargs=loaded.example_kwargs, loss_fn=loaded.loss_fn
    )
    return dataclasses.replace(plan, verification=verification)


def _hold_to_measured(plan: Plan) -> None:
    """Fail if real steps broke what the plan promises."""
    measured = plan.verification
    if measured is None:
        return
    if not measured.agrees:
        first = measured.differences[0] if measured.differences else "see the report"
        same = f"the same numbers to within {measured.tolerance:g}" if measured.tolerance else "the same bits"
        raise PlannerError(f"the planned step does not give {same} as the step without recompute: {first}")
    if measured.peak_bytes > plan.budget_bytes:
        raise PlannerError(
            f"the measured peak, {measured.peak_bytes} bytes, is above the budget of {plan.budget_bytes} bytes"
        )


if __name__ == "__main__":
    sys.exit(main())
