"""Megatron-LM: the arguments ``--recompute-...``.

``full`` runs whole layers again: with ``block`` the first N of each virtual pipeline stage, each by
itself, with ``uniform`` all, N at a time. ``selective`` runs parts again in every layer and takes
neither. Of the parts that it names, only ``mlp`` can be found in a model of another library; recomputing
``core_attn`` frees next to nothing where attention is one fused kernel.
Source: ``megatron/core/transformer/transformer_config.py`` and ``transformer_block.py`` in
NVIDIA/Megatron-LM, and https://docs.nvidia.com/megatron-core/developer-guide/latest/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.analysis.splits.stages import has_short_ends
from planner.analysis.splits.table import ModelTable
from planner.analysis.splits.types import OPTIMIZER, Estimate, Question
from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._text import comment
from planner.exporters._whole_modules import OwnLayers
from planner.plans.plan import Plan

_MLP = ("mlp", "feed_forward", "ffn")
"""What libraries call the part that is ``mlp`` to Megatron."""


class _Megatron(OwnLayers):
    name = "megatron"
    summary = "it recomputes the first N layers, all in groups, or the MLP of each; the plan chooses single operations"
    language = "shell"
    lost = (
        "the layers there are Megatron's own, with kernels of its own: the choice carries over by number",
        "the figures are of one pipeline stage; block counts layers of each virtual stage",
    )

    def place(self, step: ExportStep) -> Placement:
        return step.best_of(_placements(step))

    def write(self, placement: Placement, plan: Plan) -> str:
        options = "".join(f"    {option} {value}\n" for option, value in placement.settings.items())
        hint = comment('Append "${RECOMPUTE_ARGS[@]}" to the arguments of the training script.')
        return f"{hint}RECOMPUTE_ARGS=(\n{options})\n"


def _placements(step: ExportStep) -> Iterator[Placement]:
    row = step.row
    for count in range(1, len(row) + 1):
        yield _full("block", count, [(layer,) for layer in row[:count]])
    for size in range(2, len(row) + 1):
        yield _full("uniform", size, [row[first : first + size] for first in range(0, len(row), size)])
    parts = set(step.modules)
    for part in _MLP:
        if all(f"{layer}.{part}" in parts for layer in row):
            yield Placement(
                groups=tuple((f"{layer}.{part}",) for layer in row),
                settings={"--recompute-granularity": "selective", "--recompute-modules": "mlp"},
            )


def _full(method: str, layers: int, groups: Sequence[tuple[str, ...]]) -> Placement:
    settings = {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": layers}
    return Placement(groups=tuple(groups), settings=settings)


def split_arguments(estimate: Estimate, table: ModelTable, question: Question) -> str:
    """Return the arguments of Megatron-LM for a split, beside those that name the model.

    All stages are told one number of layers to run again: what the one needs that needs most.
    """
    split = estimate.split
    told: dict[str, object] = {
        "--tensor-model-parallel-size": split.tensor,
        "--pipeline-model-parallel-size": split.pipeline,
        "--context-parallel-size": split.context,
        "--micro-batch-size": split.micro_batch,
        "--global-batch-size": question.global_batch,
        "--seq-length": table.tokens,
    }
    flags = ["--bf16"]
    if split.expert > 1:
        told["--expert-model-parallel-size"] = split.expert
    if split.tensor > 1:
        flags.append("--sequence-parallel")
    if split.chunks > 1:
        told["--num-virtual-stages-per-pipeline-rank"] = split.chunks
    if split.pipeline > 1 and has_short_ends(len(table.row), split.pipeline * split.chunks):
        flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if split.shards > 1:
        flags.append("--overlap-grad-reduce")
    if split.sharding == OPTIMIZER:
        flags += ["--use-distributed-optimizer", "--overlap-param-gather"]
    again = max(-(-stage.count // split.chunks) for stage in estimate.stages)
    if again:
        told |= {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": again}
    return "\n".join([*(f"{option} {value}" for option, value in told.items()), *flags]) + "\n"


EXPORTER = _Megatron()
