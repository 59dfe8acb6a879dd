"""Does CUDA's allocator count in a planned step what the plan says? The whole zoo, with few layers, at two budgets.

Runs under a CUDA build of torch, on a GPU or under stand-ins (``tests/cuda/fakecuda``): kernels need not compute for
their memory to be right. Results of each version of torch, and of each setting of the allocator, stand beside each
other. Exit code 1 if an allocated peak is above its budget or more than 0.1% and 512 bytes for each tensor from its
prediction, or a reserved one more than 1%.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import planner
from benchmarks import common
from benchmarks.common import Result, mebibytes, percent
from planner import zoo
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError, PlannerError, UsageError

SIZES: dict[str, dict[str, Any]] = {
    "llama-7b": {"layers": 1, "batch_size": 1},
    "mixtral-1b": {"layers": 1},
}
"""In place of two layers."""

KINDS = ("requested", "allocated", "reserved")


def step(model: Any, example: Result) -> None:
    """Run a step that holds what the model returned to its end."""
    output = model(**example)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    model.zero_grad()


def counted(model: Any, example: Result) -> dict[str, int]:
    """Return the peaks of what the allocator counts in steps that follow the first."""
    step(model, example)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(model, example)
    stats = torch.cuda.memory_stats()
    return {kind: stats[f"{kind}_bytes.all.peak"] for kind in KINDS}


def built(name: str, **sizes: Any) -> tuple[Any, Result]:
    """Build a model and its inputs on the GPU, by way of the CPU: stand-ins compile no kernels that fill parameters."""
    made = zoo.build(name, **sizes)
    return made.model.to("cuda"), tree_map_only(torch.Tensor, lambda x: x.to("cuda"), made.example_kwargs)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("blocks", __doc__)
    parser.add_argument("--models", metavar="NAMES", help="with commas (default: the whole zoo)")
    parser.add_argument("--budgets", metavar="PERCENT", type=common.ratios, default="100,70")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    if not torch.cuda.is_available():
        raise UsageError("there is no GPU here, nor stand-ins for one: see tests/cuda/fakecuda")
    result = {**common.environment("blocks", arguments), "rows": []}
    under = [torch.__version__, torch.cuda.get_device_name(), os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")]
    with suppress(FileNotFoundError):
        earlier = json.loads(Path(args.json).read_text(encoding="utf-8"))["rows"]
        result["rows"] += [row for row in earlier if row["under"] != under or args.models]
    for name in args.models.split(",") if args.models else zoo.names():
        for row in rows(name, args.budgets):
            kept = [
                old
                for old in result["rows"]
                if [old[k] for k in ("under", "model", "budget")] != [under, name, row["budget"]]
            ]
            result["rows"] = [*kept, {"under": under, **row}]
            common.progress(", ".join(f"{key} {value}" for key, value in row.items()))
            common.write(args.json, result, _markdown(result))
    return 1 if any(map(_misses, result["rows"])) else 0


def rows(name: str, budgets: Sequence[float]) -> Iterator[Result]:
    """Train one model under a plan for each budget."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # the next plan counts them
    torch.cuda.empty_cache()
    left_bytes = torch.cuda.memory_allocated()
    model, example = built(name, **SIZES.get(name, {"layers": 2}))
    for budget in budgets:
        row: Result = {"model": name, "budget": f"{100 * budget:.0f}%"}
        try:
            plan = _wrapped(model, example, row["budget"])
            assert plan.reserved is not None
            said = (plan.peak_bytes, plan.reserved.allocated_bytes, plan.reserved.reserved_bytes)
            row |= {f"predicted_{kind}_bytes": size for kind, size in zip(KINDS, said, strict=True)}
            row |= {f"measured_{kind}_bytes": size - left_bytes for kind, size in counted(model, example).items()}
            row |= {"budget_bytes": plan.budget_bytes, "tensors": len(plan.operations) + len([*model.parameters()])}
        except Exception as error:  # the next budget, or model, is to run all the same
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        with suppress(PlannerError):
            planner.unwrap(model)
        yield row


def _wrapped(model: Any, example: Result, budget: str) -> planner.Plan:
    options: Result = {"runtime": "graph", "time_limit_seconds": 1, "cost_model": "roofline"}
    try:
        planner.auto_wrap(model, example, **grouped(budget=budget, **options))
    except InfeasibleBudgetError as refusal:  # little of so small a model can be recomputed
        planner.auto_wrap(model, example, **grouped(budget=refusal.minimum_feasible_peak_bytes, **options))
    return planner.plan_of(model)


def _off(row: Result, kind: str) -> float:
    return float(row[f"measured_{kind}_bytes"] / row[f"predicted_{kind}_bytes"] - 1)


def _misses(row: Result) -> bool:
    if "error" in row or row["measured_allocated_bytes"] > row["budget_bytes"]:
        return True
    apart_bytes = abs(row["measured_allocated_bytes"] - row["predicted_allocated_bytes"])
    too_far = apart_bytes > max(1e-3 * row["predicted_allocated_bytes"], 512 * row["tensors"])
    return too_far or abs(_off(row, "reserved")) > 0.01


def _markdown(result: Result) -> str:
    parts = ["Kernels that do nothing, allocators that are torch's own: no figure here is one of a real GPU's time."]
    for under in dict.fromkeys(tuple(row["under"]) for row in result["rows"]):
        mine = [row for row in result["rows"] if tuple(row["under"]) == under]
        able = [row for row in mine if "error" not in row]
        parts.append(f"## torch {under[0]}, {under[1]}{f', `{under[2]}`' if under[2] else ''}")
        if able:
            most = {kind: max(abs(_off(row, kind)) for row in able) for kind in KINDS}
            parts.append("Largest error: " + ", ".join(f"{kind} {percent(off, 3)}" for kind, off in most.items()) + ".")
        cells = [[f"{r['model']}, {r['budget']}", *_cells(r)] for r in mine]
        parts.append(common.table(["", "asked for, MiB", "off", "allocated", "off", "reserved", "off"], cells))
    return common.page("What CUDA's allocator counts", result, *parts)


def _cells(row: Result) -> list[str]:
    if "error" in row:
        return [row["error"].replace("|", "/")[:80], *["-"] * 5]
    pairs = ((mebibytes(row[f"measured_{kind}_bytes"]), percent(_off(row, kind), 3)) for kind in KINDS)
    return [cell for pair in pairs for cell in pair]


if __name__ == "__main__":
    sys.exit(common.run(main))
