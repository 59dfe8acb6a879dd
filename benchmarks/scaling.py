"""Does planning stay quick and tight with depth? GPT-2 of 12 to 144 layers, captured without memory.

For each depth, vocabulary and budget (a share of what the step allocates without recompute):
overhead, proven bound, the gap in points, and the seconds it took; then the time to plan against
depth. Overheads are by the roofline of the device. Attention has no dropout, so that it is one
fused kernel here as on a GPU; all other dropout stays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Result, percent
from planner import solvers
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture, fake_mode
from planner.common.options import Target
from planner.errors import InfeasibleBudgetError, UsageError
from planner.ir.graph import TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.measure.costing import operation_costs
from planner.session.step import Options, lower_step


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("scaling", __doc__)
    parser.add_argument("--layers", metavar="NUMBERS", type=_integers, default="12,36,144")
    parser.add_argument("--vocabularies", metavar="NUMBERS", type=_integers, default="50257,1024")
    parser.add_argument("--budgets", metavar="PERCENT", type=common.ratios, default="80,60,40,25,16")
    parser.add_argument("--batch-size", metavar="N", type=int, default=8)
    parser.add_argument("--seq-len", metavar="N", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="a100-80", help="whose roofline (default: a100-80)")
    parser.add_argument("--solver", default="auto", help="name of a solver (default: auto)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=10.0, help="for each solve (default: 10)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    rows = []
    for vocabulary in args.vocabularies:
        for layers in args.layers:
            started = time.perf_counter()
            top = _keep_all(vocabulary, layers, args)
            captured_seconds = time.perf_counter() - started
            common.progress(f"GPT-2, {layers} layers, vocabulary {vocabulary}: {captured_seconds:.1f} s to capture")
            for ratio in args.budgets:
                row = {"vocabulary": vocabulary, "layers": layers, "capture_seconds": captured_seconds}
                rows.append({**row, **_solve(top, ratio, args.solver, args.time_limit)})
                common.progress("  " + " | ".join(map(str, _cells(rows[-1]))))
    result = {
        **common.environment("scaling", arguments),
        "sizes": {name: getattr(args, name) for name in ("batch_size", "seq_len", "dtype", "device")},
        "rows": rows,
        "time_to_plan": _time_to_plan(rows),
    }
    markdown = _markdown(result)
    print(markdown, file=sys.stderr if args.json == "-" else sys.stdout)
    common.write(args.json, result, markdown)
    return 0


def _keep_all(vocabulary: int, layers: int, args: argparse.Namespace) -> Problem:
    """Capture GPT-2 at some depth and vocabulary, with the budget that needs no recompute."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise UsageError("this benchmark needs transformers: pip install 'checkpoint-planner[zoo]'") from error

    config = transformers.GPT2Config(
        n_layer=layers,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=max(1024, args.seq_len),
        attn_pdrop=0.0,  # with it a CPU has no fused attention, as a GPU has; other dropout stays
        use_cache=False,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, args.dtype))
    try:
        with fake_mode():
            model = transformers.GPT2LMHeadModel(config).train()
            tokens = torch.zeros(args.batch_size, args.seq_len, dtype=torch.int64)
    finally:
        torch.set_default_dtype(before)
    model.loss_type = "ForCausalLM"
    joint = capture(model, Inputs.of({"input_ids": tokens, "labels": tokens.clone()}))
    options = Options(target=Target(device=args.device), name=f"gpt2-{layers}-{vocabulary}")
    step = lower_step(model, joint, options)
    graph: TrainingGraph = step.lowered.graph
    costs = operation_costs(graph, step.spec, options.target.cost_model)
    peak_bytes = simulate(graph, costs, Schedule.keep_all(graph)).peak_bytes
    return Problem(graph=graph, costs=costs, budget_bytes=peak_bytes)


def _solve(top: Problem, ratio: float, solver: str, time_limit_seconds: float) -> Result:
    """Plan for a share of what keeping everything takes."""
    problem = Problem(graph=top.graph, costs=top.costs, budget_bytes=int(ratio * top.budget_bytes))
    step_seconds = problem.baseline.seconds
    row: Result = {
        "operations": len(problem.graph.operations),
        "budget_ratio": ratio,
        "budget_bytes": problem.budget_bytes,
        "peak_bytes": None,
        "overhead": None,
        "lower_bound_overhead": None,
        "gap_points": None,
        "solver": solver,
    }
    started = time.perf_counter()
    try:
        solution = solvers.solve(problem, solver, time_limit_seconds=time_limit_seconds)
    except InfeasibleBudgetError as error:
        lowest = error.minimum_feasible_peak_bytes - problem.graph.total_static_bytes
        return {**row, "seconds": time.perf_counter() - started, "lowest_ratio": lowest / top.budget_bytes}
    row["seconds"] = time.perf_counter() - started
    row["solver"] = solution.solver
    row["peak_bytes"] = solution.peak_bytes
    row["overhead"] = solution.recompute_seconds / step_seconds
    if solvers.get(solver).proves_bound:
        row["lower_bound_overhead"] = solution.lower_bound_seconds / step_seconds
        row["gap_points"] = 100 * (row["overhead"] - row["lower_bound_overhead"])
    return row


def _time_to_plan(rows: Sequence[Result]) -> list[Result]:
    """Add up the solve times over the budgets that every depth has a plan for, and hold them against depth."""
    made: list[Result] = []
    for vocabulary in dict.fromkeys(row["vocabulary"] for row in rows):
        mine = [row for row in rows if row["vocabulary"] == vocabulary]
        missed = {row["budget_ratio"] for row in mine if row["overhead"] is None}
        shared = [row for row in mine if row["budget_ratio"] not in missed]
        first: Result | None = None
        for layers in dict.fromkeys(row["layers"] for row in shared):
            times = [row["seconds"] for row in shared if row["layers"] == layers]
            entry: Result = {
                "vocabulary": vocabulary,
                "layers": layers,
                "budgets": len(times),
                "seconds": sum(times),
                "milliseconds_per_layer": 1e3 * sum(times) / len(times) / layers,
            }
            first = first or entry
            entry["times_linear"] = entry["milliseconds_per_layer"] / first["milliseconds_per_layer"]
            made.append(entry)
    return made


def _integers(text: str) -> list[int]:
    """Read positive whole numbers with commas.

    Examples
    --------
    >>> _integers("12,36")
    [12, 36]
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 12,36")
    return found


def _markdown(result: Result) -> str:
    headings = ["vocabulary", "layers", "operations", "budget", "overhead", "bound", "gap, points", "seconds", "solver"]
    times = [
        [
            entry["vocabulary"],
            entry["layers"],
            entry["budgets"],
            f"{entry['seconds']:.1f}",
            f"{entry['milliseconds_per_layer']:.1f}",
            f"{entry['times_linear']:.2f}",
        ]
        for entry in result["time_to_plan"]
    ]
    return common.page(
        "Scaling with depth",
        result,
        f"GPT-2, {common.sizes_text(result['sizes'])}, captured without memory; no dropout in attention, so that it "
        "is one kernel. Budgets are shares of the bytes that the step allocates without recompute; overhead is the "
        "time of recomputation over the step without any.",
        common.table(headings, [_cells(row) for row in result["rows"]]),
        "## Time to plan against depth",
        "Solve times over the budgets that all depths have plans for; *times linear* is time a layer, over that of the "
        "first depth.",
        common.table(["vocabulary", "layers", "budgets", "seconds", "ms a layer and budget", "times linear"], times),
    )


def _cells(row: Result) -> list[object]:
    lowest = row.get("lowest_ratio")
    return [
        row["vocabulary"],
        row["layers"],
        row["operations"],
        f"{100 * row['budget_ratio']:g}%",
        percent(row["overhead"], 2) if lowest is None else f"no plan below {percent(lowest)}",
        percent(row["lower_bound_overhead"], 2),
        "-" if row["gap_points"] is None else f"{row['gap_points']:.3f}",
        f"{row['seconds']:.1f}",
        row["solver"],
    ]


if __name__ == "__main__":
    sys.exit(common.run(main))
