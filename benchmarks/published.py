"""Published figures of activation checkpointing, compared with predictions for the stated settings.

For each figure: the peak without recompute, with every layer checkpointed, and what a plan adds
at that peak. No GPU is needed; device times are those of a roofline. Writes ``docs/published-figures.md``.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Result, percent
from planner import Inputs, api, zoo
from planner.capture import fake_mode
from planner.common.atomic import check_writable, write_text
from planner.common.options import grouped
from planner.plans.plan import Plan

PAGE = common.ROOT / "docs" / "published-figures.md"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published pair of figures, and the setting in which it is predicted.

    Parameters
    ----------
    name : str
    model : str
        Of the zoo.
    sizes : dict
        Batch, lengths, dtype.
    device : str
    published : str
        Memory without and with checkpointing, and time, as published.
    stated, assumed : str
        What the source says of its setting, and what was taken where it says nothing.
    finding : str
        Whether the figure is plausible.
    training : dict
        Optimizer and master weights.
    """

    name: str
    model: str
    sizes: dict[str, Any]
    device: str
    published: str
    stated: str
    assumed: str
    finding: str
    training: dict[str, Any] = field(default_factory=lambda: {"optimizer": "adamw"})


FIGURES = tuple(
    Figure(**figure) for figure in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["figure"]
)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("published", __doc__)
    parser.add_argument("--figures", metavar="NAMES", help="with commas (default: all)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=10.0, help="for each solve (default: 10)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    check_writable(PAGE)
    chosen = common.chosen(args.figures, [figure.name for figure in FIGURES])
    result: Result = {**common.environment("published", arguments), "rows": []}
    for figure in FIGURES:
        if figure.name in chosen:
            result["rows"].append(_row(figure, args.time_limit))
            common.progress(" | ".join(map(str, _cells(result["rows"][-1]))))
    common.write(args.json, result, _markdown(result))
    if args.json != "-" and len(result["rows"]) == len(FIGURES):
        write_text(PAGE, _markdown(result))
    return 0


def _row(figure: Figure, limit_seconds: float) -> Result:
    free = _plan(figure, {"budget": "1TiB"}, limit_seconds, compare=True)
    every = next(row for row in free.baselines if row.name == "every layer")
    row: Result = {
        "figure": figure.name, "published": figure.published, "stated": figure.stated, "assumed": figure.assumed,
        "finding": figure.finding, "model": figure.model, "sizes": figure.sizes, "device": figure.device,
        "peak_bytes": free.baseline_peak_bytes, "optimizer_peak_bytes": free.optimizer_peak_bytes,
        "static_bytes": free.total_static_bytes, "step_seconds": free.baseline_step_seconds,
        "every_layer_peak_bytes": every.peak_bytes, "every_layer_overhead": every.overhead,
    }  # fmt: skip
    if every.peak_bytes is None:
        return row
    plan = _plan(figure, {"budget": max(every.peak_bytes, free.optimizer_peak_bytes)}, limit_seconds, compare=False)
    return {**row, "plan_overhead": plan.overhead, "lower_bound_overhead": plan.lower_bound_overhead}


def _plan(figure: Figure, budget: dict[str, Any], limit_seconds: float, *, compare: bool) -> Plan:
    loaded = zoo.build(figure.model, **figure.sizes, fake_mode=fake_mode())
    return api.plan(
        loaded.model,
        Inputs.of(loaded.example_args, loaded.example_kwargs),
        name=figure.model,
        **grouped(device=figure.device, time_limit_seconds=limit_seconds, compare=compare, **budget, **figure.training),
    )


def _gigabytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 1e9:.1f}"


def _cells(row: Result) -> list[object]:
    return [
        row["figure"],
        row["published"],
        f"{_gigabytes(row['peak_bytes'])} to {_gigabytes(row['every_layer_peak_bytes'])} GB",
        percent(row["every_layer_overhead"]),
        percent(row.get("plan_overhead")),
        percent(row.get("lower_bound_overhead")),
    ]


def _markdown(result: Result) -> str:
    headings = ["figure", "published", "predicted", "every layer adds", "a plan at that peak adds", "lower bound"]
    notes = [
        f"## {row['figure']}\n\nPublished: {row['published']}. Stated: {row['stated']}.\n\n"
        f"Predicted for `{row['model']}` with {common.sizes_text(row['sizes'])} on {row['device']}. "
        f"Assumed: {row['assumed']}. {_gigabytes(row['static_bytes'])} GB are resident before the step; a step without "
        f"recompute takes {1e3 * row['step_seconds']:,.0f} ms by the roofline.\n\n{row['finding']}"
        for row in result["rows"]
    ]
    return common.page(
        "Published figures",
        result,
        "Published figures on activation checkpointing, compared with the planner's predictions for the stated "
        "settings. GB are 10^9 bytes on the whole device, without the CUDA context (0.3 to 0.6 GB) and the allocator's "
        "reserve, both of which tools such as nvidia-smi add. Times are those of a roofline: ratios mean more than "
        "milliseconds. *Every layer* is the full checkpointing of Hugging Face and torchtitan; if the optimizer's own "
        "step has a higher peak, a plan may use that much.",
        common.table(headings, [_cells(row) for row in result["rows"]]),
        *notes,
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
