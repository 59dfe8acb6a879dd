"""What does each runtime cost, with recompute and without? Every zoo model and a few more, real steps.

Without recompute, a runtime should be no worse than eager PyTorch: peak and step time of both,
and what a step costs on the host alone. Then plans at several budgets: predicted against measured peak and
overhead, gradients against those of the same runtime without recompute, and how long planning took.
Exit code 1 if a step of the runtime ``graph`` without recompute needs over 1.02 of eager's peak or 1.05 of
its time, if it refuses a model, if an exact peak is more than 0.1% from its prediction or above
its budget, if gradients are not what the runtime promises, or if anything fails.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import planner
from benchmarks import common
from benchmarks.cases import CASES, build
from benchmarks.common import Result, mebibytes, percent
from benchmarks.steps import in_turn, step_of, without_recompute
from planner import runtimes
from planner.capture.memory import keep_freed_memory
from planner.capture.torch_internals import (
    aot_backend,
    call_implementation,
    compile_isolated,
    install_call,
)
from planner.errors import (
    CaptureError,
    InfeasibleBudgetError,
    PlanMismatchError,
    PlannerError,
    RuntimeUnsupportedError,
    UsageError,
)
from planner.plans.plan import NoPlanFitsError, Plan
from planner.zoo import ZooModel

RUNTIMES = [name for name in runtimes.names() if name != "auto"]
JUDGED = "graph"
"""The runtime that is held to eager's peak and time."""

TO_THE_BIT = ("graph", "modules", "regional")
GRADIENT_GOAL = 1e-3
"""How far gradients of other runtimes may be from their own without recompute."""

PEAK_GOAL, TIME_GOAL, PREDICTION_GOAL = 1.02, 1.05, 1e-3

UNPLANNED = "boxed graph, no plan"
"""Of the ways in the table of the host: what running a captured graph costs, without anything of ours."""

BLOCKS, WIDTH = 12, 16
"""Of the model whose time is all Python."""

_REFUSALS = (CaptureError, RuntimeUnsupportedError, UsageError)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("runtimes", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--runtimes", metavar="NAMES", help=f"with commas, of {', '.join(RUNTIMES)} (default: all)")
    parser.add_argument(
        "--budgets",
        metavar="PERCENT",
        type=common.ratios,
        default="100,75,50",
        help="shares of the way from the smallest feasible peak to that without recompute (default: 100,75,50)",
    )
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=8.0, help="for timing each pair of ways (default: 8)"
    )
    parser.add_argument("--time-limit", metavar="S", type=float, default=5.0, help="for each solve (default: 5)")
    parser.add_argument("--resume", action="store_true", help="keep what FILE has of this torch version")
    args = parser.parse_args(arguments)
    if not keep_freed_memory():
        common.progress("this system's allocator cannot be told to keep memory: times include page faults")
    names, ways = common.chosen(args.models, list(CASES)), common.chosen(args.runtimes, RUNTIMES)
    common.check_destination(args.json)
    done = common.earlier("runtimes", args.json) if args.resume else {}
    result: Result = {**common.environment("runtimes", arguments), "host": [], "full_save": [], "budgets": []}

    def keep(table: str, entry: Result) -> None:
        result[table].append(entry)
        if args.json != "-":
            common.write(args.json, result, _markdown(result))

    for row in _host([UNPLANNED, *ways], args.seconds):
        keep("host", row)
    for name in names:
        for entry in _entries(name, ways, done.get("full_save", ()), _full_save, args):
            keep("full_save", entry)
    for name in names:
        for entry in _entries(name, ways, done.get("budgets", ()), _budgets, args):
            keep("budgets", entry)
    if args.json == "-":
        common.write("-", result, "")
    return 1 if any(map(_missed, result["full_save"])) or any(map(_missed, _rows(result["budgets"]))) else 0


def _entries(
    name: str,
    ways: Iterable[str],
    done: Iterable[Result],
    find: Callable[[ZooModel, str, argparse.Namespace], Result],
    args: argparse.Namespace,
) -> Iterable[Result]:
    """Return what is found about one model under each runtime, or was found before; errors are looked at again."""
    kept = {
        entry["runtime"]: entry
        for entry in done
        if entry["model"] == name
        and entry.get("ratios", args.budgets) == args.budgets
        and not any(row["status"] == "error" for row in _rows([entry]))
    }
    loaded = None
    for way in ways:
        if way in kept:
            yield kept[way]
            continue
        loaded = loaded or build(name)
        entry = {"model": name, "runtime": way, **find(loaded, way, args)}
        for row in _rows([entry]):
            common.progress(_line(row))
        yield entry
        gc.collect()


def _full_save(loaded: ZooModel, runtime: str, args: argparse.Namespace) -> Result:
    """Hold steps without recompute against eager ones."""
    try:
        return without_recompute(loaded, runtime, args.seconds)
    except (PlannerError, RuntimeError) as error:
        return _failure(error)


def _host(ways: Sequence[str], limit_seconds: float) -> list[Result]:
    """Time steps of a model that has next to nothing to compute, in all ways in turn.

    Each way has a model of its own: a call that is put in and taken out makes Dynamo look at the whole model again.
    """
    timed = []
    for way in ("eager", *ways):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
        step = step_of(ZooModel(name="tiny", model=model, example_args=(torch.randn(2, WIDTH),), loss_fn=torch.sum))
        if way == UNPLANNED:
            install_call(model, _unplanned(model))
        elif way != "eager":
            planner.auto_wrap(model, budget=sys.maxsize, runtime=way, time_limit_seconds=1.0)
        step()
        timed.append((model.zero_grad, step))
    rounds = in_turn(timed, limit_seconds * len(timed))
    unplanned = 1 + ways.index(UNPLANNED)
    return [
        {
            "runtime": way,
            "eager_seconds": median(took[0] for took in rounds),
            "seconds": median(took[place] for took in rounds),
            "added_seconds": median(took[place] - took[0] for took in rounds),
            "eager_ratio": median(took[place] / took[0] for took in rounds),
            "unplanned_ratio": median(took[place] / took[unplanned] for took in rounds),
            "pairs": len(rounds),
        }
        for place, way in enumerate(ways, 1)
    ]


def _unplanned(model: nn.Module) -> Callable[..., Any]:
    """Compile a model's call as the runtime ``graph`` does; what is saved, torch decides without a budget."""
    from torch._functorch.partitioners import default_partition

    return compile_isolated(lambda *args: call_implementation(model)(*args), aot_backend(default_partition))


def _budgets(loaded: ZooModel, runtime: str, args: argparse.Namespace) -> Result:
    """Plan and run one model under one runtime at each budget."""
    found: Result = {"ratios": args.budgets}
    try:
        free = _plan(loaded, runtime, sys.maxsize, args.time_limit, compare=True)
    except (PlannerError, RuntimeError) as error:
        return {**found, "rows": [_failure(error)]}
    room_bytes = free.baseline_peak_bytes - free.minimum_feasible_peak_bytes
    budgets = [free.minimum_feasible_peak_bytes + int(ratio * room_bytes) for ratio in args.budgets]
    rows = [_row(loaded, runtime, budget_bytes, args.time_limit) for budget_bytes in budgets]
    return {**found, "rows": [{"ratio": ratio, **row} for ratio, row in zip(args.budgets, rows, strict=True)]}


def _row(loaded: ZooModel, runtime: str, budget_bytes: int, limit_seconds: float) -> Result:
    begun = time.perf_counter()
    try:
        plan = _plan(loaded, runtime, budget_bytes, limit_seconds)
    except NoPlanFitsError as error:
        return {
            "status": "infeasible",
            "budget_bytes": budget_bytes,
            "minimum_feasible_peak_bytes": error.minimum_feasible_peak_bytes,
            "reason": f"nothing found below {mebibytes(error.minimum_feasible_peak_bytes)} MiB, at {error.operation}",
        }
    except (PlannerError, RuntimeError) as error:
        return _failure(error)
    planning_seconds = time.perf_counter() - begun
    try:
        measured = planner.verify(
            loaded.model, loaded.example_args, plan, example_kwargs=loaded.example_kwargs, loss_fn=loaded.loss_fn
        )
        exact = runtime in TO_THE_BIT or measured.exact
        distance = None if exact else _gradient_distance(loaded, plan)
    except InfeasibleBudgetError as error:  # what Inductor writes is known only when it compiles
        return {"status": "infeasible", "budget_bytes": budget_bytes, "reason": str(error)}
    except (PlannerError, RuntimeError) as error:
        return {**_failure(error), "status": "error"}  # what was planned must run
    return {
        "status": plan.status,
        "budget_bytes": budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "predicted_overhead": plan.overhead,
        "measured_overhead": measured.overhead,
        "bitwise_equal": measured.exact,
        "gradient_distance": distance,
        "planning_seconds": planning_seconds,
    }


def _plan(loaded: ZooModel, runtime: str, budget_bytes: int, limit_seconds: float, *, compare: bool = False) -> Plan:
    return planner.plan(
        loaded.model,
        loaded.example_args,
        example_kwargs=loaded.example_kwargs,
        loss_fn=loaded.loss_fn,
        budget=budget_bytes,
        runtime=runtime,
        time_limit_seconds=limit_seconds,
        name=loaded.name,
        compare=compare,
    )


def _gradient_distance(loaded: ZooModel, plan: Plan) -> float:
    """Return the largest difference of a gradient under a plan from that without recompute, relative to its length.

    A gradient counts as no shorter than a hundredth of all together: one that cancels out is only rounding.
    """
    model = loaded.model
    found = []
    for options in ({"plan": plan}, {"budget": sys.maxsize, "runtime": plan.runtime}):
        planner.auto_wrap(model, **options)
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        step_of(loaded)()
        found.append([p.grad.double() for p in model.parameters() if p.grad is not None])
        planner.unwrap(model)
        model.zero_grad(set_to_none=True)
    shortest = 0.01 * float(torch.stack([g.norm() for g in found[1]]).norm())
    return max(float((a - b).norm()) / max(float(b.norm()), shortest) for a, b in zip(*found, strict=True))


def _failure(error: Exception) -> Result:
    """Tell what a runtime refuses from what fails."""
    refused = isinstance(error, _REFUSALS) and not isinstance(error, PlanMismatchError)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {"status": "refused" if refused else "error", "reason": reason}


def _rows(entries: Iterable[Result]) -> list[Result]:
    """Return rows that say which model and runtime they are of."""
    return [
        {"model": entry["model"], "runtime": entry["runtime"], **row}
        for entry in entries
        for row in entry.get("rows", [entry])
    ]


def _missed(row: Result) -> bool:
    """Whether a row misses its goal."""
    judged = row["runtime"] == JUDGED
    if row["status"] in ("error", "refused", "infeasible"):
        return row["status"] == "error" or (row["status"] == "refused" and judged)
    if row["status"] == "run":
        return judged and (row["peak_ratio"] > PEAK_GOAL or row["time_ratio"] > TIME_GOAL)
    return not (_gradients_held(row) and _peak_held(row))


def _difference(row: Result) -> float:
    return float(row["measured_peak_bytes"] / row["predicted_peak_bytes"] - 1)


def _peak_held(row: Result) -> bool:
    if not runtimes.get(row["runtime"]).exact_peak:
        return True  # an estimate is shown, and not judged
    return abs(_difference(row)) <= PREDICTION_GOAL and bool(row["measured_peak_bytes"] <= row["budget_bytes"])


def _gradients_held(row: Result) -> bool:
    distance = row["gradient_distance"]
    return bool(row["bitwise_equal"]) or (distance is not None and distance <= GRADIENT_GOAL)


def _line(row: Result) -> str:
    start = f"{_name(row)}: {'MISSED, ' if _missed(row) else ''}"
    if "reason" in row:
        return f"{start}{row['status']}, {row['reason']}"
    if row["status"] == "run":
        return f"{start}{row['peak_ratio']:.4f} of eager's peak, {row['time_ratio']:.3f} of its time"
    return start + ", ".join(map(str, _budget_cells(row)[2:]))


def _markdown(result: Result) -> str:
    rows = _rows(result["budgets"])
    run = [row for row in result["full_save"] if row["status"] == "run" and row["runtime"] == JUDGED]
    planned = [row for row in rows if "predicted_peak_bytes" in row]
    exact = [row for row in planned if runtimes.get(row["runtime"]).exact_peak]
    summary = (
        f"Without recompute, `{JUDGED}` needs at most {PEAK_GOAL} of eager's peak in "
        f"{sum(row['peak_ratio'] <= PEAK_GOAL for row in run)} and at most {TIME_GOAL} of its time in "
        f"{sum(row['time_ratio'] <= TIME_GOAL for row in run)} of {len(run)} models. Of {len(planned)} plans run, "
        f"{sum(map(_gradients_held, planned))} give the gradients that their runtime promises; "
        f"{sum(map(_peak_held, exact))} of {len(exact)} peaks that are predicted exactly are within "
        f"{percent(PREDICTION_GOAL)} and their budget."
    )
    return common.page(
        "Runtimes",
        result,
        summary,
        "## Without recompute, against eager",
        "What a step allocates, as a ratio of eager's (*peak*), and the median ratio of step times in pairs (*time*), "
        "which on a machine that is shared varies by several points. Freed memory is kept by the process.",
        _full_save_table(result["full_save"]),
        _reasons(result["full_save"]),
        "## With recompute",
        "Budgets are shares of the way from the smallest feasible peak to that without recompute, both of the runtime. "
        "MiB of the whole device. Overhead is step time over that of the same runtime without recompute, less one; "
        "predicted by the roofline.",
        common.table(_BUDGET_HEADINGS, [_budget_cells(row) for row in rows]),
        _reasons(rows),
        "## On the host",
        f"A step of {BLOCKS} blocks of a linear layer {WIDTH} wide, in microseconds: next to nothing is computed. "
        f"*{UNPLANNED}* is the same capture with torch's own partition; median ratios to it and to eager, all ways "
        "in turn.",
        common.table(
            ["runtime", "eager", "without recompute", "added", "to eager", f"to {UNPLANNED}", "rounds"],
            [_host_cells(row) for row in result["host"]],
        ),
    )


_BUDGET_HEADINGS = [
    "model",
    "runtime",
    "budget",
    "allowed",
    "predicted peak",
    "measured peak",
    "difference",
    "predicted overhead",
    "measured overhead",
    "gradients",
    "planned in",
]


def _full_save_table(rows: Sequence[Result]) -> str:
    ways = list(dict.fromkeys(row["runtime"] for row in rows))
    found = {(row["model"], row["runtime"]): row for row in rows}

    def cells(name: str) -> list[object]:
        own = [found.get((name, way), {"status": "-"}) for way in ways]
        eager = next((row for row in own if row["status"] == "run"), None)
        shown: list[object] = [name, "-", "-"]
        if eager is not None:
            shown = [name, mebibytes(eager["eager_peak_bytes"]), f"{1000 * eager['eager_seconds']:.0f}"]
        for row in own:
            if row["status"] == "run":
                shown += [f"{row['peak_ratio']:.4f}", f"{row['time_ratio']:.3f}"]
            else:
                shown += [row["status"], "-"]
        return shown

    headings = ["model", "eager MiB", "eager ms", *(f"{way} {what}" for way in ways for what in ("peak", "time"))]
    return common.table(headings, [cells(name) for name in dict.fromkeys(row["model"] for row in rows)])


def _budget_cells(row: Result) -> list[object]:
    start = [row["model"], row["runtime"], percent(row.get("ratio"), 0), mebibytes(row.get("budget_bytes"))]
    if "reason" in row:
        return [*start, row["status"], *["-"] * 6]
    distance = row["gradient_distance"]
    return [
        *start,
        mebibytes(row["predicted_peak_bytes"]),
        mebibytes(row["measured_peak_bytes"]),
        percent(_difference(row), 4),
        percent(row["predicted_overhead"]),
        percent(row["measured_overhead"]),
        "equal" if row["bitwise_equal"] else "DIFFER" if distance is None else f"within {distance:.1g}",
        f"{row['planning_seconds']:.1f} s",
    ]


def _host_cells(row: Result) -> list[object]:
    times = [f"{1e6 * row[key]:.0f}" for key in ("eager_seconds", "seconds", "added_seconds")]
    return [row["runtime"], *times, *(f"{row[key]:.2f}" for key in ("eager_ratio", "unplanned_ratio")), row["pairs"]]


def _reasons(rows: Iterable[Result]) -> str:
    """List why what was not run was not."""
    lines = [f"- {_name(row)}: {row['reason']}" for row in rows if "reason" in row]
    return "\n".join(lines) or "Everything was run."


def _name(row: Result) -> str:
    at = f" at {percent(row['ratio'], 0)}" if "ratio" in row else ""
    return f"{row['model']}, {row['runtime']}{at}"


if __name__ == "__main__":
    sys.exit(common.run(main))
