"""Published figures of activation checkpointing, beside what is predicted for the settings that they state.

For each figure: the peak without recompute, with every layer checkpointed, and what a plan pays at
that peak. No GPU is needed; device times are those of a roofline. Writes ``docs/published-figures.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
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


FIGURES: tuple[Figure, ...] = (
    Figure(
        name="GPT, 12 layers",
        model="gpt2",
        sizes={"batch_size": 2, "seq_len": 1024, "dtype": "float32"},
        device="rtx-3090",
        published="94.3% to 79.4% of the card, 10 to 12% more time",
        stated="12 layers, width 768, sequence 1,024, batch 2, each block checkpointed",
        assumed="float32, AdamW, vocabulary 50,257, fused attention; which card it was is not said",
        finding="Plausible. The predicted saving is 14.9% of a card of 12 to 14 GB. What else filled the card is "
        "not said; the caching allocator's reserve counts in such a reading. The predicted time is that of forward and "
        "backward alone: 10 to 12% of a loop that also loads data, steps an optimizer and logs is less than it.",
    ),
    Figure(
        name="BERT-large",
        model="bert-large",
        sizes={"batch_size": 16, "seq_len": 128, "dtype": "float32"},
        device="rtx-3090",
        published="9,141 to 5,978 MB, 25:16 to 33:36 (33% more time)",
        stated="pretraining on an RTX 3090 of 24 GB",
        assumed="float32, AdamW, batch 16 of 128 tokens, which is what leaves 3.2 GB for activations",
        finding="Plausible. Parameters, gradients and Adam's state alone are 5.4 GB, so 5,978 MB is close to the least "
        "that any plan could reach. Today's default optimizer (foreach) takes 1.3 GB more for a moment of its step, "
        "which then is the larger peak. 33% is the full overhead of checkpointing every layer; the same memory can "
        "cost less.",
    ),
    Figure(
        name="MiniMind 26M",
        model="minimind-26m",
        sizes={"batch_size": 64, "seq_len": 512, "dtype": "float32"},
        device="rtx-3090",
        published="18 to 10 GB, 1.1 to 1.4 h (27% more time)",
        stated="MiniMind 26M on an RTX 3090",
        assumed="float32 parameters and activations, AdamW, batch 64 of 512 tokens",
        finding="The 18 GB and the 27% are plausible at that batch. 10 GB is more than checkpointing each layer should "
        "leave. Either only some layers were checkpointed, or 10 GB is what the allocator reserved.",
    ),
    Figure(
        name="ResNet-152",
        model="resnet152",
        sizes={"batch_size": 32, "image_size": 224, "dtype": "float32"},
        device="a100-40",
        published="7.2 to 3.1 GB",
        stated="ResNet-152",
        assumed="float32, batch 32 of 224 x 224 images, SGD with momentum",
        finding="Plausible: the ratio of the two figures is the predicted one, and the difference of each from its "
        "prediction is what a CUDA context and cuDNN's workspace take.",
        training={"optimizer": "momentum"},
    ),
    Figure(
        name="ViT-B/16",
        model="vit-b16",
        sizes={"batch_size": 96, "image_size": 224, "dtype": "float32"},
        device="a100-40",
        published="12.5 to 5.8 GB",
        stated="ViT-B/16",
        assumed="float32, batch 96 of 224 x 224 images, AdamW, fused attention",
        finding="The 12.5 GB are plausible at that batch. Checkpointing every layer should leave less than 5.8 GB.",
    ),
    Figure(
        name="GPT-2 774M",
        model="gpt2-774m",
        sizes={"batch_size": 4, "seq_len": 1024, "dtype": "float32"},
        device="a100-80",
        published="38 to 16 GB",
        stated="GPT-2 of 774M parameters",
        assumed="float32, AdamW, batch 4 of 1,024 tokens, fused attention",
        finding="Plausible: the ratio is the predicted one. Of the 16 GB, 9.3 GB are parameters and Adam's state. A "
        "plan at that peak can only change the rest, and still pays less than half.",
    ),
    Figure(
        name="LLaMA-7B",
        model="llama-7b",
        sizes={"batch_size": 2, "seq_len": 2048, "dtype": "bfloat16"},
        device="a100-80",
        published="56 to 24 GB",
        stated="LLaMA of 7B parameters",
        assumed="bfloat16, batch 2 of 2,048 tokens, no optimizer state",
        finding="Not plausible for training all parameters: weights and gradients in bfloat16 are 27 GB together, "
        "before any activation. It can be so for adapters on frozen weights, whose gradients are small.",
        training={"optimizer": "none"},
    ),
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
        "figure": figure.name,
        "published": figure.published,
        "stated": figure.stated,
        "assumed": figure.assumed,
        "finding": figure.finding,
        "model": figure.model,
        "sizes": figure.sizes,
        "device": figure.device,
        "peak_bytes": free.baseline_peak_bytes,
        "optimizer_peak_bytes": free.optimizer_peak_bytes,
        "static_bytes": free.total_static_bytes,
        "step_seconds": free.baseline_step_seconds,
        "every_layer_peak_bytes": every.peak_bytes,
        "every_layer_overhead": every.overhead,
    }
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
    headings = ["figure", "published", "predicted", "every layer pays", "a plan at that peak pays", "no plan pays less"]
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
        "What others report of activation checkpointing, beside what is predicted for the settings that they state. "
        "GB are 10^9 bytes of the whole device, without the CUDA context (0.3 to 0.6 GB that tools such as nvidia-smi "
        "add, with what the allocator keeps in reserve). Times are those of a roofline: ratios mean more than "
        "milliseconds. *Every layer* is what Hugging Face's and torchtitan's full checkpointing do; where the "
        "optimizer's own step peaks higher, a plan may use that much.",
        common.table(headings, [_cells(row) for row in result["rows"]]),
        *notes,
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
