"""Splits over many devices: how long the search takes, and how its estimates rank published runs.

Every published run states its split; the estimate is of that very split, with the recompute that it had, and no
constant is fitted. Rank correlations are Spearman's. What two runs of one table share cancels in its order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch

import cost_models
from benchmarks import common
from benchmarks.common import Result, percent
from benchmarks.split_models import LLAMA_8B, LLAMA_70B, LLAMA_405B, LanguageModel, Sizes
from cost_models.devices import DeviceSpec
from cost_models.roofline import share_of_products
from planner import zoo
from planner.capture import fake_mode
from planner.capture.inputs import Inputs
from planner.common.options import Target, Training
from planner.extras.splits.best import PROBED_LAYERS
from planner.extras.splits.captured_table import ATTENTION, split_table
from planner.extras.splits.estimate import Estimator
from planner.extras.splits.search import search
from planner.extras.splits.table import FULL, Layer, ModelTable, Work
from planner.extras.splits.types import (
    FSDP2,
    REPLICATED,
    Estimate,
    NoSplitFitsError,
    Question,
    Split,
    links_of,
)
from planner.session.step import Options

GOAL_SECONDS = 60.0
GPUS = (8, 32, 128, 512)

A100 = cost_models.device("a100-80")
H100_96 = replace(cost_models.device("h100"), name="h100", memory_bytes=94 * 2**30, bandwidth_bytes_per_second=2.4e12)
"""What torchtitan's tables name: 96 GB of HBM2e at 2.4 TB/s, and 500 W, which lowers its clock; nobody says how far."""

FLASH_2_ON_HOPPER = 0.35
"""What FlashAttention-2 reaches of an H100's peak (Shah et al., "FlashAttention-3", 2024): what torch had when the runs
were made. On an A100 it reaches up to 0.73 (Dao, "FlashAttention-2", 2023): as products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run: its model, its split, and what it reached."""

    source: str
    label: str
    sizes: Sizes
    length: int
    global_batch: int
    device: DeviceSpec
    split: Split
    kept: str
    """The choice of every layer; empty for what fits best of the planner's choices."""
    published: float
    unit: str


_MEGATRON_TOGETHER = (4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0)
"""PetaFLOP/s of all GPUs, in the same table."""


def gpt(width: int, layers: int, heads: int) -> Sizes:
    """Return a GPT of the weak-scaling table."""
    return Sizes(width=width, layers=layers, heads=heads, vocabulary=51200)


MEGATRON = "Narayanan et al. 2021, table 1"
# Width, layers, heads; tensor, pipeline, chunks, micro-batch; GPUs, batch; teraFLOP/s of each GPU.
# The table's other column, petaFLOP/s of all GPUs, says the same as its teraFLOP/s (a test holds them together).
# The settings are also in examples/academic_paper_scripts/sc21/run_table_1.sh of NVIDIA/Megatron-LM, which has the
# sizes of micro-batches and chunks. Sequences are of 2,048 tokens, all layers run again, replicas hold all.
_MEGATRON = {
    "1.7B": (2304, 24, 24, 1, 1, 1, 16, 32, 512, 137),
    "3.6B": (3072, 30, 32, 2, 1, 1, 16, 64, 512, 138),
    "7.5B": (4096, 36, 32, 4, 1, 1, 16, 128, 512, 142),
    "18.4B": (6144, 40, 48, 8, 1, 1, 8, 256, 1024, 135),
    "39.1B": (8192, 48, 64, 8, 2, 1, 4, 512, 1536, 138),
    "76.1B": (10240, 60, 80, 8, 4, 3, 2, 1024, 1792, 140),
    "145.6B": (12288, 80, 96, 8, 8, 2, 2, 1536, 2304, 148),
    "310.1B": (16384, 96, 128, 8, 16, 2, 1, 1920, 2160, 155),
    "529.6B": (20480, 105, 128, 8, 35, 3, 1, 2520, 2520, 163),
    "1008.0B": (25600, 128, 160, 8, 64, 1, 1, 3072, 3072, 163),
}

TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_ASYNC = "pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
# Sizes, length, data, tensor, pipeline, micro-batch, chunks, global batch, kept, tokens/s of each GPU.
# Without a number of micro-batches that version took one for each stage (torchtitan/parallelisms/pipeline_llama.py at
# the commit that the page names). "selective" keeps what is dear to compute: the planner's own plan stands for it.
_TITAN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "8B, FSDP 8": ("bf16", (LLAMA_8B, 8192, 8, 1, 1, 2, 1, 16, "plan 50%", 6667)),
    "8B, FSDP 128": ("bf16", (LLAMA_8B, 8192, 128, 1, 1, 2, 1, 256, "plan 50%", 6514)),
    "8B, FSDP 8, TP 8": ("bf16, June 2025", (LLAMA_8B, 8192, 8, 8, 1, 12, 1, 96, "plan 50%", 4378)),
    "70B, FSDP 32, TP 8": ("bf16, June 2025", (LLAMA_70B, 8192, 32, 8, 1, 16, 1, 512, FULL, 597.3)),
    "8B, FSDP 8, 32k": ("float8, long", (LLAMA_8B, 32768, 8, 1, 1, 1, 1, 8, FULL, 3890)),
    "70B, FSDP 32, TP 8, float8": ("float8", (LLAMA_70B, 8192, 32, 8, 1, 16, 1, 512, FULL, 829)),
    "405B, 1F1B": ("float8, pipelines", (LLAMA_405B, 8192, 8, 8, 8, 4, 1, 256, FULL, 100)),
    "405B, interleaved 1F1B": ("float8, pipelines", (LLAMA_405B, 8192, 8, 8, 8, 4, 2, 256, FULL, 128)),
    "405B, FSDP 8, 32k": ("float8, long", (LLAMA_405B, 32768, 8, 8, 8, 1, 1, 64, FULL, 76)),
}


def megatron_runs() -> Iterator[Run]:
    """Return the runs of Megatron's weak-scaling table."""
    for name, (width, layers, heads, tensor, pipeline, chunks, micro, gpus, batch, reached) in _MEGATRON.items():
        data = gpus // tensor // pipeline
        yield Run(
            source=MEGATRON,
            label=f"{name} on {gpus}",
            sizes=gpt(width, layers, heads),
            length=2048,
            global_batch=batch,
            device=A100,
            split=Split(data, tensor, pipeline, micro, chunks, REPLICATED, "megatron"),
            kept=FULL,
            published=reached,
            unit="teraFLOP/s",
        )


def titan_runs() -> Iterator[Run]:
    """Return the runs of torchtitan's tables."""
    for label, (kind, row) in _TITAN.items():
        sizes, length, data, tensor, pipeline, micro, chunks, batch, kept, reached = row
        yield Run(
            source=f"{TITAN_ASYNC if '2025' in kind else TITAN}: {kind}",
            label=label,
            sizes=sizes,
            length=length,
            global_batch=batch,
            device=H100_96,
            split=Split(data, tensor, pipeline, micro, chunks, FSDP2, "torchtitan"),
            kept=kept,
            published=reached,
            unit="tokens/s",
        )


@cache
def table_of(sizes: Sizes, length: int, device: DeviceSpec) -> ModelTable:
    """Capture two layers of a model for one sample, and tabulate all of it."""
    mode = fake_mode()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode:
            model = LanguageModel(sizes, 2, length)
            tokens = torch.empty(1, length, dtype=torch.int64)
    finally:
        torch.set_default_dtype(torch.float32)
    options = Options(
        target=Target("a100-80" if device is A100 else "h100", cost_model="roofline"),
        training=Training("adamw", master_weights=True),
        name="model",
    )
    return split_table(model, Inputs.of(tokens), None, options, tokens=length).deeper(sizes.layers)


def question_of(run: Run) -> Question:
    """Return the question that a run answers in its way."""
    split = run.split
    gpus = split.data * split.tensor * split.pipeline
    return Question(
        gpus=gpus,
        global_batch=run.global_batch,
        device=run.device,
        links=links_of(run.device, node_devices=min(8, gpus)),
        memory_bytes=run.device.memory_bytes - run.device.library_bytes,
    )


def as_then(work: Work) -> Work:
    """Return an operation with as much more arithmetic as the kernel of attention that torch had then was slower."""
    if ATTENTION not in work.target:
        return work
    today = H100_96.compute_efficiency * share_of_products(work.target, work.dtype, H100_96)
    return replace(work, flops=int(work.flops * today / FLASH_2_ON_HOPPER))


def layer_as_it_was(layer: Layer, run: Run) -> Layer:
    """Return a layer with the choice that the run had, and with the kernels that it had."""
    choices = tuple(choice for choice in layer.choices if choice.name == run.kept)
    if run.device is not H100_96:
        return replace(layer, choices=choices)
    return replace(
        layer,
        forward=tuple(map(as_then, layer.forward)),
        backward=tuple(map(as_then, layer.backward)),
        choices=tuple(replace(choice, reruns=tuple(map(as_then, choice.reruns))) for choice in choices),
    )


def estimated(run: Run, *, overlap: bool = True) -> Estimate:
    """Estimate a run as it was: every layer with the choice that it had."""
    table = table_of(run.sizes, run.length, run.device)
    kinds = tuple(layer_as_it_was(kind, run) for kind in table.kinds)
    question = replace(question_of(run), overlap=overlap)
    return Estimator(replace(table, kinds=kinds), question).estimate(run.split)


def reached(run: Run, estimate: Estimate) -> float:
    """Return an estimate in the unit of what was published; Megatron's counts the arithmetic of recompute too."""
    each = estimate.tokens_per_second_per_gpu
    if run.unit == "tokens/s":
        return each
    sizes, length = run.sizes, run.length
    # The paper's formula (3): with all layers run again, 96 for each token, layer and square of the width.
    whole = 96 * sizes.layers * sizes.width**2
    factor = 1 + length / (6 * sizes.width) + sizes.vocabulary / (16 * sizes.layers * sizes.width)
    return each * whole * factor / 1e12


def utilization(run: Run, estimate: Estimate) -> float:
    """Return the share of the device's peak that the model's own arithmetic has, recompute left out."""
    each = estimate.tokens_per_second_per_gpu
    return each * run.sizes.flops_per_token(run.length) / run.device.peak_flops_per_second("bfloat16")


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks, those of equal values shared.

    >>> ranks([10, 30, 20, 20])
    [0.0, 3.0, 1.5, 1.5]
    """
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None where there is no order.

    >>> correlation([1, 2, 3], [2, 4, 9]), correlation([1, 2, 3], [9, 4, 2])
    (1.0, -1.0)
    """
    a, b = ranks(left), ranks(right)
    middle = (len(a) - 1) / 2
    spread = (sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)) ** 0.5
    if len(a) < 2 or not spread:
        return None
    return round(sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / spread, 3)


def published(runs: Sequence[Run]) -> list[Result]:
    """Estimate published runs."""
    found = []
    for run in runs:
        estimate = estimated(run)
        predicted = reached(run, estimate)
        common.progress(f"{run.label}: {predicted:.0f}, published {run.published:g} {run.unit}")
        found.append(
            {
                "source": run.source,
                "run": run.label,
                "split": str(run.split),
                "kept": run.kept,
                "unit": run.unit,
                "published": run.published,
                "predicted": predicted,
                "ratio": predicted / run.published,
                "predicted_without_overlap": reached(run, estimated(run, overlap=False)),
                "published_utilization": utilization(run, estimate) * run.published / predicted,
                "predicted_utilization": utilization(run, estimate),
                "predicted_peak_bytes": estimate.peak_bytes,
                "fits": estimate.fits,
                "shares": {name: s / estimate.step_seconds for name, s in estimate.seconds.items() if s},
            }
        )
    return found


def agreement(rows: Sequence[Result]) -> Result:
    """Say how the order of estimates agrees with what was published, and how far the estimates are off."""
    ratios = [row["ratio"] for row in rows]
    return {
        "runs": len(rows),
        "rank_correlation": correlation([r["predicted"] for r in rows], [r["published"] for r in rows]),
        "rank_correlation_without_overlap": correlation(
            [r["predicted_without_overlap"] for r in rows], [r["published"] for r in rows]
        ),
        "rank_correlation_of_utilization": correlation(
            [r["predicted_utilization"] for r in rows], [r["published_utilization"] for r in rows]
        ),
        "median_ratio": median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def searches() -> list[Result]:
    """Time the search for two models on more and more devices, capture and all."""
    found = []
    for name, build in (("llama-7b (zoo)", _zoo_table), ("Llama 3 70B", _table_70b)):
        began = time.process_time()
        table = build()
        capture_seconds = time.process_time() - began
        for gpus in GPUS:
            device = cost_models.device("h100")
            question = Question(
                gpus=gpus,
                global_batch=max(512, 2 * gpus),
                device=device,
                links=links_of(device),
                memory_bytes=device.memory_bytes - device.library_bytes,
            )
            began = time.process_time()
            row: Result = {"model": name, "gpus": gpus, "global_batch": question.global_batch}
            try:
                answer = search(table, question)
            except NoSplitFitsError as error:
                smallest = error.minimum_feasible_peak_bytes
                row |= {"best": f"none fits: smallest with {error.operation}", "peak_bytes": smallest}
                row |= {"capture_seconds": capture_seconds, "search_seconds": time.process_time() - began}
                found.append(row)
                continue
            search_seconds = time.process_time() - began
            best = answer.best[0]
            common.progress(f"{name} on {gpus}: {best.split}, {search_seconds:.1f} s")
            found.append(
                {
                    **row,
                    "best": str(best.split),
                    "tokens_per_second_per_gpu": best.tokens_per_second / gpus,
                    "peak_bytes": best.peak_bytes,
                    "considered": answer.considered,
                    "capture_seconds": capture_seconds,
                    "search_seconds": search_seconds,
                }
            )
    return found


def _zoo_table() -> ModelTable:
    loaded = zoo.build("llama-7b", batch_size=1, layers=PROBED_LAYERS, fake_mode=fake_mode())
    options = Options(
        target=Target("h100", cost_model="roofline"),
        training=Training("adamw", master_weights=True),
    )
    inputs = Inputs.of(loaded.example_args, loaded.example_kwargs)
    return split_table(loaded.model, inputs, loaded.loss_fn, options, tokens=2048).deeper(32)


def _table_70b() -> ModelTable:
    return table_of(LLAMA_70B, 8192, cost_models.device("h100"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = common.parser("splits", __doc__)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    args = parser.parse_args(typed)
    result = common.environment("splits", typed)
    rows = published([*megatron_runs(), *titan_runs()])
    result["searches"] = searches()
    result["published"] = rows
    result["agreement"] = {
        source: agreement([row for row in rows if row["source"] == source])
        for source in dict.fromkeys(row["source"] for row in rows)
    }
    result["agreement"] |= {
        "all of torchtitan": agreement([row for row in rows if row["unit"] == "tokens/s"]),
        "all": {**agreement(rows), "rank_correlation": None, "rank_correlation_without_overlap": None},
    }
    result["met"] = all(row["capture_seconds"] + row["search_seconds"] < GOAL_SECONDS for row in result["searches"])
    common.write(args.json, result, markdown(result))
    return 0 if result["met"] else 1


def markdown(result: Result) -> str:
    """Write the page."""
    found = common.table(
        ["model", "GPUs", "samples", "best split", "tokens/s/GPU", "peak GiB", "splits", "capture s", "search s"],
        [
            [
                row["model"],
                row["gpus"],
                row["global_batch"],
                row["best"],
                f"{row['tokens_per_second_per_gpu']:,.0f}" if "considered" in row else "-",
                f"{row['peak_bytes'] / 2**30:.1f}",
                row.get("considered", "-"),
                f"{row['capture_seconds']:.1f}",
                f"{row['search_seconds']:.1f}",
            ]
            for row in result["searches"]
        ],
    )
    agreed = common.table(
        [
            "source",
            "runs",
            "rank correlation",
            "nothing hidden",
            "of utilization",
            "predicted/published: median",
            "least",
            "most",
        ],
        [
            [
                source,
                row["runs"],
                _number(row["rank_correlation"]),
                _number(row["rank_correlation_without_overlap"]),
                _number(row["rank_correlation_of_utilization"]),
                f"{row['median_ratio']:.2f}",
                f"{row['least_ratio']:.2f}",
                f"{row['most_ratio']:.2f}",
            ]
            for source, row in result["agreement"].items()
        ],
    )
    rows = common.table(
        ["run", "source", "split", "kept", "published", "predicted", "ratio", "peak GiB", "most time beside compute"],
        [
            [
                row["run"],
                row["source"],
                row["split"],
                row["kept"],
                f"{row['published']:g} {row['unit']}",
                f"{row['predicted']:.4g}",
                f"{row['ratio']:.2f}",
                f"{row['predicted_peak_bytes'] / 2**30:.0f}" + ("" if row["fits"] else " (too much)"),
                _beside(row["shares"]),
            ]
            for row in result["published"]
        ],
    )
    return common.page("Splits over many devices", result, found, _ASSUMED, agreed, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _beside(shares: dict[str, float]) -> str:
    beside = sorted(((share, name) for name, share in shares.items() if name != "compute"), reverse=True)
    return ", ".join(f"{name} {percent(share, 0)}" for share, name in beside[:3])


_ASSUMED = (
    "Efficiencies are those that every plan has: products reach 0.7 of the peak rate, attention what is published of "
    "its kernel, memory 0.8 of its bandwidth, collectives 0.8 of a link; attention on torchtitan's H100s reaches the "
    "0.35 that is published of FlashAttention-2 there. None is fitted to a run. Megatron-LM's speeds are those of its "
    "paper, whose two columns of speed agree, its settings those of the script. torchtitan's float8 runs are estimated "
    "in bfloat16, so only their order means anything; its H100 runs at 500 W. 'Utilization' is the model's own "
    "arithmetic over the peak."
)
if __name__ == "__main__":
    sys.exit(common.run(main))
