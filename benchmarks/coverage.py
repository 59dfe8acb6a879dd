"""What can be planned? Hand-written models and every model family of installed libraries, each in its own process.

Each is planned for 60% of what its eager step allocates, takes two optimizer steps beside eager and five measured ones.
Exit code 1 if gradients are wrong, a step breaks its budget without a warning, or anything but an error of ours is
raised. What eager cannot train as it is built here is listed, and does not count.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from benchmarks import common
from benchmarks.common import Result, mebibytes, percent
from benchmarks.libraries import LIBRARIES, absent, architectures
from benchmarks.trial import TOLERANCE, Case, run

PRELOADED = [
    "torch", "torch._dynamo", *LIBRARIES, "planner.api", "planner.runtimes.auto", "highspy", "benchmarks.trial",
]  # fmt: skip
"""What every process needs, imported once; what is not installed is passed over."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("coverage", __doc__, resumes=True)
    parser.add_argument("--models", metavar="NAMES", help="with commas, or how they begin, as module/ (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: 1)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="for each model (default: 120)")
    parser.add_argument("--gib", type=float, default=8.0, help="address space of each process (default: 8)")
    parser.add_argument("--time-limit", type=float, default=1.0, metavar="S", help="of each solve (default: 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further model after so long")
    args = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    common.check_destination(args.json)
    known = architectures()
    names = _chosen(args.models, list(known))
    done = common.earlier("coverage", args.json).get("models", []) if args.resume else []
    result: Result = {
        **common.environment("coverage", arguments), "threads": 1, "known": len(known), "absent": absent(),
        "models": [row for row in done if row["model"] in known],
    }  # fmt: skip
    kept = {row["model"] for row in result["models"]}
    result["kept"] = len(kept)
    until = time.monotonic() + 60 * args.minutes
    limits = (args.limit, args.time_limit, round(args.gib * 2**30))
    for row in _rows({name: known[name] for name in names if name not in kept}, args.jobs, limits, until):
        common.progress(" | ".join(map(str, _cells(row))))
        result["models"].append(row)
        common.write(args.json, result, _markdown(result)) if args.json != "-" else None
    common.write(args.json, result, _markdown(result))
    return 1 if any(map(failures, result["models"])) else 0


def _chosen(wanted: str | None, known: Sequence[str]) -> list[str]:
    """Read names with commas; one that ends in a slash is all that begin so."""
    parts = (wanted or "").split(",")
    whole = [name for part in parts if part.endswith("/") for name in known if name.startswith(part)]
    single = ",".join(part for part in parts if not part.endswith("/"))
    return [*whole, *common.chosen(single if wanted is not None else None, known)]


# Processes.


def _rows(
    cases: dict[str, Callable[[], Case]], jobs: int, limits: tuple[float, float, int], until: float
) -> Iterator[Result]:
    """Run all in processes, some at once, and give what comes of each as it ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ahead = iter(cases.items())
    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future[Result]] = set()
        while True:
            while len(running) < jobs and time.monotonic() < until and (case := next(ahead, None)):
                running.add(pool.submit(_row, context, *case, limits))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in ended)


def _row(context: object, name: str, make: Callable[[], Case], limits: tuple[float, float, int]) -> Result:
    seconds, seconds_to_solve, most_bytes = limits
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found, errors = Path(folder) / "row.json", Path(folder) / "errors"
        given = (make, str(found), str(errors), seconds_to_solve, most_bytes)
        process = context.Process(target=run, args=given)  # type: ignore[attr-defined]
        process.start()
        process.join(seconds)
        if late := process.is_alive():
            process.kill()
            process.join()
        if found.exists():
            row: Result = json.loads(_without_places(found.read_text()))
        else:
            reason = f"not done after {seconds:g} s" if late else f"the process ended with exit code {process.exitcode}"
            said = _without_places(errors.read_text(errors="replace")[-2000:]) if errors.exists() else ""
            row = {"status": "late" if late else "crashed", "reason": reason, "errors": said}
    return {"model": name, **row, "seconds": round(time.perf_counter() - begun, 1)}


def _without_places(text: str) -> str:
    """Leave out of a text where on this machine libraries and this project are."""
    return re.sub(r"/[^\s\"'():]*/(?:site-packages|python3\.\d+)/", "", text).replace(f"{common.ROOT}/", "")


# Verdicts.


def failures(row: Result) -> list[str]:
    """Say what is wrong with what came of a model."""
    found = []
    if row["status"] == "crashed":
        found.append(f"crashed: {row['reason']}")
    if row.get("wrong") and row["eager_repeats_itself"]:
        found.append(f"unlike eager: {row['wrong'][0]}")
    if over := [step for step in row.get("steps", []) if step["measured_bytes"] > step["budget_bytes"]]:
        worst = max(step["measured_bytes"] / step["budget_bytes"] for step in over)
        if not _warned(row):
            found.append(f"{len(over)} steps over the budget, by up to {percent(worst - 1)}, and no warning")
    if row.get("touched"):
        found.append(f"planning changed the model: {row['touched'][0]}")
    if "Traceback" in row.get("errors", "") and row["status"] != "crashed":
        found.append("a traceback on standard error")
    return found


def _warned(row: Result) -> bool:
    """Whether a step over the budget was announced."""
    return any("budget" in warning for warning in row.get("warnings", []))


def _summary(rows: Sequence[Result]) -> list[tuple[str, int]]:
    counted = [row for row in rows if row["status"] != "invalid"]
    ran = [row for row in counted if row["status"] == "run"]
    over = [r for r in ran if any(s["measured_bytes"] > s["budget_bytes"] for s in r["steps"])]
    runtimes = Counter(row["runtime"] for row in ran)
    return [
        ("architectures", len(counted)),
        *((f"run by {name}", count) for name, count in runtimes.most_common()),
        ("with 90% and more of what is saved in graphs", sum(row["captured_share"] >= 0.9 for row in ran)),
        ("refused", sum(row["status"] == "refused" for row in counted)),
        ("crashed", sum(row["status"] == "crashed" for row in counted)),
        ("not done in time", sum(row["status"] == "late" for row in counted)),
        ("bits equal to eager's", sum(row["bitwise_equal"] for row in ran)),
        ("drew random numbers otherwise than eager", sum("drew_otherwise" in row for row in ran)),
        ("wrong", sum(bool(row["wrong"]) and row["eager_repeats_itself"] for row in ran)),
        ("60% fits", sum("infeasible" not in row for row in ran)),
        ("peak within 0.1% of prediction", sum(_off(row) <= 0.001 for row in ran)),
        ("peak within 1% of prediction", sum(_off(row) <= 0.01 for row in ran)),
        ("over budget in a step", len(over)),
        ("over budget without a warning", sum(not _warned(row) for row in over)),
        ("eager does not train as built here, not counted", len(rows) - len(counted)),
    ]


def _of_prediction(row: Result) -> float:
    """Return the highest of the measured peaks over the highest predicted one, both rounded up as plans do."""
    measured = max(step.get("rounded_bytes", step["measured_bytes"]) for step in row["steps"])
    return float(measured / max(step["predicted_bytes"] for step in row["steps"]))


def _off(row: Result) -> float:
    return abs(_of_prediction(row) - 1)


def _cells(row: Result) -> list[object]:
    if row["status"] != "run":
        return [row["model"], row["status"], "-", "-", "-", "-", "-", "-", f"{row['seconds']:.0f}"]
    steps, eager_bytes = row["steps"], row["eager_peak_bytes"]
    of_budget = max(step["measured_bytes"] / step["budget_bytes"] for step in steps)
    return [
        row["model"], row["runtime"], percent(row["smallest_bytes"] / eager_bytes),
        f"{percent(row['overhead'])} ({percent(row['lower_bound_overhead'])})",
        "yes" if row["bitwise_equal"] else f"{row['distance']:.1g}", mebibytes(eager_bytes),
        f"{_of_prediction(row):.3f}", f"{of_budget:.3f}" + ("" if "infeasible" not in row else " *"),
        f"{row['seconds_to_plan']:.1f}",
    ]  # fmt: skip


def _markdown(result: Result) -> str:
    rows = sorted(result["models"], key=lambda row: row["model"])
    here = f"{len(rows)} of {result['known']} known names were run. "
    if result["kept"]:
        here += f"{result['kept']} of these rows are of earlier runs with the same file, of the code as it was then. "
    missing = f"Not installed, so nothing of them: {', '.join(result['absent'])}." if result["absent"] else ""
    legend = (
        "Smallest peak is of eager's. Overheads are predicted, at 60% of what eager's step allocates (the proven bound "
        "beside it), or at the smallest budget that fits where that does not (*). Bits: loss, gradients, buffers and "
        "random states of two optimizer steps, or the largest difference as a share of the length. Measured peaks are "
        "the largest of five steps on new data; beside the prediction, each allocation is rounded up to 64 bytes, as "
        f"plans count it. A failure is a difference above {TOLERANCE:g}, a step over its budget without a warning, or "
        "an exception."
    )
    headings = [
        "model", "runtime", "smallest", "overhead", "bits equal", "eager MiB", "of prediction", "of budget",
        "plan s",
    ]  # fmt: skip
    counted = [row for row in rows if row["status"] != "invalid"]
    parts = [
        here + missing,
        common.table(["", "count"], _summary(rows)),
        legend,
        common.table(headings, [_cells(row) for row in counted]),
        _listed("Failures", ((row, "; ".join(failures(row))) for row in counted if failures(row))),
        _listed("Refused", ((row, row["reason"]) for row in counted if row["status"] == "refused")),
        _listed(
            "Not captured", ((row, row["reason"]) for row in counted if row.get("reason") and row["status"] == "run")
        ),
        _listed("Warnings", ((row, "; ".join(row["warnings"])) for row in counted if row.get("warnings"))),
        _listed("Eager does not train", ((row, row["reason"]) for row in rows if row["status"] == "invalid")),
    ]
    return common.page("Architectures that can be planned", result, *(part for part in parts if part))


def _listed(title: str, lines: Iterator[tuple[Result, str]]) -> str:
    shown = "\n".join(f"- {row['model']}: {' '.join(text.split())}" for row, text in lines)
    return f"## {title}\n\n{shown}" if shown else ""


if __name__ == "__main__":
    sys.exit(common.run(main))
