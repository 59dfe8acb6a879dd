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

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._whole_modules import OwnLayers, comment
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


EXPORTER = _Megatron()
