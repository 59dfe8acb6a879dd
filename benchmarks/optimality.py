"""How near to the optimum are the plans? Published instances with known costs.

Every ``*.json`` of a folder is an instance as ``planner.load_instance`` reads it. For each: the
total cost found (every operation once, plus recompute), the proven lower bound, and the ratio to
the best known cost. Exit code 1 if a bound is above a cost that somebody reached, or a cost below
a bound that somebody proved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common
from benchmarks.common import Result
from planner import solvers
from planner.errors import InfeasibleBudgetError, UsageError
from planner.ir.instances import Reference, load_instance
from planner.ir.problem import Problem

NEAR, NOT_FAR = 1.0002, 1.005
"""Goals for the ratio to the best known cost: on nearly all instances, and on all."""

TOLERANCE = 1e-9


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("optimality", __doc__)
    parser.add_argument("--instances", metavar="DIR", required=True, help="folder of instances, *.json")
    parser.add_argument("--time-limit", metavar="S", type=float, default=10.0, help="for each solve (default: 10)")
    parser.add_argument("--solver", default="auto", help="name of a solver (default: auto)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    instances = [load_instance(path) for path in _files(args.instances)]
    folder = Path(args.instances).name
    shown = [argument.replace(args.instances, folder) for argument in arguments]  # the rest is of this machine
    result = {**common.environment("optimality", shown), "rows": []}
    for problem, reference in instances:
        row = solve(problem, reference, args.solver, args.time_limit)
        result["rows"].append(row)
        common.progress(f"{row['name']}: {row['cost'] or 'no plan'}, {row['seconds']:.1f} s")
    markdown = _markdown(result)
    print(markdown, file=sys.stderr if args.json == "-" else sys.stdout)
    common.write(args.json, result, markdown)
    return 1 if any(row["contradicts"] for row in result["rows"]) else 0


def solve(problem: Problem, reference: Reference, solver: str, time_limit_seconds: float) -> Result:
    """Solve an instance and set what comes out beside what is known."""
    row: Result = {
        "name": reference.name, "operations": len(problem.graph.operations), "base_cost": reference.base_cost,
        "published_cost": reference.published_cost, "best_known_cost": reference.best_known_cost, "cost": None,
        "lower_bound": None, "ratio": None, "solver": solver, "contradicts": None,
    }  # fmt: skip
    started = time.perf_counter()
    try:
        solution = solvers.solve(problem, solver, time_limit_seconds=time_limit_seconds)
    except InfeasibleBudgetError as error:
        return {**row, "seconds": time.perf_counter() - started, "lowest_peak": error.minimum_feasible_peak_bytes}
    row["seconds"] = time.perf_counter() - started
    row["solver"] = solution.solver
    row["cost"] = reference.base_cost + solution.recompute_seconds
    if solution.lower_bound_seconds:
        row["lower_bound"] = reference.base_cost + solution.lower_bound_seconds
    if reference.best_known_cost:
        row["ratio"] = row["cost"] / reference.best_known_cost
    row["contradicts"] = _contradiction(row, reference)
    return row


def _contradiction(row: Result, reference: Reference) -> str | None:
    """Say which known cost or bound a result cannot be true beside."""
    reached = min(cost for cost in (row["cost"], reference.published_cost, reference.best_known_cost) if cost)
    if row["lower_bound"] and row["lower_bound"] > reached * (1 + TOLERANCE):
        return f"lower bound {row['lower_bound']:g} above the known cost {reached:g}"
    if reference.lower_bound_cost and row["cost"] < reference.lower_bound_cost * (1 - TOLERANCE):
        return f"cost {row['cost']:g} below the proven bound {reference.lower_bound_cost:g}"
    return None


def _files(folder: str) -> list[Path]:
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"--instances: {folder} is no directory")
    files = sorted(path.glob("*.json"))
    if not files:
        raise UsageError(f"--instances: there is no *.json in {folder}")
    return files


def _markdown(result: Result) -> str:
    rows = result["rows"]
    known = [row for row in rows if row["best_known_cost"]]
    ratios = [row["ratio"] for row in known if row["ratio"]]
    published = [row for row in rows if row["published_cost"]]
    beaten = sum(bool(row["cost"]) and row["cost"] <= row["published_cost"] for row in published)
    lines = [
        f"Of {len(known)} instances {sum(ratio <= NEAR for ratio in ratios)} within {NEAR:g} and "
        f"{sum(ratio <= NOT_FAR for ratio in ratios)} within {NOT_FAR:g} of the best known cost; "
        f"{beaten} of {len(published)} published costs equalled or beaten; longest solve "
        f"{max(row['seconds'] for row in rows):.1f} s.",
        *(f"WRONG: {row['name']}: {row['contradicts']}." for row in rows if row["contradicts"]),
        common.table(
            ["instance", "operations", "cost", "bound", "gap", "best known", "ratio", "published", "seconds", "solver"],
            [_cells(row) for row in rows],
        ),
        "Costs are in the unit of the files, every operation once and recompute; the gap is cost over bound, less one.",
    ]
    return common.page("Optimality", result, *lines)


def _cells(row: Result) -> list[object]:
    def cost(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:,.0f}"

    gap = row["cost"] / row["lower_bound"] - 1 if row["cost"] and row["lower_bound"] else None
    return [
        row["name"], row["operations"], cost("cost") if row["cost"] is not None else "no plan found",
        cost("lower_bound"), common.percent(gap, 3), cost("best_known_cost"),
        "-" if row["ratio"] is None else f"{row['ratio']:.5f}", cost("published_cost"), f"{row['seconds']:.1f}",
        row["solver"],
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.run(main))
