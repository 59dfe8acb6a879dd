"""How small is one arena in which everything that a step allocates has a fixed place? Every zoo model, without memory.

Each step is planned for a GPU that need not be here, without recompute and at a share of that peak. Beside our arena
stand TensorFlow Lite's greedy layout, largest first, and best fit in the order of time; the largest sum of what is
there at one moment, below which no arena can be; and what CUDA's caching allocator would reserve for the same step.

Exit code 1 if an arena takes more than 1.02 of the planned peak.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.common import Result, mebibytes
from planner import zoo
from planner.analysis.study import Study
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import fake_mode
from planner.common.options import Budget, Offload, Search, Target
from planner.errors import PlannerError
from planner.ir.schedule import Schedule
from planner.plans.allocator import simulate_reserved
from planner.plans.arena import blocks_of
from planner.session.step import Options, captured, lower_as_run, study_lowered
from planner.solving.arena import best_fit_by_time, greedy_by_size, lay_out

GOAL = 1.02


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("arena", __doc__)
    parser.add_argument("--models", metavar="NAMES", help="with commas, of the zoo (default: all)")
    parser.add_argument("--device", metavar="NAME", default="h100", help="what steps are planned for (default: h100)")
    parser.add_argument("--budget", metavar="SHARE", default="60%", help="of the second plan (default: 60%%)")
    parser.add_argument("--seconds", metavar="S", type=float, default=10.0, help="for each plan (default: 10)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    result: Result = {**common.environment("arena", arguments), "device": args.device, "steps": []}
    for name in common.chosen(args.models, zoo.names()):
        for entry in _steps(name, args.device, args.budget, args.seconds):
            common.progress(" ".join(map(str, _cells(entry))))
            result["steps"].append(entry)
        if args.json != "-":
            common.write(args.json, result, _markdown(result))
    if args.json == "-":
        common.write("-", result, "")
    laid_out = [entry for entry in result["steps"] if "arena" in entry]
    return 1 if len(laid_out) < len(result["steps"]) or any(entry["arena"] > GOAL for entry in laid_out) else 0


def _steps(name: str, device: str, budget: str, seconds: float) -> Iterator[Result]:
    with fake_mode():
        loaded = zoo.build(name)
    options = Options(target=Target(device=device, cost_model="roofline"), name=name)
    joint = captured(loaded.model, Inputs.of(loaded.example_kwargs), options)
    study = study_lowered(loaded.model, lower_as_run(loaded.model, joint, options), options)
    yield {"model": name, "plan": "without recompute", **_laid_out(study, Schedule.keep_all(study.graph))}
    search = Search(time_limit_seconds=seconds, compare=False)
    try:
        plan = study.planned(Budget(activation_budget=budget), search, Offload(), None)
    except PlannerError as error:
        yield {"model": name, "plan": budget, "refused": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        return
    yield {"model": name, "plan": budget, **_laid_out(study, plan.schedule_for(study.graph))}


def _laid_out(study: Study, schedule: Schedule) -> Result:
    graph, costs = study.graph, study.costs
    peak_bytes = study.posed(Budget(budget=2**60)).evaluate(schedule).peak_bytes
    blocks, unit = blocks_of(graph, costs, schedule), graph.alignment_bytes
    begun = time.process_time()
    found = lay_out(blocks, alignment_bytes=unit)
    seconds = time.process_time() - begun
    return {
        "tensors": len(blocks),
        "peak_bytes": peak_bytes,
        "lower_bound": found.lower_bound_bytes / peak_bytes,
        "arena": found.size_bytes / peak_bytes,
        "rule": found.rule,
        "seconds": seconds,
        "greedy_by_size": greedy_by_size(blocks, alignment_bytes=unit).size_bytes / peak_bytes,
        "best_fit_by_time": best_fit_by_time(blocks, alignment_bytes=unit).size_bytes / peak_bytes,
        "cuda_reserved": simulate_reserved(graph, costs, schedule).reserved_bytes / peak_bytes,
    }


def _cells(entry: Result) -> list[object]:
    if "arena" not in entry:
        return [entry["model"], entry["plan"], entry["refused"], *_WITHOUT * "-"]
    return [
        entry["model"],
        entry["plan"],
        entry["tensors"],
        mebibytes(entry["peak_bytes"]),
        *(f"{entry[name]:.4f}" for name in ("arena", "greedy_by_size", "best_fit_by_time", "cuda_reserved")),
        f"{entry['seconds']:.2f}",
    ]


_HEADINGS = (
    "model", "plan", "tensors", "peak (MiB)", "arena", "greedy by size", "best fit by time", "CUDA reserves", "s",
)  # fmt: skip
_WITHOUT = len(_HEADINGS) - 3


def _markdown(result: Result) -> str:
    laid_out = [entry for entry in result["steps"] if "arena" in entry]
    worst = max((entry["arena"] for entry in laid_out), default=1.0)
    at_bound = sum(entry["arena"] == entry["lower_bound"] for entry in laid_out)
    return common.page(
        "One arena for the whole step",
        result,
        f"Shares are of what the step allocates at its peak on `{result['device']}`. The largest arena is {worst:.4f} "
        f"of it; {at_bound} of {len(laid_out)} are proven to be as small as any.",
        common.table(_HEADINGS, [*map(_cells, result["steps"])]),
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
