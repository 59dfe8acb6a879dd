"""Keras 3: ``RematScope(mode="list_of_layers", layer_names=...)``.

Layers that are made within the scope, and whose name is in its list, run again in the backward.
Source: ``keras/src/backend/common/remat.py`` and ``keras/src/layers/layer.py`` in keras-team/keras, and
https://keras.io/api/utils/rematerialization_utils/.
"""

from __future__ import annotations

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._text import names
from planner.exporters._whole_modules import OwnLayers
from planner.plans.plan import Plan


class _Keras(OwnLayers):
    name = "keras"
    summary = "whole layers run again, where the plan chooses single operations of the PyTorch model"
    lost = (
        "the model there is another, in another framework: the choice carries over by the names of layers, and its "
        "memory is that framework's",
    )

    def place(self, step: ExportStep) -> Placement:
        return step.best_modules(step.blocks)

    def write(self, placement: Placement, plan: Plan) -> str:
        return f"""\
# Give the Keras layers these names, and make the model within the scope: with planned_scope(): model = ...
import keras

{names("LAYERS", (module.replace(".", "_") for module in placement.modules))}

def planned_scope():
    return keras.RematScope(mode="list_of_layers" if LAYERS else None, layer_names=list(LAYERS))
"""


EXPORTER = _Keras()
