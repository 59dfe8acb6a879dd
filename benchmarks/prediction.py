"""Do predictions hold? Peak and overhead of planned steps, and the time of every operation, by default costs.

For each model plans at several budgets are run:
predicted against measured peak, and predicted against measured overhead in points. The times of
single operations are compared with those inside a real step by rank correlation. Exit code 1 if a
peak is more than 0.1% from its prediction or above its budget, an overhead more than 3 points
away, or a rank correlation below 0.95.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import correlation, fmean, median
from typing import Any

import torch
from torch import fx

from benchmarks import common
from benchmarks.cases import ZOO_SIZES
from benchmarks.common import Result, mebibytes, percent
from planner import Search, api, zoo
from planner.capture import operands
from planner.capture.inputs import Inputs
from planner.capture.joint import is_tangent, tensors_of
from planner.capture.joint_capture import capture
from planner.capture.lowering import LoweredGraph
from planner.capture.memory import keep_freed_memory
from planner.common import cache_folder
from planner.common.options import Target
from planner.errors import PlannerError
from planner.ir.schedule import Schedule
from planner.plans.plan import NoPlanFitsError, Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.session.step import Options, cost, lower_step
from planner.zoo import ZooModel

PEAK_GOAL, OVERHEAD_GOAL, RANK_GOAL = 1e-3, 0.03, 0.95

_WARM_UPS, _LEAST_ROUNDS, _MOST_ROUNDS = 1, 5, 40
_PAIRS = 5
"""Whole steps each way that are timed by the clock, beside the sum of their nodes."""

_NAMES = ("minigpt", "minimind-26m", "gpt2", "bert-large", "vit-b16", "resnet50", "resnet152", "t5-base", "unet")
MODELS = {name: ZOO_SIZES[name] for name in _NAMES}
"""Sizes at which a step takes a few seconds at most on two cores, so that many can be timed."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("prediction", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--budgets", metavar="PERCENT", type=common.ratios, default="85,65,45,25")
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=10.0, help="for timing each plan's steps (default: 10)"
    )
    parser.add_argument("--time-limit", metavar="S", type=float, default=5.0, help="for each solve (default: 5)")
    parser.add_argument("--cost-model", metavar="NAME", default="auto", help="what predicts times (default: auto)")
    parser.add_argument("--layers", metavar="N", type=int, help="in place of each model's own")
    parser.add_argument("--keep", action="store_true", help="keep what the result file has of models not named now")
    args = parser.parse_args(arguments)
    if not keep_freed_memory():
        common.progress("this system's allocator cannot be told to keep memory: times include page faults")
    cache_folder.turn_off()  # nothing is known but what this process finds
    names = common.chosen(args.models, list(MODELS))
    common.check_destination(args.json)
    earlier = common.earlier("prediction", args.json) if args.keep else {}
    result: Result = {
        **common.environment("prediction", arguments),
        "earlier_commands": [*earlier.get("earlier_commands", []), *filter(None, [earlier.get("command")])],
        "models": [entry for entry in earlier.get("models", []) if entry["model"] not in names],
    }
    for name in names:
        result["models"].append(_model(name, args))
        if args.json != "-":
            common.write(args.json, result, _markdown(result))
    if args.json == "-":
        common.write("-", result, "")
    return 1 if any(_misses(entry) for entry in result["models"]) else 0


def _model(name: str, args: argparse.Namespace) -> Result:
    sizes = {**MODELS[name], **({"layers": args.layers} if args.layers else {})}
    common.progress(f"{name}: {common.sizes_text(sizes)}")
    loaded = zoo.build(name, **sizes)
    joint = capture(loaded.model, Inputs.of(loaded.example_args, loaded.example_kwargs))
    options = Options(target=Target(cost_model=args.cost_model))
    step = lower_step(loaded.model, joint, options)
    lowered, costing = step.lowered, cost(loaded.model, step.lowered, step.spec, options)
    predicted = {o.signature: c.seconds for o, c in zip(lowered.graph.operations, costing.costs, strict=True)}
    keep_all = Schedule.keep_all(lowered.graph)
    inside: dict[str, list[float]] = defaultdict(list)
    for one in _time_inside(lowered, [keep_all], _LEAST_ROUNDS)[0]:
        for signature, seconds in one:
            inside[signature].append(seconds)
    pairs = [(median(inside[signature]), predicted[signature]) for signature in inside if predicted.get(signature)]
    entry: Result = {
        "model": name,
        "sizes": sizes,
        "cost_model": costing.cost_model,
        "rank_correlation": rank_correlation(pairs),
        "compared_operations": len(pairs),
        "rows": [],
    }
    common.progress(f"  {len(pairs)} different operations, rank correlation {entry['rank_correlation']:.3f}")
    free = _plan(loaded, args, sys.maxsize, compare=True)
    room_bytes = free.baseline_peak_bytes - free.minimum_feasible_peak_bytes
    for ratio in args.budgets:
        budget_bytes = free.minimum_feasible_peak_bytes + int(ratio * room_bytes)
        entry["rows"].append(_row(loaded, lowered, ratio, budget_bytes, args))
        common.progress("  " + " | ".join(map(str, _cells(name, entry["rows"][-1]))))
    del loaded
    gc.collect()
    return entry


def _row(
    loaded: ZooModel,
    lowered: LoweredGraph,
    ratio: float,
    budget_bytes: int,
    args: argparse.Namespace,
) -> Result:
    """Plan for a budget, run the plan, and hold both against each other."""
    row: Result = {"budget_ratio": ratio, "status": "infeasible"}
    try:
        plan = _plan(loaded, args, budget_bytes)
    except NoPlanFitsError as error:
        return {**row, "minimum_feasible_peak_bytes": error.minimum_feasible_peak_bytes}
    try:
        measured = api.verify(
            loaded.model,
            Inputs.of(loaded.example_args, loaded.example_kwargs),
            plan,
            loss_fn=loaded.loss_fn,
            timed_steps=_PAIRS,
        )
        ways = [plan.schedule_for(lowered.graph), Schedule.keep_all(lowered.graph)]
        rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(args.seconds / (2 * plan.baseline_step_seconds))))
        planned, baseline = _step_seconds(_time_inside(lowered, ways, rounds))
    except (PlannerError, RuntimeError) as error:
        return {**row, "status": "error", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {
        **row,
        "status": plan.status,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "predicted_overhead": plan.overhead,
        "measured_overhead": planned / baseline - 1,
        "rounds": rounds,
        "overhead_of_whole_steps": measured.overhead,
        "bitwise_equal": measured.exact,
    }


def _plan(loaded: ZooModel, args: argparse.Namespace, budget_bytes: int, *, compare: bool = False) -> Plan:
    return api.plan(
        loaded.model,
        Inputs.of(loaded.example_args, loaded.example_kwargs),
        budget=budget_bytes,
        target=Target(cost_model=args.cost_model),
        search=Search(time_limit_seconds=args.time_limit, compare=compare),
        loss_fn=loaded.loss_fn,
        name=loaded.name,
    )


def _time_inside(lowered: LoweredGraph, ways: Sequence[Schedule], rounds: int) -> list[list[list[tuple[str, float]]]]:
    """Run whole steps node by node, in turn, and give each node's signature and time: by way, by round, in order."""
    graphs = [extract_fwd_bwd(lowered, schedule) for schedule in ways]
    found: list[list[list[tuple[str, float]]]] = [[] for _ in ways]
    tangents_of = [
        [t for n in backward.graph.find_nodes(op="placeholder") if is_tangent(n) for t in tensors_of(n)]
        for _, backward in graphs
    ]
    for number in range(_WARM_UPS + rounds):
        for way, (forward, backward) in enumerate(graphs):
            seen: list[tuple[str, float]] = []
            with torch.no_grad():
                saved = _Timed(forward, seen).run(*lowered.joint.inputs)[lowered.joint.num_forward_outputs :]
                tangents = [torch.ones(t.shape, dtype=t.dtype) for t in tangents_of[way]]
                _Timed(backward, seen).run(*saved, *tangents)
                del saved
            if number >= _WARM_UPS:
                found[way].append(seen)
    return found


def _step_seconds(ways: Sequence[Sequence[Sequence[tuple[str, float]]]]) -> list[float]:
    """Add up the times of each way's nodes; each different operation takes the median over all rounds of all ways.

    The ways take turns, and a machine that is shared is faster at one time than at another: so what is
    compared is what is run, each at its time inside whole steps, and not when it was run.
    """
    inside: dict[str, list[float]] = defaultdict(list)
    for signature, seconds in chain.from_iterable(one for rounds in ways for one in rounds):
        inside[signature].append(seconds)
    medians = {signature: median(seconds) for signature, seconds in inside.items()}
    return [sum(medians[signature] for signature, _ in rounds[0]) for rounds in ways]


class _Timed(fx.Interpreter):
    """Runs a graph, frees what is no longer needed, and times every call."""

    def __init__(self, module: fx.GraphModule, seen: list[tuple[str, float]]) -> None:
        super().__init__(module)
        self.seen = seen
        self.signature = ""

    def run_node(self, node: fx.Node) -> Any:
        self.signature = operands.signature(node)
        return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = super().call_function(target, args, kwargs)
        self.seen.append((self.signature, time.perf_counter() - begun))
        return result


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's coefficient; ties share their mean rank.

    Examples
    --------
    >>> rank_correlation([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)])
    0.5
    """
    if len(pairs) < 2:
        return 1.0
    columns = [_ranks(column) for column in zip(*pairs, strict=True)]
    return round(correlation(*columns), 9)


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [fmean(places[value]) for value in values]


def _misses(entry: Result) -> bool:
    far = entry["rank_correlation"] < RANK_GOAL
    return far or any(not (_peak_held(row) and _overhead_held(row)) for row in entry["rows"])


def _peak_held(row: Result) -> bool:
    if row["status"] in ("infeasible", "error"):
        return bool(row["status"] == "infeasible")
    near = abs(row["measured_peak_bytes"] / row["predicted_peak_bytes"] - 1) <= PEAK_GOAL
    return near and bool(row["measured_peak_bytes"] <= row["budget_bytes"]) and bool(row["bitwise_equal"])


def _overhead_held(row: Result) -> bool:
    if row["status"] in ("infeasible", "error"):
        return bool(row["status"] == "infeasible")
    return bool(abs(row["measured_overhead"] - row["predicted_overhead"]) <= OVERHEAD_GOAL)


def _cells(name: str, row: Result) -> list[object]:
    start = [name, f"{100 * row['budget_ratio']:g}%"]
    if row["status"] == "infeasible":
        return [*start, f"smallest {mebibytes(row['minimum_feasible_peak_bytes'])}", *["-"] * 7]
    if row["status"] == "error":
        return [*start, row["error"].split(":")[0], *["-"] * 7]
    difference = row["measured_peak_bytes"] / row["predicted_peak_bytes"] - 1
    return [
        *start,
        mebibytes(row["predicted_peak_bytes"]),
        mebibytes(row["measured_peak_bytes"]),
        percent(difference, 4),
        percent(row["predicted_overhead"]),
        percent(row["measured_overhead"]),
        f"{100 * (row['measured_overhead'] - row['predicted_overhead']):+.1f}",
        percent(row["overhead_of_whole_steps"]),
        "equal" if row["bitwise_equal"] else "DIFFER",
    ]


def _markdown(result: Result) -> str:
    entries = result["models"]
    rows = [row for entry in entries for row in entry["rows"]]
    run = [row for row in rows if row["status"] not in ("infeasible", "error")]
    summary = (
        f"{len(run)} plans run: {sum(map(_peak_held, run))} peaks within {percent(PEAK_GOAL)} and their budget, "
        f"{sum(map(_overhead_held, run))} overheads within {100 * OVERHEAD_GOAL:g} points; rank correlation above "
        f"{RANK_GOAL:g} on {sum(e['rank_correlation'] > RANK_GOAL for e in entries)} of {len(entries)} models."
    )
    headings = ["model", "budget", "predicted peak", "measured peak", "difference", "predicted overhead"]
    ranks = [
        [e["model"], common.sizes_text(e["sizes"]), e["compared_operations"], f"{e['rank_correlation']:.3f}"]
        for e in entries
    ]
    return common.page(
        "Prediction",
        result,
        summary,
        "Budgets are shares of the way from the smallest feasible peak to that without recompute. MiB of the whole "
        "device; freed memory is kept by the process, as CUDA's allocator keeps it; overhead is step "
        "time over that of the step without recompute, less one. *Measured* adds up what each different operation "
        "takes inside whole steps run node by node, the median over both ways in turn; *by the clock* is the median "
        "ratio of five pairs of whole steps, which on a machine that is shared varies by several points from one try "
        "to the next, also for a step against itself. Predicted costs are those that a plan has by default.",
        common.table(
            [*headings, "measured overhead", "points", "by the clock", "bits"],
            [_cells(entry["model"], row) for entry in entries for row in entry["rows"]],
        ),
        "## Time of each kind of operation, alone against inside a step",
        common.table(["model", "sizes", "different operations", "rank correlation"], ranks),
        *[f"Kept from `{command}`." for command in result["earlier_commands"]],
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
