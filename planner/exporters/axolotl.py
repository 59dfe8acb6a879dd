"""Axolotl: ``gradient_checkpointing`` of its YAML.

``gradient_checkpointing_kwargs`` go to the Trainer of transformers, which takes ``every_n_layers`` out of
them. ``selective_checkpointing``, which keeps what some operators make in these layers, is not used.
Source: ``src/axolotl/utils/schemas/config.py`` and ``src/axolotl/core/builders/base.py`` in
axolotl-ai-cloud/axolotl, and https://docs.axolotl.ai/docs/config-reference.html.
"""

from __future__ import annotations

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._whole_modules import OwnLayers
from planner.plans.plan import Plan


class _Axolotl(OwnLayers):
    name = "axolotl"
    summary = "every n-th layer runs again, where the plan chooses single operations"
    language = "yaml"
    eager = True
    to_the_end = False
    lost = ("Axolotl patches models and may run other kernels: the choice carries over by counting layers",)

    def place(self, step: ExportStep) -> Placement:
        return step.best_of(
            Placement(groups=tuple((layer,) for layer in step.row[::n]), settings={"every_n_layers": n})
            for n in range(1, len(step.row) + 1)
        )

    def write(self, placement: Placement, plan: Plan) -> str:
        if not placement.groups:
            return "gradient_checkpointing: false\n"
        return f"""\
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
  every_n_layers: {placement.settings["every_n_layers"]}
"""


EXPORTER = _Axolotl()
