"""Do predictions hold on a GPU? Allocated and reserved peak, overhead, and the largest batch.

For each model its operations are measured, then plans at several budgets are run, each in a
process of its own, so that the allocator starts empty: predicted against measured peak of
``torch.cuda.memory_allocated`` and ``memory_reserved``, predicted against measured overhead. Then
the largest batch that fits a part of the card is looked for, run, and one step more refused. What is
done is written at once; without a GPU nothing is run. Exit code 1 if an allocated peak is more than
0.5% from its prediction, a reserved one more than 3%, or an overhead more than 3 points away.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

import planner
from benchmarks import common
from benchmarks.cases import GPU_SIZES
from benchmarks.common import Result, mebibytes, percent
from planner import api, zoo
from planner.capture import fake_mode
from planner.errors import UsageError
from planner.plans.plan import NoPlanFitsError

ALLOCATED_GOAL, RESERVED_GOAL, OVERHEAD_GOAL = 0.005, 0.03, 0.03

MODELS = {name: GPU_SIZES[name] for name in ("gpt2-774m", "llama-7b", "bert-large", "vit-b16", "resnet152")}

LARGEST_OF, LARGEST_WITHIN_BYTES = "gpt2-774m", 24 * 2**30
"""The largest batch is looked for within what the process may have of the card."""

_WARM_UPS, _STEPS = 3, 10


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("gpu", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--budgets", metavar="PERCENT", type=common.ratios, default="85,65,45")
    parser.add_argument("--profile-seconds", metavar="S", type=float, default=20.0)
    parser.add_argument("--time-limit", metavar="S", type=float, default=5.0, help="for each solve (default: 5)")
    parser.add_argument("--seconds", metavar="S", type=float, default=500.0, help="nothing is begun after that")
    parser.add_argument("--case", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.case:
        case = json.loads(args.case)
        print(json.dumps(_largest_batch(case) if "cap_bytes" in case else _run_case(case)))
        return 0
    names = common.chosen(args.models, list(MODELS))
    common.check_destination(args.json)
    if not torch.cuda.is_available():
        raise UsageError("there is no GPU here: this benchmark runs on one, the others without")
    begun = time.perf_counter()
    total_bytes = torch.cuda.mem_get_info()[1]
    result: Result = {
        **common.environment("gpu", arguments),
        "gpu": torch.cuda.get_device_name(),
        "memory_bytes": total_bytes,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "rows": [],
        "largest_batch": None,
    }
    for name in names:
        for ratio in args.budgets:
            if time.perf_counter() - begun > args.seconds:
                common.progress(f"after {args.seconds:.0f} s, {name} at {percent(ratio, 0)} is left out")
                continue
            case = {"model": name, "ratio": ratio, "profile_seconds": args.profile_seconds, "limit": args.time_limit}
            row = _in_a_process(case)
            result["rows"].append(row)
            common.progress(" | ".join(map(str, _cells(row))))
            common.write(args.json, result, _markdown(result))
    if time.perf_counter() - begun < args.seconds:
        case = {"model": LARGEST_OF, "limit": args.time_limit, "cap_bytes": LARGEST_WITHIN_BYTES}
        result["largest_batch"] = _in_a_process(case)
        common.progress(_largest_line(result["largest_batch"]))
        common.write(args.json, result, _markdown(result))
    return 1 if any(_misses(row) for row in result["rows"]) else 0


def _in_a_process(case: Result) -> Result:
    """Run one case alone: an allocator that others have used has other segments."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--case", json.dumps(case)],
        cwd=common.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        reason = (ran.stderr.strip().splitlines() or ["no word"])[-1]
        return {**case, "status": "error", "error": reason}
    found: Result = json.loads(lines[-1])
    return found


def _run_case(case: Result) -> Result:
    """Profile, plan and run one model at one budget, on the GPU if there is one."""
    name = case["model"]
    row: Result = {"model": name, "ratio": case["ratio"], "sizes": case.get("sizes", MODELS.get(name, {}))}
    where = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = zoo.build(name, **row["sizes"], device=where)
    arguments = {"example_kwargs": loaded.example_kwargs, "loss_fn": loaded.loss_fn}
    profile = api.profile(
        loaded.model, loaded.example_args, **arguments, time_limit_seconds=case["profile_seconds"], name=name
    )
    try:
        plan = api.plan(
            loaded.model,
            loaded.example_args,
            **arguments,
            activation_budget=f"{100 * case['ratio']:g}%",
            profile=profile,
            time_limit_seconds=case["limit"],
            compare=False,
            name=name,
        )
    except NoPlanFitsError as error:
        return {**row, "status": "infeasible", "minimum_feasible_peak_bytes": error.minimum_feasible_peak_bytes}
    row |= {
        "status": plan.status,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
        "measured_operations": len(profile.measurements),
    }
    if plan.reserved is not None:
        row["predicted_allocated_bytes"] = plan.reserved.allocated_bytes
        row["predicted_reserved_bytes"] = plan.reserved.reserved_bytes
    del profile
    row |= _peaks(loaded, plan, where)
    verified = api.verify(loaded.model, loaded.example_args, plan, **arguments, timed_steps=_STEPS)
    return {**row, "measured_overhead": verified.overhead, "bitwise_equal": verified.exact}


def _peaks(loaded: zoo.ZooModel, plan: planner.Plan, where: str) -> Result:
    """Train a few steps under the plan and read the allocator's own counters."""
    model = api.auto_wrap(loaded.model, plan=plan)
    seconds = []
    try:
        if where == "cuda":
            torch.cuda.empty_cache()
        for number in range(_WARM_UPS + _STEPS):
            if number == _WARM_UPS and where == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            output = model(*loaded.example_args, **loaded.example_kwargs)
            (
                loaded.loss_fn(output) if loaded.loss_fn else output if torch.is_tensor(output) else output.loss
            ).backward()
            model.zero_grad(set_to_none=True)
            del output
            if where == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
    finally:
        planner.unwrap(model)
    found: Result = {"step_seconds": median(seconds[_WARM_UPS:])}
    if where == "cuda":
        found["measured_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["measured_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def _largest_batch(case: Result) -> Result:
    """Find the largest batch that a plan says fits, run it within the cap, and see the next one break it."""
    name, cap_bytes = case["model"], case["cap_bytes"]
    sizes = {key: size for key, size in MODELS[name].items() if key != "batch_size"}

    def planned(batch: int, budget: int | str) -> planner.Plan:
        fake = zoo.build(name, **sizes, batch_size=batch, device="cuda", fake_mode=fake_mode())
        return api.plan(
            fake.model,
            fake.example_args,
            example_kwargs=fake.example_kwargs,
            budget=budget,
            time_limit_seconds=case["limit"],
            compare=False,
        )

    def fits(batch: int) -> planner.Plan | None:
        try:
            plan = planned(batch, cap_bytes)
        except NoPlanFitsError:
            return None
        return plan if plan.reserved is None or plan.reserved.reserved_bytes <= cap_bytes else None

    low, high, best = 0, 64, None
    while high - low > 1:
        middle = (low + high) // 2
        plan = fits(middle)
        low, high, best = (middle, high, plan) if plan else (low, middle, best)
    torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.mem_get_info()[1])
    row: Result = {**case, "status": "run", "batch": low, "overhead": best.overhead if best else None}
    if best is not None:
        row |= _peaks(zoo.build(name, **sizes, batch_size=low, device="cuda"), best, "cuda")
    try:
        planned(high, cap_bytes)
        smallest_bytes = cap_bytes
    except NoPlanFitsError as error:
        smallest_bytes = error.minimum_feasible_peak_bytes
    try:
        _peaks(zoo.build(name, **sizes, batch_size=high, device="cuda"), planned(high, smallest_bytes), "cuda")
        row["next_batch"] = "fits too"
    except torch.OutOfMemoryError:
        row["next_batch"] = "out of memory"
    return row


def _largest_line(row: Result) -> str:
    if row["status"] == "error":
        return f"largest batch of {row['model']}: {row['error']}"
    return (
        f"Largest batch of {row['model']} within {mebibytes(row['cap_bytes'])} MiB: {row['batch']} "
        f"({percent(row['overhead'])} overhead, {mebibytes(row.get('measured_reserved_bytes'))} MiB reserved); "
        f"one more: {row['next_batch']}."
    )


def _misses(row: Result) -> bool:
    if row["status"] == "infeasible":
        return False
    if row["status"] == "error" or not row["bitwise_equal"]:
        return True
    return (
        abs(_ratio(row, "allocated")) > ALLOCATED_GOAL
        or abs(_ratio(row, "reserved")) > RESERVED_GOAL
        or abs(row["measured_overhead"] - row["predicted_overhead"]) > OVERHEAD_GOAL
        or row["measured_allocated_bytes"] > row["budget_bytes"]
    )


def _ratio(row: Result, kind: str) -> float:
    return float(row[f"measured_{kind}_bytes"] / row[f"predicted_{kind}_bytes"] - 1)


def _cells(row: Result) -> list[object]:
    start = [row["model"], percent(row["ratio"], 0)]
    if row["status"] == "infeasible":
        return [*start, f"smallest {mebibytes(row['minimum_feasible_peak_bytes'])}", *["-"] * 8]
    if row["status"] == "error":
        return [*start, row["error"][:80], *["-"] * 8]
    return [
        *start,
        mebibytes(row["predicted_allocated_bytes"]),
        mebibytes(row["measured_allocated_bytes"]),
        percent(_ratio(row, "allocated"), 2),
        mebibytes(row["predicted_reserved_bytes"]),
        mebibytes(row["measured_reserved_bytes"]),
        percent(_ratio(row, "reserved"), 2),
        percent(row["predicted_overhead"]),
        percent(row["measured_overhead"]),
        "equal" if row["bitwise_equal"] else "DIFFER",
    ]


def _markdown(result: Result) -> str:
    headings = ["model", "budget", "allocated, predicted", "measured", "difference", "reserved, predicted", "measured"]
    headings += ["difference", "overhead, predicted", "measured", "bits"]
    return common.page(
        "On a GPU",
        result,
        f"{result['gpu']}, {result['memory_bytes'] / 2**30:.1f} GiB, CUDA {result['cuda']}, cuDNN {result['cudnn']}. "
        "MiB of the whole device; budgets are shares of what the step allocates without recompute.",
        common.table(headings, [_cells(row) for row in result["rows"]]),
        _largest_line(result["largest_batch"]) if result["largest_batch"] else "The largest batch was not looked for.",
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
