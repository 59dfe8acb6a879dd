"""What do steps at fixed places cost, and do they keep the bits? Real steps on this CPU, with and without an arena.

Two copies of each model train in turn under the same plan, one of them with an arena. Times are CPU seconds, so that
other work on the machine counts less; what a system's own allocator is told to keep (``--keep``) is kept for both.

Exit code 1 if an arena takes more than 1.02 of what is in it at its peak, if a step takes longer by more than two
standard errors, if a bit of loss or gradients differs, or if an allocation is not where it belongs.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from statistics import geometric_mean, mean, stdev

import torch

import planner
from benchmarks import common
from benchmarks.cases import CASES, build
from benchmarks.common import Result, mebibytes
from planner.capture.memory import keep_freed_memory
from planner.errors import PlannerError
from planner.zoo import ZooModel

GOAL = 1.02
_FIRST = 4
"""Steps before any is timed: planned, recorded, laid out."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("arena_steps", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: the zoo's)")
    parser.add_argument("--budget", metavar="SHARE", default="80%", help="of eager's peak (default: 80%%)")
    parser.add_argument("--steps", metavar="N", type=int, default=12, help="timed pairs of steps (default: 12)")
    parser.add_argument("--runtime", metavar="NAME", default="graph", help="what runs the plan (default: graph)")
    parser.add_argument("--keep", action="store_true", help="let the C library keep what is freed")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    if args.keep and not keep_freed_memory():
        common.progress("this system's allocator cannot be told to keep memory")
    result: Result = {**common.environment("arena_steps", arguments), "models": []}
    for name in common.chosen(args.models, list(CASES)):
        entry = {"model": name, **_found(name, args.budget, args.steps, args.runtime)}
        common.progress(" ".join(map(str, _cells(entry))))
        result["models"].append(entry)
        if args.json != "-":
            common.write(args.json, result, _markdown(result))
        gc.collect()
    if args.json == "-":
        common.write("-", result, "")
    return 1 if any(map(_missed, result["models"])) else 0


def _found(name: str, budget: str, steps: int, runtime: str) -> Result:
    try:
        return _compared(name, budget, steps, runtime)
    except PlannerError as error:
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _compared(name: str, budget: str, count: int, runtime: str) -> Result:
    models = [build(name) for _ in range(2)]
    planner.auto_wrap(models[0].model, budget=budget, runtime=runtime, progress=lambda _line: None)
    with_and_without = [_step_of(models[1]), _step_of(models[0])]
    with_and_without[1]()
    planner.auto_wrap(models[1].model, plan=planner.plan_of(models[0].model), arena=True, progress=lambda _line: None)
    for _ in range(_FIRST):
        equal = with_and_without[0]() == with_and_without[1]()
    ratios: list[float] = []
    for _ in range(count):
        with_seconds, without_seconds = map(_seconds, with_and_without)
        ratios.append(with_seconds / without_seconds)
    equal = equal and with_and_without[0]() == with_and_without[1]() and _gradients_equal(models)
    used = planner.status(models[1].model).arena
    assert used is not None
    plan = planner.plan_of(models[1].model)
    return {
        "tensors": used.places,
        "arena_bytes": used.size_bytes,
        "arena": used.size_bytes / used.peak_bytes,
        "of_planned_peak": used.size_bytes / (plan.peak_bytes - plan.total_static_bytes),
        "outside_bytes": used.outside_bytes,
        "astray": used.astray,
        "time": mean(ratios),
        "standard_error": stdev(ratios) / len(ratios) ** 0.5,
        "bitwise_equal": equal,
    }


def _step_of(loaded: ZooModel) -> Callable[[], float]:
    def step() -> float:
        loaded.model.zero_grad()
        torch.manual_seed(0)
        output = loaded.model(*loaded.example_args, **loaded.example_kwargs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        return float(loss.detach())

    return step


def _seconds(step: Callable[[], float]) -> float:
    begun = time.process_time()
    step()
    return time.process_time() - begun


def _gradients_equal(models: Sequence[ZooModel]) -> bool:
    pairs = zip(*(loaded.model.parameters() for loaded in models), strict=True)
    return all(
        (one.grad is None) == (other.grad is None) and (one.grad is None or torch.equal(one.grad, other.grad))
        for one, other in pairs
    )


def _missed(entry: Result) -> bool:
    if "refused" in entry:
        return True
    slower = entry["time"] - 1 > 2 * entry["standard_error"]
    return entry["arena"] > GOAL or slower or not entry["bitwise_equal"] or entry["astray"] > 0


def _cells(entry: Result) -> list[object]:
    if "refused" in entry:
        return [entry["model"], entry["refused"], *6 * "-"]
    return [
        entry["model"],
        entry["tensors"],
        mebibytes(entry["arena_bytes"]),
        f"{entry['arena']:.4f}",
        f"{entry['of_planned_peak']:.4f}",
        mebibytes(entry["outside_bytes"]),
        f"{entry['time']:.3f} +- {entry['standard_error']:.3f}",
        "yes" if entry["bitwise_equal"] else "no",
    ]


def _markdown(result: Result) -> str:
    run = [entry for entry in result["models"] if "refused" not in entry]
    parts = []
    if run:
        parts.append(
            f"{len(run)} models: an arena of at most {max(e['arena'] for e in run):.4f} of what is in it at its peak, "
            f"{geometric_mean([e['time'] for e in run]):.3f} of the time without (geometric mean), bits equal in "
            f"{sum(e['bitwise_equal'] for e in run)}."
        )
    headings = [
        "model", "tensors", "arena (MiB)", "of its peak", "of the planned peak", "outside (MiB)", "time", "bits equal",
    ]  # fmt: skip
    rows = [_cells(entry) for entry in result["models"]]
    return common.page("Steps at fixed places, on a CPU", result, *parts, common.table(headings, rows))


if __name__ == "__main__":
    sys.exit(common.run(main))
