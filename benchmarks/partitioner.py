"""What does the same memory cost PyTorch's own partitioner? Both on one graph, in one simulator.

PyTorch's min-cut partitioner, told an ``activation_memory_budget`` (a ratio), decides on the joint
graph of a model what to save and in which order the backward runs. Its two graphs are read back
as a schedule of our operations and simulated; then we plan for exactly the peak that came out.
Its peak is counted a second time on its own graphs, without our simulator.

Attention is the kernel that torch would choose on the device. Two cases where a model has dropout:
as it is, and without. Exit code 1 if the
geometric mean of (planned / PyTorch's overhead) over all points is above 0.65, or any above 1.
"""

from __future__ import annotations

import argparse
import operator
import sys
import time
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

import torch
from torch import fx

from benchmarks import common
from benchmarks.common import Result, mebibytes, percent
from planner import zoo
from planner.capture.inputs import Inputs
from planner.capture.joint import is_tangent, tensors_of
from planner.capture.joint_capture import capture, fake_mode
from planner.capture.lowering import LoweredGraph
from planner.capture.torch_internals import storage_id
from planner.common.options import Search, Target
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.measure.costing import operation_costs
from planner.plans.plan import NoPlanFitsError
from planner.plans.planning import make_plan
from planner.session.min_cut import Partition, partition, read_schedule
from planner.session.step import Options, elsewhere_for, lower_step

GOAL_MEAN, GOAL_WORST = 0.65, 1.0
MODELS = "gpt2,bert-large,vit-b16,resnet50,unet,t5-base"
CASES = ("as it is", "without dropout")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("partitioner", __doc__)
    parser.add_argument("--models", metavar="NAMES", default=MODELS, help=f"of the zoo (default: {MODELS})")
    for option in ("--batch-size", "--seq-len", "--image-size", "--layers"):
        parser.add_argument(option, metavar="N", type=int, help="by default what the zoo has")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--devices", metavar="NAMES", default="a100-80", help="whose rooflines (default: a100-80)")
    parser.add_argument("--points", metavar="PERCENT", type=common.ratios, default="90,80,70,60,50,40,30,20,10")
    parser.add_argument("--time-limit", metavar="S", type=float, default=10.0, help="for each solve (default: 10)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    sizes = {name: getattr(args, name) for name in ("batch_size", "seq_len", "image_size", "layers", "dtype")}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    tables = [table for name in args.models.split(",") for case in CASES for table in _tables(name, case, sizes, args)]
    quotients = [quotient for table in tables for quotient in table["quotients"]]
    result: Result = {
        **common.environment("partitioner", arguments),
        "sizes": sizes,
        "tables": tables,
        "points": len(quotients),
        "geometric_mean": geometric_mean(quotients) if quotients else None,
        "worst": max(quotients, default=None),
    }
    result["goal_met"] = bool(quotients) and result["geometric_mean"] <= GOAL_MEAN and result["worst"] <= GOAL_WORST
    common.write(args.json, result, _markdown(result))
    return 0 if result["goal_met"] else 1


def own_peak_bytes(split: Partition, alignment_bytes: int) -> int:
    """Count the peak of the two graphs from their nodes alone, each storage freed after its last use.

    Nothing of lowering or the simulator is used. Parameters, inputs and constants do not count;
    outputs, gradients and tangents stay to the end.
    """
    size_bytes: list[int] = []
    born: list[int] = []
    died: list[int] = []
    clock = 0

    def new(tensor: torch.Tensor) -> int:
        size_bytes.append(-(-tensor.untyped_storage().nbytes() // alignment_bytes) * alignment_bytes)
        born.append(clock)
        died.append(clock)
        return len(size_bytes) - 1

    Held = dict[int, int | None]  # storage to its copy; None for what is resident
    forever: set[int | None] = set()

    def walk(graph: fx.Graph, placeholders: dict[fx.Node, Held]) -> dict[fx.Node, Held]:
        nonlocal clock
        held = dict(placeholders) | resident(graph.find_nodes(op="get_attr"))
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            clock += 1
            seen: Held = {storage: copy for source in node.all_input_nodes for storage, copy in held[source].items()}
            if node.op == "call_function":
                storages = {storage_id(tensor): tensor for tensor in tensors_of(node)}
                held[node] = {s: seen[s] if s in seen else new(tensor) for s, tensor in storages.items()}
                seen = held[node] if node.target is operator.getitem else seen
            for copy in seen.values():
                if copy is not None:
                    died[copy] = clock
        return held

    def resident(nodes: Sequence[fx.Node]) -> dict[fx.Node, Held]:
        return {node: {storage_id(tensor): None for tensor in tensors_of(node)} for node in nodes}

    def outputs(graph: fx.Graph) -> list[Any]:
        return list(graph.output_node().args[0])

    forward = walk(split.forward, resident(split.forward.find_nodes(op="placeholder")))
    results, saved = outputs(split.forward)[: split.num_forward_outputs], outputs(split.forward)
    forever.update(copy for node in results if isinstance(node, fx.Node) for copy in forward[node].values())
    clock += 1
    placeholders = split.backward.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if is_tangent(node)]
    taken = [node for node in placeholders if not is_tangent(node)]
    arguments: dict[fx.Node, Held] = {
        node: {storage_id(tensor): new(tensor) for tensor in tensors_of(node)} for node in tangents
    }
    forever.update(copy for held in arguments.values() for copy in held.values())
    arguments |= {b: forward[f] for b, f in zip(taken, saved[split.num_forward_outputs :], strict=True)}
    backward = walk(split.backward, arguments)
    forever.update(c for n in outputs(split.backward) if isinstance(n, fx.Node) for c in backward[n].values())

    change = [0] * (clock + 2)
    for copy, size in enumerate(size_bytes):
        change[born[copy]] += size
        change[(clock if copy in forever else died[copy]) + 1] -= size
    live = peak = 0
    for difference in change:
        live += difference
        peak = max(peak, live)
    return peak


def _tables(name: str, case: str, sizes: dict[str, Any], args: argparse.Namespace) -> list[Result]:
    """Compare one case of one model on every device; none where the case is no other."""
    model = zoo.build(name, **sizes, fake_mode=fake_mode())
    inputs = Inputs.of(model.example_args, model.example_kwargs)
    if case == "without dropout":
        dropouts = [m for m in model.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        if not dropouts:
            return []
        for module in dropouts:
            module.p = 0.0
    tables = []
    for device in args.devices.split(","):
        common.progress(f"{name}, {case}, {device}: capturing")
        options = Options(target=Target(device=device), name=name)
        joint = capture(model.model, inputs, elsewhere=elsewhere_for(model.model, options))
        splits = {}
        seconds = {}
        for ratio in args.points:
            begun = time.perf_counter()
            splits[ratio] = partition(joint, ratio)
            seconds[ratio] = time.perf_counter() - begun
            common.progress(f"  PyTorch at {percent(ratio, 0)}: {seconds[ratio]:.1f} s")
        step = lower_step(model.model, joint, options)
        lowered, costs = step.lowered, operation_costs(step.lowered.graph, step.spec, options.target.cost_model)
        baseline = simulate(lowered.graph, costs, Schedule.keep_all(lowered.graph))
        rows: list[Result] = []
        for ratio, split in splits.items():
            row = _row(split, lowered, costs, baseline.seconds, args.time_limit, rows)
            rows.append({**row, "ratio": ratio, "partition_seconds": seconds[ratio]})
            common.progress(f"  {device}: {' | '.join(map(str, _cells(rows[-1])))}")
        tables.append(
            {
                "model": name,
                "case": case,
                "device": device,
                "operations": len(lowered.graph.operations),
                "baseline_peak_bytes": baseline.peak_bytes,
                "baseline_step_seconds": baseline.seconds,
                "quotients": _quotients(rows),
                "rows": rows,
            }
        )
    return tables


def _row(
    split: Partition,
    lowered: LoweredGraph,
    costs: Any,
    baseline_seconds: float,
    limit_seconds: float,
    before: Sequence[Result],
) -> Result:
    """Simulate PyTorch's schedule, and plan for exactly its peak, unless that was done at an earlier ratio."""
    schedule = read_schedule(split, lowered)
    theirs = simulate(lowered.graph, costs, schedule)
    row = {
        "peak_bytes": theirs.peak_bytes,
        "own_peak_bytes": own_peak_bytes(split, lowered.graph.alignment_bytes),
        "recomputed": len(schedule.order) - len(lowered.graph.operations),
        "overhead": theirs.recompute_seconds / baseline_seconds,
    }
    for other in before:
        if _point(other) == _point(row):
            return other
    try:
        plan = make_plan(
            Problem(graph=lowered.graph, costs=costs, budget_bytes=theirs.peak_bytes),
            Search(time_limit_seconds=limit_seconds, compare=False),
        )
    except NoPlanFitsError as error:
        return {**row, "planned": None, "smallest_peak_bytes": error.minimum_feasible_peak_bytes, "quotient": None}
    planned = {
        "status": plan.status,
        "solver": plan.solver,
        "solve_seconds": plan.solve_seconds,
        "peak_bytes": plan.peak_bytes - plan.total_static_bytes,
        "overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
    }
    return {**row, "planned": planned, "quotient": plan.overhead / row["overhead"] if row["overhead"] else None}


def _point(row: Result) -> tuple[int, float]:
    return row["peak_bytes"], row["overhead"]


def _quotients(rows: Sequence[Result]) -> list[float]:
    """Return what we pay of PyTorch's overhead; ratios at which it does the same are one point.

    Where its peak is not below that of the step without recompute we pay nothing; a hundredth stands for that.
    """
    distinct = {_point(row): row["quotient"] for row in rows}
    return [max(quotient, 0.01) for quotient in distinct.values() if quotient is not None]


def _markdown(result: Result) -> str:
    summary = (
        "Recompute is not compared yet: PyTorch's partitioner recomputes at no point."
        if not result["points"]
        else f"Over {result['points']} different points the plan pays {result['geometric_mean']:.2f} of PyTorch's "
        f"overhead (geometric mean), {result['worst']:.2f} at worst, at the same peak."
    )
    legend = (
        f"{summary}\n\n{common.sizes_text(result['sizes'])}, else the sizes of the zoo; captured without memory. "
        "At each `activation_memory_budget` (dp solver, run time estimated by FLOPs) PyTorch's peak is simulated, "
        "and we plan for exactly that peak. MiB above what is resident before the step; overhead is the time of "
        "recomputation over the step without any, by the roofline of the device. *counted* is PyTorch's peak counted "
        "on its own graphs, without the random states that exact gradients need."
    )
    headings = ["ratio", "peak", "counted", "recomputed", "PyTorch", "planned", "bound", "planned / PyTorch"]
    brief = ["model", "case", "device", "points", "geometric mean", "worst"]
    parts = [common.table(brief, [_brief(table) for table in result["tables"]])]
    for table in result["tables"]:
        parts.append(
            f"## {table['model']}, {table['case']}, {table['device']}\n\n"
            f"Without recompute: {mebibytes(table['baseline_peak_bytes'])} MiB, "
            f"{1e3 * table['baseline_step_seconds']:,.1f} ms, {table['operations']} operations.\n\n"
            + common.table(headings, [_cells(row) for row in table["rows"]])
        )
    return common.page("Against PyTorch's partitioner", result, legend, *parts)


def _brief(table: Result) -> list[object]:
    quotients = table["quotients"]
    mean, worst = (f"{geometric_mean(quotients):.2f}", f"{max(quotients):.2f}") if quotients else ("-", "-")
    return [table["model"], table["case"], table["device"], len(quotients), mean, worst]


def _cells(row: Result) -> list[object]:
    planned = row["planned"] or {}
    return [
        f"{row['ratio']:g}",
        mebibytes(row["peak_bytes"]),
        mebibytes(row["own_peak_bytes"]),
        row["recomputed"],
        percent(row["overhead"], 2),
        percent(planned.get("overhead"), 2),
        percent(planned.get("lower_bound_overhead"), 2),
        "-" if row["quotient"] is None else f"{row['quotient']:.2f}",
    ]


if __name__ == "__main__":
    sys.exit(common.run(main))
