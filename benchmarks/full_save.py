"""What does a captured step without recompute need, of eager's memory and time? Every zoo model, and others beside it.

Both are run in turn, without a budget: what capture adds is paid by every plan. Exit code 1 if a step needs more than
eager's peak or over 1.02 of its time, if the geometric mean of times is above 1, or if a gradient differs by a bit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from statistics import geometric_mean

from benchmarks import common
from benchmarks.cases import ARCHITECTURES, CASES, build
from benchmarks.common import Result, mebibytes
from benchmarks.steps import without_recompute
from planner.errors import PlannerError
from planner.zoo import ZooModel

PEAK_GOAL, TIME_GOAL, MEAN_TIME_GOAL = 1.0, 1.02, 1.0


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("full_save", __doc__, resumes=True)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--seconds", metavar="S", type=float, default=8.0, help="for timing each model (default: 8)")
    args = parser.parse_args(arguments)
    common.keep_memory()
    common.check_destination(args.json)
    done = common.earlier("full_save", args.json).get("models", []) if args.resume else []
    kept = {entry["model"]: entry for entry in done}
    result: Result = {**common.environment("full_save", arguments), "models": []}
    for name in common.chosen(args.models, list(CASES)):
        entry = kept.get(name) or {"model": name, **_found(build(name), args.seconds)}
        common.progress(" ".join(map(str, _cells(entry))))
        result["models"].append(entry)
        common.write(args.json, result, _markdown(result)) if args.json != "-" else None
        gc.collect()
    if args.json == "-":
        common.write("-", result, "")
    run = _run(result)
    return 1 if len(run) < len(result["models"]) or any(map(_missed, run)) or _mean_time(run) > MEAN_TIME_GOAL else 0


def _found(loaded: ZooModel, limit_seconds: float) -> Result:
    try:
        return without_recompute(loaded, "graph", limit_seconds)
    except PlannerError as error:
        return {"status": "refused", "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _run(result: Result) -> list[Result]:
    return [entry for entry in result["models"] if entry["status"] == "run"]


def _missed(entry: Result) -> bool:
    held = entry["peak_ratio"] <= PEAK_GOAL + 5e-5 and entry["time_ratio"] <= TIME_GOAL
    return not (held and entry["bitwise_equal"])


def _mean_time(entries: Sequence[Result]) -> float:
    return geometric_mean([entry["time_ratio"] for entry in entries] or [1.0])


def _cells(entry: Result) -> list[object]:
    if entry["status"] != "run":
        return [entry["model"], entry["reason"], "-", "-", "-", "-"]
    return [
        entry["model"], mebibytes(entry["eager_peak_bytes"]), f"{1e3 * entry['eager_seconds']:.0f}",
        f"{entry['peak_ratio']:.4f}", f"{entry['time_ratio']:.3f}", "yes" if entry["bitwise_equal"] else "no",
    ]  # fmt: skip


def _markdown(result: Result) -> str:
    run = _run(result)
    own, others = ([e for e in run if (e["model"] in ARCHITECTURES) is other] for other in (False, True))
    parts = [
        f"{len(entries)} {what}: {geometric_mean([e['peak_ratio'] for e in entries]):.3f} of eager's peak and "
        f"{_mean_time(entries):.3f} of its time (geometric means); no more than its peak in "
        f"{sum(e['peak_ratio'] <= PEAK_GOAL + 5e-5 for e in entries)}, at most {TIME_GOAL} of its time in "
        f"{sum(e['time_ratio'] <= TIME_GOAL for e in entries)}, bits equal in "
        f"{sum(e['bitwise_equal'] for e in entries)}."
        for what, entries in (("models of the zoo and near it", own), ("others", others))
        if entries
    ]
    headings = ["model", "eager MiB", "eager ms", "peak, of eager's", "time, of eager's", "bits equal"]
    note = "Ratios of times are medians of pairs, which on a machine that is shared vary by several points."
    rows = [_cells(entry) for entry in result["models"]]
    return common.page("Without recompute, against eager", result, *parts, note, common.table(headings, rows))


if __name__ == "__main__":
    sys.exit(common.run(main))
