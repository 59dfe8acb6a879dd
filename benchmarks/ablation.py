"""What does each part of the solvers bring? Every case is planned with all parts, and with one of them switched off.

Effort is equal because work is counted, not seconds (``SolveLimits.deterministic``), so the table does not depend on
who else uses the machine. Annealing draws the same random numbers each time. A part is kept if
without it some case gets worse by at least half a percent: of the step for overhead and proven bound, of itself for the
lowest peak that is found or proven. Parts are switched off by replacing one function each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import common, tight
from benchmarks.common import Result
from planner import solvers
from planner.common.limits import SolveLimits
from planner.common.options import Search
from planner.errors import InfeasibleBudgetError
from planner.ir.host import Host
from planner.ir.instances import load_instance
from planner.ir.problem import Problem
from planner.plans.ordering import solved_in_best_order
from planner.solvers.auto import AutoSolver
from planner.solving.milp import Answer, minimise
from planner.solving.peak_bounds import proven_lowest
from planner.zoo import ZooModel

WORTH_POINTS = 0.5
"""Hundredths of the step, or of the lowest peak, that a part must bring on some case."""

NO_PLAN_POINTS = 100.0
"""What a case counts for overhead where no plan was found."""

SECONDS = 1.0
"""Of counted work, for each solve."""

FIGURES = ("overhead", "bound", "peak", "proven peak")
"""What a solve is judged by, in points; more is worse of the first and third, better of the others."""

DEVICE = "a100-80"


def _value(found: Any) -> Callable[..., Any]:
    return lambda *_, **__: found


def _first(found: Any, *_: Any, **__: Any) -> Any:
    return found


def _second(_: Any, found: Any, *__: Any, **___: Any) -> Any:
    return found


def _highest(graph: Any, costs: Any, first_run_bytes: Sequence[int]) -> tuple[int, int]:
    highest = max(first_run_bytes, default=0)
    return highest, first_run_bytes.index(highest)


def _whole_by_highs(search: Any, cuts: Any, share: float) -> Any:
    """Leave branching to HiGHS."""
    search.relaxed(cuts, share)
    model, _ = search.model(cuts)
    answer = minimise(model, turns=max(1, int(1000 * search.clock.left(share))))
    search.clock.work((1 + answer.turns) / 1000)
    search.incumbent.raise_bound(answer.bound * search.scale)
    return None if answer.columns is None else (model, answer.columns)


PLANS, FIRST, FLOORS, ORDERS, OFFLOADS = ("plans", "first plans", "floors", "orders", "offloads")

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "integer programme": (PLANS, {"solvers.auto._Race.prove": _value(None)}),
    "annealing": (PLANS, {"solvers.auto._Race.anneal": _value(None)}),
    "path_rows": (PLANS, {"solving.cutting_planes.PathRows.add_broken": _value(0)}),
    "budget_rows": (PLANS, {"solving.cutting_planes.BudgetRows.add_broken": _value(0)}),
    "dominated_values": (
        PLANS, {f"solving.{where}.dominated_values": _value([]) for where in ("step_cut", "branch_and_bound")},
    ),
    "presolve: one value for several": (PLANS, {"solvers.ilp.merged": _first, "solving.rerun_set.merged": _first}),
    "presolve: without small values": (PLANS, {"solvers.ilp.without_small": _first}),
    "relaxed_bytes": (PLANS, {"solvers.ilp._StepCutSearch.cuts_of_shares": _value(None)}),
    "tree: branching (HiGHS branches instead)": (PLANS, {"solvers.ilp._StepCutSearch.whole": _whole_by_highs}),
    "repair of integer solutions": (PLANS, {"solvers.ilp._StepCutSearch.mend": _value(None)}),
    "repair of integer solutions: reruns taken back": (PLANS, {"solvers.ilp.take_back": _second}),
    "minimum_peak_search for a first plan": (FIRST, {"solvers.search.lowest_plan": _second}),
    "peak_proof": (FLOORS, {"solving.peak_bounds.proven_by_last_births": _highest}),
    "peak_proof: pairs": (FLOORS, {"solving.peak_proof.Births._by_pairs": lambda _, live, peak: peak}),
    "minimum_peak_search": (FLOORS, {"solvers.search.lowest_plan": _second}),
    "peak_repair": (FLOORS, {"solving.minimum_peak_search.with_lower_peak": _second}),
    "orders": (ORDERS, {"plans.ordering.promising_order": _value(None)}),
    "offload_bound": (OFFLOADS, {"solvers.offload_search._OffloadSearch.solved": _value(Answer(None, 0.0))}),
    "transfer windows": (OFFLOADS, {"solvers.offload_search.widened": _second}),
    "room for transfers": (OFFLOADS, {"solvers.offload_search._OffloadSearch.make_room": _value(None)}),
    "memory under way": (OFFLOADS, {"solvers.offload_search._OffloadSearch.hideable": _value((frozenset(), ()))}),
    "single values": (OFFLOADS, {"solvers.offload_search._OffloadSearch.flip": _value(False)}),
}  # fmt: skip
"""By name, the cases that a part works on, and what is replaced to switch it off."""


class Towers(nn.Module):
    """Towers side by side, run a layer at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(256, 256) for _ in range(4)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        ends = [x] * 4
        for layer in self.layers:
            ends = [torch.sigmoid(part(end)) for part, end in zip(layer, ends, strict=True)]  # type: ignore[call-overload]
        return torch.cat(ends, 1).square().mean()


def _towers() -> ZooModel:
    return ZooModel(name="", model=Towers(), example_kwargs={"x": torch.randn(4096, 256)})


@cache
def _step(name: str) -> tight.Costed:
    return tight.lowered(name, _towers, DEVICE) if name == "towers" else tight.costed(name, DEVICE)


def posed(name: str, share: float, rate: float = 0.0) -> Problem:
    """Pose a step with a share of its peak as budget; a host takes all of that so many times in a step."""
    graph, costs = _step(name)
    problem = Problem(graph=graph, costs=costs, budget_bytes=0)
    return _with_host(replace(problem, budget_bytes=int(share * problem.baseline.peak_bytes)), rate)


def _with_host(problem: Problem, rate: float) -> Problem:
    speed = rate * problem.baseline.peak_bytes / problem.baseline.seconds
    host = Host(bytes_per_second=speed, budget_bytes=2**50, least_bytes=1) if rate else None
    return replace(problem, host=host)


def plan(problem: Problem, limits: SolveLimits) -> Result:
    """Plan a step in its own order or, where that may be changed, in another."""
    search = Search(time_limit_seconds=limits.time_limit_seconds, deterministic=True, seed=limits.seed)
    whole = problem.baseline.seconds
    try:
        found = solved_in_best_order(
            problem, search, lambda asked, effort: solvers.solved(asked, "auto", effort=effort)
        )
    except InfeasibleBudgetError as error:
        return {"overhead": NO_PLAN_POINTS, "bound": 100 * error.lower_bound_seconds / whole}
    return {"overhead": 100 * found.added_seconds / whole, "bound": 100 * found.lower_bound_seconds / whole}


def floor(problem: Problem, limits: SolveLimits) -> Result:
    """Look for the lowest peak from both sides, as shares of what no part at all would prove."""
    proven_bytes = proven_lowest(problem)
    lowest = AutoSolver().lowest(replace(problem, budget_bytes=proven_bytes), effort=limits)
    unit = problem.budget_bytes / 100
    return {"peak": problem.evaluate(lowest).peak_bytes / unit, "proven peak": proven_bytes / unit}


def _posed(kind: str, *cases: tuple[Any, ...]) -> dict[str, tuple[str, Callable[[], Problem]]]:
    """Name cases by what they are posed with: a step, a share of its peak and, if given, the rate of a host."""
    names = [f"{case[0]} at {case[1]:.1%}" + "".join(f", host {rate:g}" for rate in case[2:]) for case in cases]
    return {name: (kind, lambda case=case: posed(*case)) for name, case in zip(names, cases, strict=True)}


CASES: dict[str, tuple[str, Callable[[], Problem]]] = {
    **_posed(
        OFFLOADS, ("random-20", 0.6, 1.0), ("random-50", 0.5, 1.0), ("random-60", 0.4, 3.0), ("random-100", 0.4, 1.0)
    ),
    **_posed(FLOORS, ("random-300", 0.155), ("unet", 0.2533)),
    **_posed(FIRST, ("random-300", 0.158)),
    **_posed(ORDERS, ("towers", 0.4)),
    **_posed(PLANS, ("random-300", 0.22), ("unet", 0.26)),
}
"""By name, the kind and the problem; a lowest peak is shown in hundredths of its budget."""


def measured(problem: Problem, kind: str, part: str | None, seconds: float) -> Result:
    """Solve a case with one part switched off."""
    limits = SolveLimits(time_limit_seconds=seconds, deterministic=True)
    with ExitStack() as stack:
        for name, value in (PARTS[part][1] if part else {}).items():
            stack.enter_context(patch(f"planner.{name}", value))
        if kind == FLOORS:
            _forget()
        return (floor if kind == FLOORS else plan)(replace(problem), limits)


def _forget() -> None:
    """Let bounds that are at hand from before be proven anew."""
    from planner.solving import peak_bounds

    for function in (peak_bounds.proven_peak, peak_bounds.minimum_peak):
        function.__closure__[-1].cell_contents.clear()  # type: ignore[index]


def brings(row: Result) -> dict[str, float]:
    """Say by how many points each figure gets worse without a part."""
    return {
        name: (row["without"][name] - row["with"][name]) * (1 if name in ("overhead", "peak") else -1)
        for name in FIGURES
        if name in row["with"]
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("ablation", __doc__, resumes=True)
    parser.add_argument("--instances", metavar="DIR", help="folder of published instances, of which two are cases, too")
    parser.add_argument("--time-limit", metavar="S", type=float, default=SECONDS, help="counted work for each solve")
    parser.add_argument("--parts", metavar="NAMES", help="of these parts alone, with commas (default: all)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    cases = dict(CASES)
    for name in ("mobilenet_v2-5gb", "resnet50-6gb") if args.instances else ():
        cases[name] = PLANS, lambda name=name: load_instance(Path(args.instances) / f"{name}.json")[0]
    names = common.chosen(args.parts, tuple(PARTS))
    shown = [argument.replace(args.instances or "", Path(args.instances or "x").name) for argument in arguments]
    before = common.earlier("ablation", args.json).get("rows", []) if args.resume else []
    result: Result = {**common.environment("ablation", shown), "rows": list(before)}
    done = {(row["part"], row["case"]) for row in before}
    for case, (kind, make) in cases.items():
        parts = [part for part in names if PARTS[part][0] == kind and (part, case) not in done]
        if not parts:
            continue
        problem = make()
        whole = measured(problem, kind, None, args.time_limit)
        for part in parts:
            started = time.process_time()
            row: Result = {
                "part": part, "case": case, "with": whole, "without": measured(problem, kind, part, args.time_limit),
            }  # fmt: skip
            row["processor_seconds"] = time.process_time() - started
            result["rows"].append(row)
            common.progress(f"{case} | {part} | {whole} | {brings(row)} | {row['processor_seconds']:.0f} s")
        common.write(args.json, result, _markdown(result))
    print(_markdown(result), file=sys.stderr if args.json == "-" else sys.stdout)
    return 0


def _markdown(result: Result) -> str:
    lines = []
    for part in dict.fromkeys(row["part"] for row in result["rows"]):
        rows = [(brings(row), row["case"]) for row in result["rows"] if row["part"] == part]
        best = {
            name: max(((found[name], case) for found, case in rows if name in found), default=None) for name in FIGURES
        }
        kept = any(found is not None and found[0] >= WORTH_POINTS for found in best.values())
        lines.append([part, *("-" if each is None else f"{each[0]:.2f} ({each[1]})" for each in best.values()),
                      "yes" if kept else "by its tests" if part in PARTS else "deleted"])  # fmt: skip
    return common.page(
        "Ablation",
        result,
        "By how many points the worst case gets worse without a part: overhead and proven bound in hundredths of the "
        "step, the lowest peak that is found or proven in hundredths of itself. A part is kept where that is at least "
        f"{WORTH_POINTS:g}, or where a test shows what it brings on a graph of another kind: optima of small graphs "
        "with offload held to brute force, lowest peaks of transformers. Other parts are deleted; their rows are from "
        "before.",
        common.table(["part", *FIGURES, "kept"], lines),
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
