"""Transformers: the flag ``gradient_checkpointing`` of each layer.

``activation_checkpointing_enable`` (transformers 5; the ``gradient_...`` name is deprecated) sets the
flag on every n-th ``GradientCheckpointingLayer`` and the function that they call; set layer by layer
after it, the flags say exactly which. The Trainer calls it once more if its own option is on, which
overwrites them.
Source: ``src/transformers/modeling_layers.py``, ``modeling_utils.py`` and ``trainer.py`` in
huggingface/transformers, and https://huggingface.co/docs/transformers/grad_checkpointing.
"""

from __future__ import annotations

import json

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._whole_modules import WITHOUT_CACHE, WholeModules, names
from planner.plans.plan import Plan


class _HuggingFace(WholeModules):
    name = "huggingface"
    summary = "recomputes whole layers, where the plan chooses single operations"
    lost = ("only a GradientCheckpointingLayer can be set: for any other layer the code stops and says so",)

    def takes(self, modules: tuple[str, ...]) -> bool:
        return all(module.rpartition(".")[2].isdigit() for module in modules)

    def place(self, step: ExportStep) -> Placement:
        chosen = step.best_modules(step.blocks)
        return Placement(modules=chosen.modules, settings=_as_trainer_options(step, chosen.modules))

    def write(self, placement: Placement, plan: Plan) -> str:
        options = json.dumps(dict(placement.settings)).replace("true", "True").replace("false", "False")
        same = f"TRAINING_ARGUMENTS = {options}\n\n" if placement.settings else ""
        hint = (
            "# Or, if the model has no other layers of this kind, pass **TRAINING_ARGUMENTS to TrainingArguments."
            if placement.settings
            else "# Leave activation_checkpointing of TrainingArguments off: it would choose other layers."
        )
        layers = names("LAYERS", placement.modules)
        return self.filled(hint=hint, same=same, layers=layers, without_cache=WITHOUT_CACHE)


def _as_trainer_options(step: ExportStep, modules: tuple[str, ...]) -> dict[str, object]:
    """Return the Trainer's own options, if they choose the same layers: every n-th, from the first on."""
    for n in range(1, len(step.blocks) + 1):
        if step.blocks[::n] == modules:
            return {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": n},
            }
    return {}


EXPORTER = _HuggingFace()
