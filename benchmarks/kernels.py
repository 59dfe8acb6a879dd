"""Sets a captured step beside the one of eager, operator by operator: calls, seconds and bytes.

Both run under torch's profiler, without recompute; what capture changed is named and not guessed. Exit code 1 if
operators that eager never calls take over 2% of its step, or if a model cannot be captured.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import planner
from benchmarks import common
from benchmarks.cases import CASES, build
from benchmarks.common import Result, mebibytes, percent
from benchmarks.steps import step_of, use
from planner.capture.torch_internals import installed_call
from planner.errors import PlannerError
from planner.zoo import ZooModel

NEW_GOAL = 0.02
"""How much of eager's step operators may take that it never calls."""

SHOWN = 8
"""Rows for each model on the page: those with the largest difference in time."""

PREFIX = "aten::"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("kernels", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="of each kind (default: 5)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    result: Result = {**common.environment("kernels", arguments), "models": []}
    for name in common.chosen(args.models, list(CASES)):
        entry = {"model": name, **_compared(build(name), args)}
        common.progress(_line(entry))
        result["models"].append(entry)
        common.write(args.json, result, _markdown(result)) if args.json != "-" else None
        gc.collect()
    if args.json == "-":
        common.write("-", result, "")
    return 1 if any(map(_missed, result["models"])) else 0


def _compared(loaded: ZooModel, args: argparse.Namespace) -> Result:
    model, step = loaded.model, step_of(loaded)
    try:
        planner.auto_wrap(model, budget=sys.maxsize, runtime="graph", time_limit_seconds=1.0)
        step()  # captures
        calls = {"eager": None, "captured": installed_call(model)}
        steps = {kind: _profiled(partial(use, model, call), step, args.steps) for kind, call in calls.items()}
    except PlannerError as error:
        return {"status": "refused", "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    finally:
        planner.unwrap(model)
        model.zero_grad(set_to_none=True)
    rows = [
        {"operator": name, **{kind: found.get(name, [0, 0.0, 0]) for kind, found in steps.items()}}
        for name in sorted(set().union(*steps.values()))
    ]
    return {"status": "run", "operators": [row for row in rows if _calls(row, "eager") or _calls(row, "captured")]}


def _profiled(prepare: Callable[[], None], step: Callable[[], Any], steps: int) -> dict[str, list[float]]:
    """Return calls, own seconds and bytes left allocated of each operator in a step."""
    prepare()
    step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True) as profiler:
        for _ in range(steps):
            prepare()
            step()
    return {
        event.key.removeprefix(PREFIX): [
            event.count / steps,
            (event.self_device_time_total or event.self_cpu_time_total) / 1e6 / steps,
            (event.self_device_memory_usage or event.self_cpu_memory_usage) / steps,
        ]
        for event in profiler.key_averages()
        if event.key.startswith(PREFIX)
    }


def _calls(row: Result, kind: str) -> float:
    return float(row[kind][0])


def _seconds(rows: Iterable[Result], kind: str) -> float:
    return sum(row[kind][1] for row in rows)


def _kernel(operator: str) -> str:
    """Return what an operator computes: its forms in place and without side effects are called otherwise.

    Examples
    --------
    >>> _kernel("clamp_min_"), _kernel("_native_batch_norm_legit_functional")
    ('clamp_min', 'native_batch_norm')
    """
    return operator.strip("_").removesuffix("_functional").removesuffix("_legit")


def _new(entry: Result) -> float:
    """Return the share of eager's step that kernels take which only the captured step calls."""
    rows = entry["operators"]
    known = {_kernel(row["operator"]) for row in rows if _calls(row, "eager")}
    return _seconds([row for row in rows if _kernel(row["operator"]) not in known], "captured") / _seconds(
        rows, "eager"
    )


def _missed(entry: Result) -> bool:
    return entry["status"] != "run" or _new(entry) > NEW_GOAL


def _ratio(entry: Result) -> float:
    return _seconds(entry["operators"], "captured") / _seconds(entry["operators"], "eager")


def _line(entry: Result) -> str:
    if entry["status"] != "run":
        return f"{entry['model']}: {entry['reason']}"
    return (
        f"{entry['model']}: operators take {_ratio(entry):.3f} of eager's, new ones {percent(_new(entry))} of its step"
    )


def _markdown(result: Result) -> str:
    summary = [
        [entry["model"], f"{_ratio(entry):.3f}", percent(_new(entry))]
        if entry["status"] == "run"
        else [entry["model"], entry["reason"], "-"]
        for entry in result["models"]
    ]
    parts = [common.table(["model", "time in operators, of eager's", "in operators that eager never calls"], summary)]
    for entry in result["models"]:
        if entry["status"] == "run" and (rows := _different(entry["operators"])):
            parts += [f"## {entry['model']}", common.table(HEADINGS, rows)]
    return common.page("Captured steps and eager's, operator by operator", result, *parts)


HEADINGS = ["operator", "calls, eager", "captured", "ms, eager", "captured", "MiB left, eager", "captured"]


def _different(rows: Iterable[Result]) -> list[list[object]]:
    """Return the rows whose calls differ, the largest difference in time first."""
    changed = [row for row in rows if _calls(row, "eager") != _calls(row, "captured")]
    changed.sort(key=lambda row: -abs(row["captured"][1] - row["eager"][1]))
    return [
        [
            f"`{row['operator']}`",
            *(f"{row[kind][0]:g}" for kind in ("eager", "captured")),
            *(f"{1e3 * row[kind][1]:.2f}" for kind in ("eager", "captured")),
            *(mebibytes(int(row[kind][2])) for kind in ("eager", "captured")),
        ]
        for row in changed[:SHOWN]
    ]


if __name__ == "__main__":
    sys.exit(common.run(main))
