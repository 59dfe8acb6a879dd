"""Do planned steps keep their budget, to the byte and to the bit? Every zoo model, real steps.

For each model and budget: predicted against measured peak of the whole step, measured peak
against the budget, predicted against measured overhead, and whether loss, gradients, buffers and
random state are those of the step without recompute, bit for bit. A budget that no plan fits is
answered with the smallest feasible one, which is then run instead. Exit code 1 if a measured peak
is above its budget or a bit differs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import common
from benchmarks.common import Result, mebibytes, percent
from planner import api, zoo
from planner.errors import PlannerError
from planner.plans.plan import NoPlanFitsError, Plan
from planner.zoo import ZooModel

SIZES: dict[str, dict[str, Any]] = {
    "minigpt": {"batch_size": 2, "layers": 6, "seq_len": 512},
    "minimind-26m": {"batch_size": 4, "layers": 8, "seq_len": 512},
    "minimind-104m": {"batch_size": 2, "layers": 8, "seq_len": 512},
    "minimind-moe": {"batch_size": 2, "layers": 4, "seq_len": 512},
    "gpt2": {"batch_size": 2, "layers": 4, "seq_len": 512},
    "gpt2-774m": {"batch_size": 2, "layers": 2, "seq_len": 256},
    "llama-7b": {"batch_size": 2, "layers": 1, "seq_len": 256, "dtype": "bfloat16"},
    "bert-large": {"batch_size": 4, "layers": 4, "seq_len": 256},
    "vit-b16": {"batch_size": 8, "layers": 6, "image_size": 224},
    "resnet50": {"batch_size": 16, "layers": 6, "image_size": 128},
    "resnet152": {"batch_size": 8, "layers": 36, "image_size": 128},
}
"""Sizes at which a step takes seconds on two cores, and needs less than 10 GiB."""

PEAK_GOAL = 1e-3
"""How far measured and predicted peak may be apart, as a ratio, in models without convolutions."""

CONVOLUTIONS = ("vit-b16", "resnet50", "resnet152")

DOMINATED = 0.5
"""Above this share of parameters and gradients in the unplanned peak, activation budgets are run as well."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("exactness", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(SIZES)} (default: all)")
    parser.add_argument("--budgets", metavar="PERCENT", type=common.ratios, default="80,60,40,30")
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="timed steps each way (default: 5)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=30.0, help="for each solve (default: 30)")
    parser.add_argument("--layers", metavar="N", type=int, help="in place of each model's own")
    parser.add_argument("--seq-len", metavar="N", type=int, help="in place of each model's own, where it has one")
    parser.add_argument("--batch-size", metavar="N", type=int, help="in place of each model's own")
    parser.add_argument("--resume", action="store_true", help="keep the rows that FILE has of this torch version")
    args = parser.parse_args(arguments)
    names = common.chosen(args.models, list(SIZES))
    common.check_destination(args.json)
    earlier = common.earlier("exactness", args.json).get("rows", []) if args.resume else []
    done = [row for row in earlier if row["status"] != "error"]  # errors are run again
    result = {**common.environment("exactness", arguments), "rows": []}
    for name in names:
        sizes = _sizes(name, args)
        for row in _rows(name, sizes, args, done):
            result["rows"].append(row)
            common.progress(_line(row))
            if args.json != "-":
                common.write(args.json, result, _markdown(result))
    if args.json == "-":
        common.write("-", result, "")
    return 1 if any(map(_broken, result["rows"])) else 0


def _sizes(name: str, args: argparse.Namespace) -> dict[str, Any]:
    given = {"layers": args.layers, "seq_len": args.seq_len, "batch_size": args.batch_size}
    return {size: given.get(size) or value for size, value in SIZES[name].items()}


def _rows(name: str, sizes: dict[str, Any], args: argparse.Namespace, done: Sequence[Result]) -> Iterator[Result]:
    """Return one row for each budget of a model; what is infeasible adds one at the smallest feasible budget."""
    common.progress(f"{name}: {common.sizes_text(sizes)}")
    loaded = zoo.build(name, **sizes)
    case = {"model": name, "sizes": sizes}
    unplanned = _plan(loaded, {"budget": sys.maxsize}, args)
    share = 2 * unplanned.static_bytes["parameters"] / unplanned.baseline_peak_bytes
    kinds = ["budget", "activation_budget"] if share > DOMINATED else ["budget"]
    smallest_bytes = sys.maxsize
    for kind in kinds:
        for ratio in args.budgets:
            row = _row({**case, "kind": kind, "ratio": ratio}, loaded, {kind: f"{100 * ratio:g}%"}, args, done)
            if row["status"] == "infeasible":
                smallest_bytes = min(smallest_bytes, row["minimum_feasible_peak_bytes"])
            yield row
    if smallest_bytes < sys.maxsize:
        yield _row({**case, "kind": "smallest feasible", "ratio": None}, loaded, {"budget": smallest_bytes}, args, done)
    del loaded
    gc.collect()


def _row(
    case: Result, loaded: ZooModel, budget: dict[str, Any], args: argparse.Namespace, done: Sequence[Result]
) -> Result:
    for row in done:
        if case.items() <= row.items():
            return row
    try:
        plan = _plan(loaded, budget, args)
        row = {**case, **_predicted(plan)}
        verification = api.verify(
            loaded.model,
            loaded.example_args,
            plan,
            example_kwargs=loaded.example_kwargs,
            loss_fn=loaded.loss_fn,
            timed_steps=args.steps,
        )
    except NoPlanFitsError as error:
        return {
            **case,
            "status": "infeasible",
            "budget_bytes": error.report["budget_bytes"],
            "minimum_feasible_peak_bytes": error.minimum_feasible_peak_bytes,
        }
    except (PlannerError, RuntimeError) as error:
        return {**case, "status": "error", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    measured = {
        "measured_peak_bytes": verification.peak_bytes,
        "measured_baseline_peak_bytes": verification.baseline_peak_bytes,
        "measured_overhead": verification.overhead,
        "bitwise_equal": verification.exact,
        "differences": list(verification.differences),
        "steps": verification.steps,
    }
    return {**row, **measured}


def _plan(loaded: ZooModel, budget: dict[str, Any], args: argparse.Namespace) -> Plan:
    return api.plan(
        loaded.model,
        loaded.example_args,
        example_kwargs=loaded.example_kwargs,
        loss_fn=loaded.loss_fn,
        time_limit_seconds=args.time_limit,
        name=loaded.name,
        compare=False,
        **budget,
    )


def _predicted(plan: Plan) -> Result:
    return {
        "status": plan.status,
        "solver": plan.solver,
        "budget_bytes": plan.budget_bytes,
        "static_bytes": plan.total_static_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
    }


def _broken(row: Result) -> bool:
    """Whether a row breaks the promise."""
    if row["status"] == "infeasible":
        return bool(row["kind"] == "smallest feasible")
    if row["status"] == "error":
        return True
    return not row["bitwise_equal"] or bool(row["measured_peak_bytes"] > row["budget_bytes"])


def _difference(row: Result) -> float:
    measured: int = row["measured_peak_bytes"]
    predicted: int = row["predicted_peak_bytes"]
    return (measured - predicted) / predicted


def _budget(row: Result) -> str:
    kinds = {"budget": "of the device", "activation_budget": "of activations"}
    return f"{100 * row['ratio']:g}% {kinds[row['kind']]}" if row["ratio"] else row["kind"]


def _line(row: Result) -> str:
    start = f"{row['model']}, {_budget(row)}: "
    if row["status"] == "infeasible":
        return f"{start}no plan fits, smallest feasible {mebibytes(row['minimum_feasible_peak_bytes'])} MiB"
    if row["status"] == "error":
        return f"{start}{row['error']}"
    verdict = "BROKEN" if _broken(row) else "kept"
    return (
        f"{start}{verdict}, {mebibytes(row['measured_peak_bytes'])} of {mebibytes(row['budget_bytes'])} MiB, "
        f"measured - predicted {row['measured_peak_bytes'] - row['predicted_peak_bytes']:+,} B, "
        f"overhead {percent(row['predicted_overhead'])} predicted, {percent(row['measured_overhead'])} measured, "
        f"{'bits equal' if row['bitwise_equal'] else row['differences'][0]}"
    )


def _markdown(result: Result) -> str:
    rows = result["rows"]
    run = [row for row in rows if "measured_peak_bytes" in row]
    sizes = {row["model"]: common.sizes_text(row["sizes"]) for row in rows}
    far = [row for row in run if row["model"] not in CONVOLUTIONS and abs(_difference(row)) > PEAK_GOAL]
    summary = (
        f"{len(run)} budgets run, {sum(row['status'] == 'infeasible' for row in rows)} infeasible, "
        f"{sum(map(_broken, rows))} broken. Without convolutions "
        f"{len(far)} peaks are more than {percent(PEAK_GOAL)} from the prediction."
    )
    parts = [
        summary,
        "MiB of the whole device; overhead is step time over that of the step without recompute, less one.",
        common.table(
            [
                "model",
                "budget",
                "allowed",
                "predicted peak",
                "measured peak",
                "difference",
                "least overhead",
                "predicted overhead",
                "measured overhead",
                "bits",
            ],
            [_cells(row) for row in rows],
        ),
        common.table(["model", "sizes"], list(sizes.items())),
    ]
    return common.page("Exactness", result, *parts)


def _cells(row: Result) -> list[object]:
    start = [row["model"], _budget(row), mebibytes(row.get("budget_bytes"))]
    if row["status"] == "infeasible":
        return [*start, "no plan fits", f"smallest {mebibytes(row['minimum_feasible_peak_bytes'])}", *["-"] * 5]
    if row["status"] == "error":
        return [*start, row["error"].split(":")[0], *["-"] * 6]
    return [
        *start,
        mebibytes(row["predicted_peak_bytes"]),
        mebibytes(row["measured_peak_bytes"]) + (" OVER" if row["measured_peak_bytes"] > row["budget_bytes"] else ""),
        percent(_difference(row), 4),
        percent(row["lower_bound_overhead"]),
        percent(row["predicted_overhead"]),
        percent(row["measured_overhead"]),
        "equal" if row["bitwise_equal"] else "DIFFER",
    ]


if __name__ == "__main__":
    sys.exit(common.run(main))
