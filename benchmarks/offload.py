"""What does offload save? Fourteen models at the peaks of usual checkpointing, planned for two GPUs that are not here.

Each peak is the budget of two plans under one time limit: recompute alone, and ``offload="auto"``. Times are those of
data sheets. Exit code 1 if a plan that may offload costs more, or the mean ratio of overheads is above 0.5.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import planner
from benchmarks import common
from benchmarks.common import Result, percent
from planner import zoo
from planner.capture import fake_mode
from planner.errors import PlannerError, UsageError

DEVICES = {"h200": (1, "256GiB"), "rtx-4090": (8, "32GiB")}
"""By what batches are divided on each, and what offload may take of the host's memory."""
PEAKS = {"every-layer": "every layer", "every-2": "every second layer", "selective": "saved products"}
SIZES: dict[str, dict[str, Any]] = {
    "minigpt": {"batch_size": 64, "seq_len": 1024, "dtype": "bfloat16"},
    "gpt2": {"batch_size": 32, "seq_len": 1024, "dtype": "bfloat16"},
    "gpt2-774m": {"batch_size": 8, "seq_len": 1024, "dtype": "bfloat16"},
    "llama-7b": {"batch_size": 4, "seq_len": 2048, "layers": 8, "dtype": "bfloat16"},
    "minimind-26m": {"batch_size": 64, "seq_len": 2048, "dtype": "bfloat16"},
    "mixtral-1b": {"batch_size": 4, "seq_len": 2048, "dtype": "bfloat16"},
    "bert-large": {"batch_size": 64, "seq_len": 512, "dtype": "bfloat16"},
    "t5-base": {"batch_size": 32, "seq_len": 512, "dtype": "bfloat16"},
    "vit-b16": {"batch_size": 256, "image_size": 224, "dtype": "bfloat16"},
    "resnet50": {"batch_size": 256, "image_size": 224, "dtype": "bfloat16"},
    "resnet152": {"batch_size": 192, "image_size": 224, "dtype": "bfloat16"},
    "convnext-tiny": {"batch_size": 256, "image_size": 224, "dtype": "bfloat16"},
    "unet": {"batch_size": 16, "image_size": 512, "dtype": "bfloat16"},
    "qwen3-0.6b": {"batch_size": 16, "seq_len": 2048, "dtype": "bfloat16"},
}
"""Sizes at which a step without recompute takes tens of GiB."""
GOAL, LEAST = 0.5, 1e-3
"""Of the mean ratio; and how much recompute must cost for a row to count, and what others count for at least."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("offload", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(SIZES)} (default: all)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=6.0, help="for each plan (default: 6)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    result: Result = {**common.environment("offload", arguments), "rows": []}
    for device in DEVICES:
        for name in common.chosen(args.models, list(SIZES)):
            for row in _rows(name, device, args.time_limit):
                common.progress(" | ".join(map(str, _cells(row))))
                result["rows"].append(row)
            common.write(args.json, result, _page(result))
    return 1 if _ratio(result["rows"]) > GOAL or any(row["auto"] > row["alone"] for row in result["rows"]) else 0


def _rows(name: str, device: str, seconds: float) -> Iterator[Result]:
    (divided, host_budget), sizes = DEVICES[device], SIZES[name]
    with fake_mode():
        loaded = zoo.build(name, **sizes | {"batch_size": max(1, sizes["batch_size"] // divided)})
    target = planner.Target(device, cost_model="roofline")
    study = planner.study(loaded.model, loaded.example_kwargs, loss_fn=loaded.loss_fn, target=target)
    search = planner.Search(time_limit_seconds=seconds, compare=False)
    for strategy in PEAKS:
        try:
            budget = study.as_plan(study.strategy(strategy), strategy).budget_bytes
            plans = [study.plan(budget, search=search, offload=offload) for offload in _asked(host_budget)]
        except (UsageError, PlannerError) as error:
            common.progress(f"{name} on {device} at the peak of {strategy}: {error}")
            continue
        alone, auto = plans
        yield {
            "device": device, "model": name, "peak": PEAKS[strategy], "budget_bytes": budget,
            "alone": alone.overhead, "alone_bound": alone.lower_bound_overhead,
            "auto": auto.overhead, "auto_bound": auto.lower_bound_overhead,
            "host_bytes": auto.offloading.host_bytes if auto.offloading else 0,
        }  # fmt: skip


def _asked(host_budget: str) -> tuple[Any, ...]:
    return False, planner.Offload("auto", host_budget=host_budget)


def _ratio(rows: Sequence[Result]) -> float:
    return geometric_mean([max(row["auto"], LEAST) / row["alone"] for row in rows if row["alone"] > LEAST] or [1.0])


def _cells(row: Result) -> list[object]:
    sizes = [f"{row[key] / 2**30:.2f}" for key in ("budget_bytes", "host_bytes")]
    shares = [percent(row[key], 2) for key in ("alone", "alone_bound", "auto", "auto_bound")]
    return [row["device"], row["model"], row["peak"], *sizes, *shares]


def _page(result: Result) -> str:
    rows = result["rows"]
    said = [
        f"{device}: {_ratio(own):.2f} of the overhead of recompute alone (geometric mean), plans at most "
        f"{percent(max(row['auto'] - row['auto_bound'] for row in own), 2)} of the step above their bounds."
        for device in DEVICES
        if (own := [row for row in rows if row["device"] == device])
    ]
    note = (
        "Overheads are over the captured step without recompute. Means are over peaks at which recompute costs more "
        "than 0.1%, and take no overhead for less."
    )
    head = ["device", "model", "peak of", "budget, GiB", "offloaded, GiB", "alone", "bound", "auto", "bound"]
    return common.page("Offload", result, *said, note, common.table(head, [_cells(row) for row in rows]))


if __name__ == "__main__":
    sys.exit(common.run(main))
