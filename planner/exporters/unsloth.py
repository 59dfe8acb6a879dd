"""Unsloth: ``use_gradient_checkpointing`` and ``checkpoint_skip_layers`` of ``get_peft_model``.

Every layer is checkpointed but so many that are spread evenly, the last of each share. The value
``"unsloth"`` would move boundaries to host memory, which the plan does not count on.
Source: ``unsloth/models/_utils.py`` (skip_checkpointing) and ``unsloth/models/llama.py`` (get_peft_model)
in unslothai/unsloth, and https://docs.unsloth.ai.
"""

from __future__ import annotations

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._whole_modules import OwnLayers
from planner.plans.plan import Plan


class _Unsloth(OwnLayers):
    name = "unsloth"
    summary = "every layer runs again but some that it spreads evenly, where the plan chooses single operations"
    eager = True
    lost = ("Unsloth replaces parts of the layers by kernels of its own, and checkpoints with reentrance",)

    def place(self, step: ExportStep) -> Placement:
        placements, row = [], step.row
        for count in range(len(row)):
            kept = {(share + 1) * len(row) // count - 1 for share in range(count)}
            groups = tuple((layer,) for index, layer in enumerate(row) if index not in kept)
            placements.append(Placement(groups=groups, settings={"checkpoint_skip_layers": count}))
        return step.best_of(placements)

    def write(self, placement: Placement, plan: Plan) -> str:
        skipped = placement.settings.get("checkpoint_skip_layers", 0)
        return f"""\
# FastLanguageModel.get_peft_model(model, **CHECKPOINTING, ...)
CHECKPOINTING = {{
    "use_gradient_checkpointing": {bool(placement.groups)},
    "checkpoint_skip_layers": {skipped},
}}
"""


EXPORTER = _Unsloth()
